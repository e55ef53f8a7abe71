"""Descriptors of the device's memory are kept, handed over, dropped; a grant may arrive first."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

import swapd_client
from swapd import spawn
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Files as Message
from swapd_client.errors import DaemonGone
from swapd_client.session import life
from swapd_client.session.life import Files
from tests.threads import started


@pytest.fixture
def files() -> Iterator[Files]:
    before = os.listdir("/proc/self/fd")
    with closing(Files(1)) as files:
        yield files
    assert os.listdir("/proc/self/fd") == before


def send(files: Files, *numbers: int, writable: bool = False) -> list[OwnedFd]:
    fds = [OwnedFd(os.memfd_create(f"file{n}")) for n in numbers]
    files.add(Message(numbers, writable), fds)
    return fds


def test_what_comes_twice_is_kept_once(files: Files) -> None:
    (first,) = send(files, 1)
    send(files, 1)
    assert files.get(1, writable=False) is first


def test_what_is_dropped_comes_anew(files: Files) -> None:
    send(files, 1, 2)
    send(files, 1, writable=True)
    files.drop((1, 7))
    assert repr(files) == "<Files [(2, False)]>"
    (again,) = send(files, 1)
    assert files.get(1, writable=False) is again


def test_who_is_early_waits(files: Files) -> None:
    taken: list[OwnedFd] = []
    waiting = started(lambda: taken.append(files.take(3, writable=True)))
    send(files, 3, writable=True)
    waiting.join()
    taken[0].close()


def test_no_wait_outlasts_the_session(files: Files) -> None:
    errors: list[Exception] = []
    send(files, 1)

    def wait() -> None:
        try:
            files.get(3, writable=False)
        except DaemonGone as exc:
            errors.append(exc)

    waiting = started(wait)
    files.end()
    waiting.join()
    assert "did not send file 3" in str(errors[0])
    files.close()
    with pytest.raises(DaemonGone):
        files.get(1, writable=False)


async def test_a_call_whose_file_never_comes_is_not_repeated_while_the_daemon_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(_: Files, __: Message, fds: list[OwnedFd]) -> None:
        for fd in fds:
            fd.close()

    monkeypatch.setattr(life, "FILE_S", 0.0)
    monkeypatch.setattr(Files, "add", lose)
    with spawn.daemon(budget="16MiB") as daemon:
        with swapd_client.connect(daemon.folder) as client:
            client.register("a", {"x": b"here"})
            with pytest.raises(DaemonGone, match="did not send file 0"):
                client.acquire("a")
        async with await swapd_client.connect_async(daemon.folder) as other:
            await other.register("a", {"x": b"here"})
            with pytest.raises(DaemonGone, match="did not send file 0"):
                await other.acquire("a")
