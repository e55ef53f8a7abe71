"""A daemon of `swapd.spawn` runs on whatever it says, and its errors reach the caller."""

import os

import pytest

from swapd import spawn
from swapd_client import connect

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


def test_a_user_s_settings_for_other_daemons_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As demo and bench need it: one that lingers for a moment was gone before their first call."""
    for name, value in {"LINGER": "0.001", "CHUNK": "1GiB", "CONFIG": "/nowhere"}.items():
        monkeypatch.setenv(f"SWAPD_{name}", value)
    with spawn.daemon(budget="4MiB") as daemon, connect(daemon.folder) as client:
        client.register("a", {"x": bytearray(1 << 20)})
        with client.acquire("a"):
            assert daemon.process.poll() is None
