"""Two processes load the same files: one copy in host memory, in any order of their deaths."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swapd import spawn
from swapd_client import Client
from tests.files import host_copies
from tests.processes import line_of, start_python, tell

MIB = 1 << 20
NBYTES = 8 * MIB

#: Loads the files that it is given, and reports how; then obeys one line each.
LOADS = Path(__file__).parent / "programs" / "loader.py"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {n: torch.randn(NBYTES // 8) for n in ("a", "b")}
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path


class Loader:
    """A process that loads `files`."""

    def __init__(
        self, daemon: spawn.Spawned, name: str, files: Path, *, stop_at: str = "never"
    ) -> None:
        self.process: subprocess.Popen[str] = start_python(
            LOADS, daemon.folder, name, files, stop_at
        )
        self.expect("here")

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.__exit__(None, None, None)

    def line(self) -> str:
        return line_of(self.process).strip()

    def expect(self, line: str) -> None:
        assert self.line() == line

    def go_on(self) -> None:
        tell(self.process)

    def bits(self) -> tuple[str, bool]:
        """A digest of its values, and whether it read the files itself."""
        self.go_on()
        digest, read = json.loads(self.line())
        return digest, read

    def die(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def await_components(client: Client, *names: str) -> None:
    """Wait until these are registered, or their registration has begun."""
    while {c.name for c in client.status().components} != set(names):
        pass


def host_bytes(daemon: spawn.Spawned) -> int:
    return sum(host_copies(daemon.pid).values())


@pytest.fixture
def digest(files: Path) -> str:
    import hashlib

    from safetensors.torch import load_file

    tensors: dict[str, Any] = load_file(files / "x.safetensors")
    values = b"".join(t.numpy().tobytes() for _, t in sorted(tensors.items()))
    return hashlib.sha256(values).hexdigest()


def test_the_second_has_the_bits_and_fills_nothing(
    daemon: spawn.Spawned, client: Client, files: Path, digest: str
) -> None:
    with Loader(daemon, "one", files) as one:
        one.expect("loaded")
        with Loader(daemon, "two", files) as two:
            two.expect("loaded")
            assert client.status().host_copy_bytes == NBYTES
            assert host_bytes(daemon) == NBYTES
            assert one.bits() == (digest, True)
            assert two.bits() == (digest, False)


def test_who_comes_while_the_first_reads_waits_for_it(
    daemon: spawn.Spawned, client: Client, files: Path, digest: str
) -> None:
    with Loader(daemon, "one", files, stop_at="filling") as one:
        one.expect("filling")
        with Loader(daemon, "two", files) as two:
            await_components(client, "one", "two")
            assert client.status().host_copy_bytes == NBYTES, "two waits for it"
            one.go_on()
            one.expect("loaded")
            two.expect("loaded")
            assert one.bits() == (digest, True)
            assert two.bits() == (digest, False)
            assert host_bytes(daemon) == NBYTES


def test_if_the_first_is_killed_before_its_commit_the_second_reads(
    daemon: spawn.Spawned, client: Client, files: Path, digest: str
) -> None:
    with Loader(daemon, "one", files, stop_at="filling") as one:
        one.expect("filling")
        with Loader(daemon, "two", files) as two:
            await_components(client, "one", "two")
            one.die()
            two.expect("loaded")
            assert two.bits() == (digest, True)
            await_components(client, "two")


def test_if_the_first_is_killed_after_it_the_bytes_stay_with_the_second(
    daemon: spawn.Spawned, client: Client, files: Path, digest: str
) -> None:
    with Loader(daemon, "one", files) as one, Loader(daemon, "two", files) as two:
        one.expect("loaded")
        two.expect("loaded")
        one.die()
        await_components(client, "two")
        assert two.bits() == (digest, two.bits()[1])
        with Loader(daemon, "three", files) as three:
            three.expect("loaded")
            assert three.bits() == (digest, False)
            assert host_bytes(daemon) == NBYTES
    await_components(client)
    while client.status().host_copy_bytes:
        pass
    assert host_bytes(daemon) == 0


def test_who_is_killed_while_it_waits_leaves_nothing(
    daemon: spawn.Spawned, client: Client, files: Path, digest: str
) -> None:
    with Loader(daemon, "one", files, stop_at="filling") as one:
        one.expect("filling")
        with Loader(daemon, "two", files) as two:
            await_components(client, "one", "two")
            two.die()
        await_components(client, "one")
        one.go_on()
        one.expect("loaded")
        assert one.bits() == (digest, True)
        assert host_bytes(daemon) == NBYTES
