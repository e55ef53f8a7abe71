"""A process that was forked is what one that was started is, to itself and to those around it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forked
from tests.guarantees.harness import stop_process

SHOWS = """
import os, sys
print(sys.argv, sys.stdin.read(), os.environ, os.getcwd(), sorted(os.listdir("/proc/self/fd")))
print("an error", file=sys.stderr)
sys.exit(7)
"""


def seen(start: Callable[..., "subprocess.Popen[str]"], folder: Path) -> tuple[int, str, str]:
    reading, writing = os.pipe()
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "LC_CTYPE": "C.UTF-8", "SAID": "ü"}
    with start(
        [sys.executable, "-c", SHOWS, "a", "b c"],
        env=env,
        cwd=folder,
        pass_fds=(writing,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate("some input")
    os.close(reading)
    os.close(writing)
    return process.returncode, out, err


def test_it_has_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    assert seen(forked.Popen, tmp_path) == seen(subprocess.Popen, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
def test_how_it_ends_is_seen(number: signal.Signals) -> None:
    program = "input(); print('up', flush=True); input()"
    command = [sys.executable, "-c", program]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n"
        stop_process(process.pid)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == -number


def test_an_exception_that_nobody_catches_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with forked.Popen([sys.executable, "-c", "{}['missing']"]) as process:
        assert process.wait() == 1
    assert "KeyError: 'missing'" in capfd.readouterr().err


def test_a_program_in_a_file_is_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import __main__\nprint(__main__.__file__ == __file__, __name__)\n")
    with forked.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate() == ("True __main__\n", None)


def test_two_that_are_forked_draw_other_numbers() -> None:
    command = [sys.executable, "-c", "import random, uuid; print(random.random(), uuid.uuid4())"]
    drawn = set[str]()
    for _ in range(2):
        with forked.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            drawn.update(process.communicate()[0].split())
    assert len(drawn) == 4
