"""FILE.toml is read correctly, or refused with the file, the key and a remedy."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import swapd
from tests.files import file_with


def written(folder: Path, text: str) -> Path:
    return file_with(folder / "run.toml", text)


def refused(path: Path) -> str:
    """The reason for the refusal of a file, without its name."""
    said = swapd("run", "-n", path, status=1).stderr
    begin = f"swapd: {path}: "
    assert said.startswith(begin), said
    assert said.count("\n") == 1
    return said.removeprefix(begin)


def stage(**settings: str) -> str:
    lines = [f"{name} = {value}" for name, value in {"command": '"true"', **settings}.items()]
    return "\n".join(["[stages.a]", *lines])


def test_all_of_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    path = written(
        tmp_path,
        """
        [daemon]
        device = "host"
        budget = "1.5GiB"
        runtime_dir = "run"
        patience = 2.5
        stop_timeout = "10s"

        [stages.thinker]
        command = "cat serve.py --name 'a b'"
        directory = "work"
        env = { CUDA_VISIBLE_DEVICES = 0, MODE = "fast" }
        restart = "on-failure"
        retries = 3
        backoff = "500ms"
        ready = "registered"
        stop_timeout = 5

        [stages.talker]
        command = ["sh", "-c", "echo $HOME"]
        after = ["thinker"]
        """,
    )
    daemon, thinker, talker = swapd("run", "-n", path).stdout.splitlines()
    settings = f"--runtime-dir {tmp_path}/run --patience 2.500000 --stop-timeout 10s"
    assert f"swapd serve --device host --budget {3 << 29} {settings} " in daemon
    assert thinker == (
        f"cd {tmp_path}/work && CUDA_VISIBLE_DEVICES=0 MODE=fast cat serve.py --name 'a b'"
        "    # thinker, restart on-failure 3 times, ready when registered"
    )
    assert talker == f"cd {tmp_path} && sh -c 'echo $HOME'    # talker, after thinker"


def test_a_stage_has_its_own_variables_over_those_of_swapd_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "slow")
    shows = stage(
        command='["sh", "-c", "echo $MODE $PYTHONUNBUFFERED $SWAPD_STAGE"]',
        env='{MODE = "fast"}',
    )
    daemon = '[daemon]\ndevice = "host"\nbudget = "8MiB"\nruntime_dir = "run"\n'
    path = written(tmp_path, daemon + shows)
    assert swapd("run", path).stdout == "a | fast 1 a\n"
    monkeypatch.setenv("PYTHONUNBUFFERED", "0")
    assert swapd("run", path).stdout == "a | fast 0 a\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no stage: write [stages.NAME] and command"),
        ("stages = 3", "there is no stage: write [stages.NAME]"),
        ("stages = {a = 3}", "stages.a is no table: write [stages.a]"),
        ("[stages.a", "Expected ']' at the end of a table declaration (at end of document)"),
        (f"{stage()}\n{stage()}", "Cannot declare ('stages', 'a') twice (at line 3, column 10)"),
        ('[stages."a/b"]\ncommand = "x"', "stages: 'a/b' cannot be a name: at most 40 letters"),
        ('[stages.""]\ncommand = "x"', "stages: '' cannot be a name"),
        ("[stage.a]", "stage is not a key of this; did you mean stages?"),
        (stage(comand='"x"'), "stages.a.comand is not a key of this; did you mean command?"),
        (stage(xyz='"x"'), "stages.a.xyz is not a key of this; there are: command, env, directory"),
        ("[stages.a]", "stages.a.command is missing: write command ="),
        (stage(command="3"), "stages.a.command: Expected `str | array`, got `int`"),
        (stage(command='["x", 3]'), "stages.a.command[1]: Expected `str`, got `int`"),
        (stage(command='""'), "stages.a.command is empty: give a command"),
        (stage(command="[]"), "stages.a.command is empty: give a command"),
        (stage(command='"a \'b"'), "stages.a.command: No closing quotation: a quotation mark"),
        (stage(command='["true", "\\u0000"]'), "stages.a.command has a zero byte in it"),
        (stage(command='"no-such-program"'), "stages.a.command: there is no program 'no-such-pro"),
        (stage(command='"./no"'), "stages.a.command: there is no program '/"),
        (stage(command='"./run.toml"'), "run.toml cannot be run: make it executable"),
        (stage(directory='"no"'), "stages.a.directory: no: No such file or directory; it is rel"),
        (stage(directory='"run.toml"'), "run.toml is not a folder"),
        (stage(directory=f'"{"x" * 300}"'), "File name too long"),
        (stage(directory='"~nobody-is-called-so"'), "stages.a.directory: ~nobody-is-called-so: "),
        (stage(env='{"A=B" = "1"}'), "stages.a.env: 'A=B' is not the name of a variable"),
        (stage(env="{A = true}"), "stages.a.env[...]: Expected `int | float | str`, got `bool`"),
        (stage(env='{SWAPD_ENDPOINT = "x"}'), "stages.a.env.SWAPD_ENDPOINT is set by swapd run"),
        (stage(restart='"yes"'), "stages.a.restart: Invalid enum value 'yes'; write no or on-fail"),
        (stage(restart='"always"', retries="0"), "stages.a.retries: Expected `int` >= 1"),
        (
            stage(retries="3"),
            "stages.a.retries is for a stage that restarts: set restart =",
        ),
        (stage(restart='"always"', backoff='"3x"'), "stages.a.backoff: '3x' is not a time span"),
        (stage(restart='"always"', backoff="nan"), "stages.a.backoff: nan is out of range: write"),
        (stage(stop_timeout=f"{10**400}"), "stages.a.stop_timeout: int too large to convert"),
        (stage(stop_timeout="-1"), "stages.a.stop_timeout: -1 is out of range: write 0 to 1d"),
        (
            stage(restart='"always"', ready='"ended"'),
            "stages.a.ready: a stage that always restarts",
        ),
        (
            stage(restart='"always"', ends_all="true"),
            "stages.a.ends_all: a stage that always restarts",
        ),
        (stage(ready='"begun"'), "'begun'; write started or registered or ended"),
        (stage(ends_all="1"), "stages.a.ends_all: Expected `bool`, got `int`"),
        (stage(after='["b"]'), 'stages.a.after: there is no stage "b"; there are: a'),
        (stage(after='["a"]'), "stages.a.after: none of these would ever start: a after a; take"),
        (
            stage() + "\n[daemon]\nbudjet = 3",
            "daemon.budjet is not a setting; did you mean budget?",
        ),
        (stage() + '\n[daemon]\nbudget = "x"', "daemon.budget: 'x' is not a size; write it like"),
        (
            "daemon = 3\n" + stage(),
            "daemon is no table: write [daemon], or [[daemon]] for each GPU",
        ),
        ("daemon = []\n" + stage(), "daemon is no table: write [daemon]"),
        (stage() + '\n[daemon]\ndevice = "hots"', "[[daemon]] 'hots': there is no such device"),
        (stage() + "\n[[daemon]]\n[[daemon]]", "daemon[0].device is missing: name a GPU, as in"),
        (
            stage() + '\n[[daemon]]\ndevice = "cuda:0"\n[[daemon]]\ndevice = "cuda:0"',
            "[[daemon]] cuda:0: another is for this GPU; leave one of them out",
        ),
        (
            stage() + '\n[[daemon]]\ndevice = "cuda"\n[[daemon]]\ndevice = "cuda0"',
            "[[daemon]] cuda0: another is for this GPU; leave one of them out",
        ),
        (
            stage() + '\n[[daemon]]\ndevice = "host"\n[[daemon]]\ndevice = "cuda:1"',
            "[[daemon]] host: several are for GPUs alone; leave it out",
        ),
        (
            stage() + '\n[[daemon]]\ndevice = "cuda:0"\nruntime_dir = "x"\n[[daemon]]\n'
            'device = "cuda:1"',
            "daemon[0].runtime_dir: only a file with one daemon may set it; leave it out",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_key_and_what_to_do(
    text: str, why: str, tmp_path: Path
) -> None:
    assert why in refused(written(tmp_path, text))


def test_a_circle_is_named_all_around(tmp_path: Path) -> None:
    text = "\n".join(
        f'[stages.{name}]\ncommand = "true"\nafter = ["{other}"]'
        for name, other in (("a", "b"), ("b", "c"), ("c", "a"))
    )
    said = refused(written(tmp_path, text))
    assert "none of these would ever start: " in said
    assert said.count(" after ") == 3
    assert any(
        f"{one}; take" in said
        for one in (
            "a after b after c after a",
            "b after c after a after b",
            "c after a after b after c",
        )
    )


def test_a_program_is_looked_for_where_the_stage_looks(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o700)
    for more in ({"env": f'{{PATH = "{tmp_path}"}}'}, {"command": '"./mine"'}):
        swapd("run", "-n", written(tmp_path, stage(**{"command": '"mine"', **more})))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, why in (
        ("no", "No such file or directory"),
        ("folder", "it is no regular file"),
        ("fifo", "it is no regular file"),
        ("binary", "'utf-8' codec"),
    ):
        assert refused(tmp_path / f"{name}.toml").startswith(why)
