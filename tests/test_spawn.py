"""A daemon of `swapd.spawn` runs on whatever it says, and its errors reach the caller."""

import os

import pytest

from swapd import spawn

TALKS = """
import pathlib, signal, sys
print("ready", flush=True)
sys.stderr.write("a warning of many\\n" * 10_000)
folder = sys.argv[sys.argv.index("--runtime-dir") + 1]
pathlib.Path(folder, "said").touch()
signal.pause()
"""


def test_a_daemon_with_many_warnings_goes_on() -> None:
    with spawn.daemon(("-c", TALKS)) as daemon:
        while not (daemon.folder / "said").exists():
            assert daemon.process.poll() is None
            os.sched_yield()


def test_a_daemon_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(spawn.SpawnError, match="no such budget"),
        spawn.daemon(("-c", "import sys; sys.exit('no such budget')")),
    ):
        pass
