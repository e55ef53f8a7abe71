"""bash, zsh and fish complete commands and options of `swapd`."""

import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import forked

from .conftest import environment

ASKED = {
    "bash": {"COMP_WORDS": "swapd st", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "swapd st"},
    "fish": {"_TYPER_COMPLETE_ARGS": "swapd st", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_is_told_the_commands_that_begin_so(shell: str) -> None:
    env = environment(_SWAPD_COMPLETE=f"complete_{shell}", **ASKED[shell])
    process = forked.Popen([sys.executable, "-m", "swapd"], env=env, stdout=PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert "stop" in out
    assert "status" in out
    assert "serve" not in out


@pytest.mark.parametrize(("words", "found"), [("", True), ("-n ", True), ("-- python ", False)])
def test_files_of_stages_are_offered_where_a_command_may_stand(
    words: str, found: bool, tmp_path: Path
) -> None:
    for name in ("run.toml", "run.txt"):
        (tmp_path / name).touch()
    line = f"swapd run {words}{tmp_path}/r"
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    env = environment(_SWAPD_COMPLETE="complete_bash", **asked)
    process = forked.Popen([sys.executable, "-m", "swapd"], env=env, stdout=PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ([str(tmp_path / "run.toml")] if found else [])


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_gets_its_script(shell: str) -> None:
    env = environment(_SWAPD_COMPLETE=f"source_{shell}")
    process = forked.Popen([sys.executable, "-m", "swapd"], env=env, stdout=PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert f"complete_{shell}" in out
