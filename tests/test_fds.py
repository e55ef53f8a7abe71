"""A descriptor is closed exactly once, and crosses a process border whole or not at all."""

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from swapd.shared.fds import FDS_MAX, OwnedFd, recv_packet, reopen_read_only, send_packet

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected SEQPACKET sockets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def memory(content: bytes = b"") -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test"))
    os.write(fd.fileno(), content)
    return fd


def test_closing_twice_closes_once() -> None:
    owned = memory()
    number = owned.fileno()
    owned.close()
    reused = memory()
    assert reused.fileno() == number, "the lowest free number comes back"
    owned.close()
    assert is_open(number), "the second close must not hit a stranger"
    reused.close()


def test_who_takes_it_closes_it() -> None:
    owned = memory()
    number = owned.take()
    owned.close()
    assert is_open(number)
    os.close(number)


def test_a_closed_one_has_no_number() -> None:
    owned = memory()
    owned.close()
    with pytest.raises(ValueError, match="closed"):
        owned.fileno()
    with pytest.raises(ValueError, match="closed"):
        owned.take()
    assert repr(owned) == "<OwnedFd closed>"


def test_a_forgotten_one_is_closed_and_complained_about() -> None:
    kept = [memory()]
    number = kept[0].fileno()
    with pytest.warns(ResourceWarning, match=rf"<OwnedFd {number}> was never closed"):
        kept.clear()
    assert not is_open(number)


def test_a_reopened_one_reads_the_same_memory_and_cannot_write() -> None:
    with memory(b"weights") as owned, reopen_read_only(owned.fileno()) as reader:
        assert os.pread(reader.fileno(), 7, 0) == b"weights"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(reader.fileno(), b"x", 0)
        os.pwrite(owned.fileno(), b"W", 0)
        assert os.pread(reader.fileno(), 7, 0) == b"Weights"


def test_a_packet_brings_its_bytes_and_descriptors(pair: Pair) -> None:
    ours, theirs = pair
    with memory(b"one") as first, memory(b"two") as second:
        send_packet(ours, b"hello", [first.fileno(), second.fileno()])
        send_packet(ours, b"again")
        data, fds = recv_packet(theirs, 100)
        assert (data, [os.pread(fd.fileno(), 3, 0) for fd in fds]) == (b"hello", [b"one", b"two"])
        assert recv_packet(theirs, 100) == (b"again", [])
        assert is_open(first.fileno()), "the sender keeps its own"
        for fd in fds:
            fd.close()


def test_received_descriptors_are_not_inherited(pair: Pair) -> None:
    ours, theirs = pair
    with memory() as sent:
        send_packet(ours, b"x", [sent.fileno()])
        _, (got,) = recv_packet(theirs, 100)
        with got:
            assert not os.get_inheritable(got.fileno())


def test_a_received_one_whose_file_cannot_be_written_is_closed_without_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a network disk that is gone: the process that sent it has the loss."""
    ours, theirs = pair
    close = os.close

    def fails(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with memory() as sent:
        send_packet(ours, b"", [sent.fileno()])
    _, (received,) = recv_packet(theirs, 16)
    number = received.fileno()
    monkeypatch.setattr(os, "close", fails)
    received.close()
    assert not is_open(number)


def test_a_packet_cut_short_is_refused_and_keeps_no_descriptor(pair: Pair) -> None:
    ours, theirs = pair
    with memory() as sent:
        send_packet(ours, b"x" * 101, [sent.fileno()])
        before = open_fds()
        with pytest.raises(ValueError, match="too long"):
            recv_packet(theirs, 100)
        assert open_fds() == before


def test_too_many_descriptors_are_refused_and_none_is_kept(pair: Pair) -> None:
    ours, theirs = pair
    with memory() as sent:
        send_packet(ours, b"x", [sent.fileno()] * (FDS_MAX + 10))
        before = open_fds()
        with pytest.raises(ValueError, match="than 64"):
            recv_packet(theirs, 100)
        assert open_fds() == before
