"""`connect(start=True)`: one daemon for all callers that start it at once; unused, it ends."""

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import swapd
from benchmarks.processes import keepers
from swapd.shared import daemons, runtime_dir
from swapd.shared.fds import OwnedFd
from swapd_client import Client, InvalidArgument, NotRunning, connect, connect_async
from swapd_client.session import starting
from swapd_client.weights import safetensors
from tests.guarantees.harness import PATIENCE_S, World
from tests.processes import PYTHONPATH, line_of, start_python


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder without a daemon; daemons started here end soon after their last session."""
    monkeypatch.setenv("SWAPD_LINGER", "0.3")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with tempfile.TemporaryDirectory(prefix="sw-") as made:
        yield Path(made) / "d"


def daemon_of(client: Client) -> OwnedFd:
    """Becomes readable when the daemon of this client has ended."""
    (pid,) = (d.pid for d in daemons.running() if d.folder == client.session.endpoint)
    assert os.getsid(pid) != os.getsid(0), "it hears the Ctrl-C that is meant for who started it"
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid())
    return OwnedFd(os.pidfd_open(pid))


def has_ended(daemon: OwnedFd) -> bool:
    return bool(select.select([daemon], [], [], PATIENCE_S)[0])


async def test_a_daemon_is_started_shared_and_ends_after_its_last_session(folder: Path) -> None:
    with connect(folder, start=True, budget="8MiB", label="first") as first:
        daemon = daemon_of(first)
        async with await connect_async(folder, start=True, budget="99MiB", label="second") as also:
            status = await also.status()
    assert status.budget_bytes == 8 << 20, "one that is there is used as it is"
    assert [s.label for s in status.sessions] == ["first", "second"]
    with daemon:
        assert has_ended(daemon)


def test_one_started_in_a_unit_of_systemd_keeps_nothing_in_the_unit_s_store(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That store is for the unit's own process: there nobody would take it back."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))
    monkeypatch.setenv("FDSTORE", "512")
    monkeypatch.setenv("SWAPD_KEEP_HOST", "64MiB")
    save_file({"x": torch.zeros(1024)}, tmp_path / "file")
    with connect(folder, start=True, budget="8MiB") as client:
        client.load("a", tmp_path / "file")
        client.unregister("a")
        while not client.status().kept:
            pass
        while not keepers(folder):
            pass  # it begins a moment later
        client.forget()


def test_a_device_is_named_first_and_swapd_has_connect_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
    with swapd.connect("host", start=True, budget="8MiB") as client:
        daemon = daemon_of(client)
        assert client.session.endpoint == folder.parent / "swapd" / "host"
        monkeypatch.setenv("SWAPD_ENDPOINT", str(client.session.endpoint))
        with swapd.connect("cuda:7") as also:  # as under `swapd run`
            assert also.session.endpoint == client.session.endpoint
    with pytest.raises(InvalidArgument, match="names two devices"):
        swapd.connect("host", device="cuda:0")
    with pytest.raises(swapd.NotRunning, match=r"\./host|host"):
        swapd.connect("./host")
    with daemon:
        assert has_ended(daemon)


def test_of_all_that_start_at_once_one_does(folder: Path) -> None:
    def started(n: int) -> Client:
        return connect(folder, start=True, budget="8MiB", label=f"worker {n}")

    with ThreadPoolExecutor(4) as threads, ExitStack() as clients:
        opened = [clients.enter_context(c) for c in threads.map(started, range(4))]
        daemon = daemon_of(opened[0])  # the only one of that folder
        assert len(opened[0].status().sessions) == 4
    with daemon:
        assert has_ended(daemon)


def test_who_started_it_may_die_while_others_use_it(folder: Path) -> None:
    program = f"""
        import swapd_client
        client = swapd_client.connect({str(folder)!r}, start=True, budget="8MiB")
        print("started", flush=True)
        input()
    """
    with start_python(program, env={"SWAPD_LINGER": "0.3"}) as process:
        assert line_of(process) == "started\n"
        with connect(folder, start=True) as other:
            daemon = daemon_of(other)
            other.register("a", {"w": bytearray(b"x" * 4096)})
            process.kill()
            process.wait()
            with other.acquire("a", timeout=PATIENCE_S) as lease:
                assert lease is not None
    with daemon:
        assert has_ended(daemon)


def test_why_it_does_not_start_is_said_to_who_starts_it(folder: Path) -> None:
    with pytest.raises(NotRunning, match=r"900 TiB.* --budget") as said:
        connect(folder, start=True, budget="900TiB")
    assert "\n" not in str(said.value)
    (folder / "strange").touch()
    with connect(folder, start=True, budget="8MiB") as client:  # the folder is swapd's by now
        daemon = daemon_of(client)
    with daemon:
        assert has_ended(daemon)


def test_a_folder_of_others_is_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "mine").touch()
    with pytest.raises(NotRunning, match="'mine'"):
        connect(folder, start=True)
    assert os.listdir(folder) == ["mine"]


def test_one_that_ends_just_now_is_followed_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAPD_LINGER", "0.001")
    with connect(folder, start=True, budget="8MiB") as client:
        daemon = daemon_of(client)
    with connect(folder, start=True, budget="8MiB") as client:
        after = daemon_of(client)
        assert client.status().budget_bytes == 8 << 20
    with daemon, after:
        assert has_ended(daemon)
        assert has_ended(after)


def test_one_that_was_started_by_hand_and_does_not_serve_yet_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = runtime_dir.claim(folder)  # as `swapd serve` does before it allocates
    waited = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        by_hand.close()

    monkeypatch.setattr(starting, "_pause", pause)
    with connect(folder, start=True, budget="8MiB") as client:
        assert waited == [starting.AGAIN_S]
        daemon = daemon_of(client)
    with daemon:
        assert has_ended(daemon)


def test_one_that_has_ended_before_who_starts_it_looks_is_said_to_have_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch_another(*_: object) -> int:
        with subprocess.Popen("true") as process:
            return process.pid

    monkeypatch.setattr(starting, "_launch", launch_another)
    with pytest.raises(NotRunning, match="it ended at once"):
        connect(folder, start=True)


def test_one_that_does_not_serve_in_time_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[OwnedFd] = []
    launch = starting._launch

    def launch_another(_: list[str], *how: Any) -> int:
        pid = launch([sys.executable, "-c", "import signal; signal.pause()"], *how)
        launched.append(OwnedFd(os.pidfd_open(pid)))
        return pid

    monkeypatch.setattr(starting, "_launch", launch_another)
    monkeypatch.setattr(starting, "START_S", 0.5)
    with pytest.raises(NotRunning, match=r"did not serve .* within 0\.5 s, and was ended"):
        connect(folder, start=True)
    with launched[0] as process:
        assert has_ended(process)


def test_one_that_is_there_is_used(world: World) -> None:
    daemon = world.daemon()
    with connect(daemon.folder, start=True, budget="1GiB") as client:
        assert client.status().budget_bytes != 1 << 30
    with pytest.raises(InvalidArgument, match="add start=True"):
        connect(daemon.folder, budget="1GiB")
