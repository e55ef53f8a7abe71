"""A forked process is equal to a started one, to itself and to those around it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swapd.spawn import end_with_parent
from tests import forked

SHOWS = """
import os, sys
print(sys.argv, sys.stdin.read(), os.environ, os.getcwd(), sorted(os.listdir("/proc/self/fd")))
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())
print("an error", file=sys.stderr)
sys.exit(7)
"""


def seen(
    start: Callable[..., "subprocess.Popen[str]"], folder: Path, **options: bool
) -> tuple[int, str, str]:
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
        **options,
    ) as process:
        out, err = process.communicate("some input")
    os.close(reading)
    os.close(writing)
    return process.returncode, out, err


@pytest.mark.parametrize("session", [False, True])
def test_it_has_what_it_was_given_and_nothing_else(session: bool, tmp_path: Path) -> None:
    started = seen(subprocess.Popen, tmp_path, start_new_session=session)
    assert f"{session} {session}" in started[1]
    assert seen(forked.Popen, tmp_path, start_new_session=session) == started


@pytest.mark.parametrize("forks", [True, False])
def test_a_function_is_called_first_if_another_process_can_have_it(forks: bool) -> None:
    dies_with_it = end_with_parent if forks else lambda: end_with_parent()
    shows = "import sys, ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); "
    shows += "print(n.value, 'uvloop' in sys.modules)"  # PR_GET_PDEATHSIG
    with forked.Popen(
        [sys.executable, "-c", shows], preexec_fn=dies_with_it, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate()[0] == f"{int(signal.SIGTERM)} {forks}\n"


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


ENDS = """
import atexit, sys, threading, weakref
from tests import samples
class Told:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, "dropped", sys.modules is None or "os" in sys.modules)
cycle = Told("cycle")
cycle.cycle = cycle
of_the_program = Told("of the program")
samples.told = Told("of a module")
weakref.finalize(cycle, print, "finalized")
atexit.register(print, "at exit")
threading.Timer(0.05, print, ["thread"]).start()
sys.stdout.write("the end has come")
"""


def test_it_ends_with_all_that_the_program_left_to_its_end() -> None:
    said = []
    for start in (forked.Popen, subprocess.Popen):
        with start([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True) as process:
            said.append(process.communicate()[0])
        assert process.returncode == 0
    assert sorted(said[0].splitlines()) == sorted(said[1].splitlines())
    assert said[0].count("dropped") == 3


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "raise SystemExit",
        "raise SystemExit(3)",
        "raise SystemExit(-1)",
        "raise SystemExit('in words')",
        "{}['missing']",
        "print('to nobody')",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout.close()",
        "import threading; threading.Thread(target=print, args=['to nobody']).start()",
    ],
)
def test_it_ends_with_the_status_of_one_that_is_started(program: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ends = []
    for start in (forked.Popen, subprocess.Popen):
        with start(
            [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True
        ) as process:
            words = process.communicate()[1].splitlines()
        ends.append((process.returncode, words[-1:]))
    os.close(writing)
    assert ends[0] == ends[1]
