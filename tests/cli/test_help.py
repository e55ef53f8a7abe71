"""`--help` describes a command completely, in 80 columns."""

from typing import NoReturn

import pytest
from typer.testing import CliRunner

from swapd.cli import app, main
from swapd.cli.app import COMMANDS, app_of, command_of
from swapd.daemon.daemon import RELOADED

from .conftest import swapd


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app_of(), [*words, "--help"], prog_name="swapd", terminal_width=80)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    return " ".join(done.output.split())


def test_the_first_page_says_how_a_daemon_is_found_and_what_a_status_means() -> None:
    shown = help_of()
    for word in ("Which daemon:", "SWAPD_ENDPOINT", "Exit status: 0", "Examples:"):
        assert word in shown
    assert shown.count("...") == 1, "more than [ARGS]... is cut"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_each_option_is_for(command: str) -> None:
    shown = help_of(command)
    assert shown.startswith(f"Usage: swapd {command} ")
    assert (command_of(command).__doc__ or "").split("\n")[0] in shown


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_a_disk_that_is_full_is_one_clear_line(word: str) -> None:
    with open("/dev/full", "w") as full:
        done = swapd(word, stdout=full, status=1)
    assert done.stderr == "swapd: [Errno 28] No space left on device\n"


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(words: list[str]) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "app_for", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_serve_says_which_settings_a_reload_changes() -> None:
    told, _, _ = help_of("serve").partition("change at once")
    told = told.replace("- ", "-")  # a line ends after a hyphen
    assert all(f"--{name.replace('_', '-')}" in told for name in RELOADED)
