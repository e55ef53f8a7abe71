"""The next daemon takes back the host copies that the last one made: no byte is copied or read."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd.shared import protocol
from swapd_client import Client
from swapd_client.memory.part import Part
from swapd_client.registration import register_again
from swapd_client.weights import safetensors
from tests.guarantees.harness import MIB, Daemon, World

NAMES = ("a", "b")
NBYTES = 4 * MIB  # of each component


def values() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randn(512, 1024, generator=numbers) for name in NAMES}


def inode(part: Part) -> int:
    """Identifies its host copy."""
    assert part.master is not None
    return os.fstat(part.master.fileno()).st_ino


def join(daemon: Daemon, lost: Client, parts: list[Part] | None = None) -> Client:
    """Register all that `lost` had with another daemon."""
    parts = parts or lost.session.registry.all()
    lost.close()
    client = swapd_client.connect(daemon.folder)
    register_again(client.leasing, parts)
    return client


def test_host_copies_are_the_same_files_and_a_written_one_is_copied(world: World) -> None:
    tensors, others = values(), values()
    daemon = world.daemon()
    client = swapd_client.connect(daemon.folder)
    clean = client.register("clean", tensors)._part
    written = client.register("written", others)._part
    before = inode(clean), inode(written)
    pointers = [t.data_ptr() for t in tensors.values()]
    for round_ in range(1, 3):
        daemon.kill()
        client.close()
        others["a"][0, 0] = round_  # private memory now
        daemon = world.daemon()
        client = join(daemon, client, [clean, written])
        assert inode(clean) == before[0]
        assert inode(written) != before[1]
        assert [t.data_ptr() for t in tensors.values()] == pointers
        assert daemon.status().host_copy_bytes == clean.nbytes + written.nbytes
        with client.acquire("clean", "written"):
            assert all(torch.equal(tensors[name], values()[name]) for name in NAMES)
            assert others["a"][0, 0] == round_
    client.close()


def test_replicas_share_one_host_copy_after_a_restart_too(world: World, tmp_path: Path) -> None:
    """The files are gone by then."""
    save_file(values(), tmp_path / "m.safetensors")
    daemon = world.daemon()
    clients = [swapd_client.connect(daemon.folder) for _ in range(3)]
    loaded = [
        client.load(f"replica-{i}", tmp_path / "m.safetensors", progress=False)
        for i, client in enumerate(clients)
    ]
    one = daemon.status().host_copy_bytes
    (tmp_path / "m.safetensors").unlink()
    daemon.kill()
    daemon = world.daemon()
    clients = [join(daemon, client) for client in clients]
    assert daemon.status().host_copy_bytes == one
    for i, client in enumerate(clients):
        with client.acquire(f"replica-{i}"):
            assert torch.equal(loaded[i].tensors["a"], values()["a"])
    for client in clients:
        client.close()
    while daemon.status().host_copy_bytes:
        """A thread of the daemon drops it."""


def sealed(nbytes: int, seals: int, *, fill: bytes = b"\x01") -> int:
    fd = os.memfd_create("handed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, fill * nbytes, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offers(kind: str) -> list[int]:
    """Descriptors that are no host copy of that many bytes to which no process can write."""
    match kind:
        case "writable":
            return [sealed(NBYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)]
        case "too small":
            return [sealed(NBYTES - 1, fcntl.F_SEAL_WRITE)]
        case "sealed for good":
            return [sealed(NBYTES, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)]
        case "a pipe":
            return list(os.pipe())[:1]
        case "a file":
            return [os.open(__file__, os.O_RDONLY)]
    return [sealed(NBYTES, fcntl.F_SEAL_WRITE) for _ in range(200)]


@pytest.mark.parametrize(
    "kind", ["writable", "too small", "sealed for good", "a pipe", "a file", "very many"]
)
def test_what_cannot_be_a_host_copy_is_left(world: World, kind: str) -> None:
    """The component gets a new one, and the daemon keeps no descriptor."""
    daemon = world.daemon()
    client = swapd_client.connect(daemon.folder)
    client.register("before", {"a": torch.ones(NBYTES, dtype=torch.uint8)})
    files = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    session, given = client.session, offers(kind)
    for n, fd in enumerate(given):
        request = session._ids + 1 if len(given) == 1 else 1 << 30 | n
        session.lifeline.send(protocol.HandBack(request), [fd])
        os.close(fd)
    tensor = torch.full((NBYTES,), 7, dtype=torch.uint8)
    client.register("a", {"a": tensor})
    with client.acquire("a"):
        assert bool((tensor == 7).all())
    client.close()
    while daemon.status().host_copy_bytes or len(os.listdir(f"/proc/{daemon.pid}/fd")) > files:
        """A thread of the daemon drops them."""


def test_a_hand_back_without_a_descriptor_ends_its_session_alone(world: World) -> None:
    daemon = world.daemon()
    client, other = (swapd_client.connect(daemon.folder) for _ in range(2))
    client.session.lifeline.send(protocol.HandBack(1))
    daemon.await_record("SessionGone")
    other.register("a", {"a": torch.ones(NBYTES, dtype=torch.uint8)})
    other.close()
    with pytest.raises(swapd_client.InvalidArgument, match="without its descriptor"):
        client.status()
    client.close()


def test_an_updated_one_is_not_taken_for_what_its_files_say(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where host copies are kept, the daemon vouches for bytes, and nobody compares them."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))
    save_file(values(), file := tmp_path / "x.safetensors")
    settings = {"keep_host": "64MiB", "host_memory": "64MiB"}
    daemon = world.daemon(**settings)
    client = swapd_client.connect(daemon.folder)
    client.load("updated", file)
    client.update("updated", {"a": torch.zeros(512, 1024)})
    daemon.kill()
    daemon = world.daemon(**settings)
    client = join(daemon, client)
    with swapd_client.connect(daemon.folder) as other:
        loaded = other.load("x", file)
        with other.acquire("x"):
            assert all(torch.equal(loaded.tensors[name], value) for name, value in values().items())
    client.close()
