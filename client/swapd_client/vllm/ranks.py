"""The ranks of one stage take their leases one after the other, in the order of their daemons.

Each rank's weights are in the daemon of its own GPU, and a step needs all ranks: a rank with a
lease waits in a collective for ranks without. No daemon sees that wait, so two stages on two GPUs
could hold one lease each and wait for each other for ever. Two rules prevent this:

1. A rank asks for its lease when the rank before it holds a lease for the same step, and then tells
   the next rank. The order of the daemons is the same for all stages.
2. A lease kept from an earlier step counts for this step only when the rank's turn has come. A rank
   that must wait for memory tells the ranks after it, which give back kept leases that others want.
   Between steps the stage's own thread does so.

Call a lease firm if it is wanted and its rank keeps it until a step is over. That step waits only
for later ranks: earlier ranks hold leases too, or have done their share. Each later rank is about
to hold a lease, or waits at its daemon for another firm lease. So all waits lead to later daemons,
without cycles, and the last wait is for a step whose ranks all hold leases. Such a step ends.

Hence each rank may decide alone to keep a lease, to give it back, or to rejoin a daemon between two
steps (registering waits for no lease). A rank that always fits, or whose daemon is gone, still
tells the next rank.

A pipeline has several steps in flight. The rules hold, because a rank in a step waits only for what
others do in that step or in an earlier one. vLLM's executor `mp` tells all ranks of each step at
once. Executors that may call a rank only when it has input are refused, because the input may come
from a rank that waits for its turn.

All ranks must make the same calls in the same order, as vLLM's executors do. They are on one host,
each connected with the next, so the others notice when a rank dies.
"""

import ctypes
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swapd.shared import vm
from swapd.shared.fds import OwnedFd, peer_of, recv_packet, send_packet
from swapd_client.errors import SwapdError

#: Seconds to wait for the next rank to connect; all ranks exist by then.
MEET_S = 60.0

_HOLDS = b"+"
_WAITS = b"?"
_CANNOT = b"-"
_LONGEST = 4096
_RANK = re.compile(r"\.tp\d+$")


class RanksApart(SwapdError, RuntimeError):
    """The ranks of a stage cannot take turns together as they were started."""


class RankGone(SwapdError, RuntimeError):
    """Another rank of the stage has ended, or could not get its memory: no step is possible."""


class Seat(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    address: str
    folder: str
    #: Device and inode of the folder: the same by all paths and in all containers.
    daemon: tuple[int, int] | None


class LossCounts:
    """The number of losses of each rank of a stage, in memory that the ranks share.

    A rank writes its number before it computes a step, and changes the step's result only by what
    it sends afterwards. So a rank that reads all numbers after the step sees at least the losses
    that the step can have read.
    """

    def __init__(self, memory: OwnedFd | None = None, rank: int = 0, ranks: int = 1) -> None:
        """Map `memory`, which stays the caller's: eight bytes for each rank, 0 at first."""
        self._rank, self.ranks = rank, ranks
        count = ctypes.c_uint64 * ranks
        if memory is None:
            self._counts = count()
            return
        address = vm.map_shared(memory.fileno(), 0, ctypes.sizeof(count), writable=True)
        self._counts = count.from_address(address)
        vm.free_with(self, address, ctypes.sizeof(count))

    @property
    def total(self) -> int:
        """The losses of all ranks; never decreases."""
        return sum(self._counts)

    def set(self, losses: int) -> None:
        self._counts[self._rank] = losses


class _Link(NamedTuple):
    rank: int
    sock: socket.socket


class Ranks:
    """One rank's place in the order. Used by the thread that steps; `wake` by any thread."""

    def __init__(
        self, rank: int, folder: Path, share: Callable[[str], Sequence[str]], *, stage: str
    ) -> None:
        """Meet the other ranks. Blocks until all are there.

        `folder`: the runtime folder of this rank's daemon. `share` blocks until all ranks have
        called it, and returns all their strings. Raises: RanksApart, in all ranks alike if their
        daemons are the reason; RankGone.
        """
        self._rank = rank
        self._stage = stage
        self._lock = threading.Lock()
        self._closed = False
        self._last: _Link | None = None
        self._next: _Link | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind("")  # the kernel picks a name, which ends with the socket
            door.listen()
            mine = Seat(rank, os.getpid(), door.getsockname()[1:].decode(), *daemon_at(folder))
            self._mine = mine
            said = share(msgspec.json.encode(mine).decode())
            seats = in_order([msgspec.json.decode(seat, type=Seat) for seat in said], stage)
            self.in_turn = [seat.rank for seat in seats]
            at = seats.index(mine)
            try:
                if at > 0:
                    self._last = self._reach(seats[at - 1])
                if at + 1 < len(seats):
                    self._next = self._let_in(door, seats[at + 1])
                self.loss_counts = self._meet(len(seats))
            except BaseException:
                _close(self._last)
                _close(self._next)
                raise
        self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC))
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        if self._last is not None:
            self._poll.register(self._last.sock, select.POLLIN)

    @contextmanager
    def acquiring(
        self, wanted: Callable[[], bool], give_back: Callable[[], None]
    ) -> Iterator[None]:
        """Wait for this rank's turn. The block acquires its lease; then the next rank is told.

        Call it once for each step, also if the lease was kept. The block calls `waits` before it
        waits for memory. While an earlier rank waits for memory, this one calls `give_back()` once
        `wanted()` is true; each `wake` has it look again. If the block raises, so do the turns of
        all later ranks. Raises: RankGone; if the next rank is gone, the lease may be held.
        """
        try:
            self._wait(wanted, give_back)
            yield
        except BaseException as exc:
            text = str(exc) if isinstance(exc, RankGone) else self._failed(exc)
            with suppress(RankGone):
                self._tell(_CANNOT + text.encode()[: _LONGEST - 1])
            raise
        self._tell(_HOLDS)

    def waits(self) -> None:
        """Tell later ranks that this one will wait for memory. Never blocks. Raises: RankGone."""
        self._tell(_WAITS)

    def check_place(self) -> None:
        """Raise RanksApart unless a restarted daemon has the place of the first one."""
        folder, daemon = daemon_at(Path(self._mine.folder))
        if daemon != self._mine.daemon:
            raise RanksApart(
                f"{folder} has been replaced since rank {self._rank} of {self._stage} started, "
                "and the order of ranks depends on it: start the stage again"
            )

    def wake(self) -> None:
        """Have a waiting rank look whether its lease is wanted. Does not block."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake.fileno(), 1)

    def close(self) -> None:
        """Leave: waits here, and the neighbours' next turns, raise RankGone. Idempotent."""
        with self._lock:
            self._closed = True
            _close(self._last)
            _close(self._next)
            self._wake.close()

    def _wait(self, wanted: Callable[[], bool], give_back: Callable[[], None]) -> None:
        if self._last is None:
            return
        must_give = False
        while (said := self._heard(self._last)) != _HOLDS:
            if said == _WAITS:
                must_give = True
                self.waits()
            elif said is not None:
                raise RankGone(said[len(_CANNOT) :].decode(errors="replace"))
            elif must_give and wanted():
                give_back()
            else:
                self._sleep()

    def _sleep(self) -> None:
        ready = self._poll.poll()
        with self._lock:
            if not self._closed and (self._wake.fileno(), select.POLLIN) in ready:
                os.eventfd_read(self._wake.fileno())

    def _heard(self, link: _Link) -> bytes | None:
        try:
            said = link.sock.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise self._gone(link.rank) from exc
        if not said:
            raise self._gone(link.rank)
        return said

    def _tell(self, message: bytes, fds: Sequence[int] = ()) -> None:
        if self._next is not None:
            try:
                send_packet(self._next.sock, message, fds)
            except OSError as exc:
                raise self._gone(self._next.rank) from exc

    def _gone(self, rank: int) -> RankGone:
        return RankGone(
            f"rank {rank} of {self._stage} has ended, and the stage cannot go on without it; its "
            "log has the reason. Start the stage again"
        )

    def _failed(self, exc: BaseException) -> str:
        what = str(exc) or type(exc).__name__
        return f"rank {self._rank} of {self._stage} could not get its memory: {what}"

    def _meet(self, ranks: int) -> LossCounts:
        with self._memory(ranks) as memory:
            self._tell(_HOLDS, [memory.fileno()])
            return LossCounts(memory, self._rank, ranks)

    def _memory(self, ranks: int) -> OwnedFd:
        if self._last is None:
            memory = OwnedFd(os.memfd_create("swapd-ranks", os.MFD_CLOEXEC))
            os.ftruncate(memory.fileno(), 8 * ranks)
            return memory
        try:
            _, (memory,) = recv_packet(self._last.sock, _LONGEST)
        except (OSError, ValueError) as exc:  # also if no memory came with it
            raise self._gone(self._last.rank) from exc
        return memory

    def _reach(self, seat: Seat) -> _Link:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(b"\0" + seat.address.encode())
            if peer_of(sock)[0] != seat.pid:
                raise ConnectionRefusedError("another process is at its address")
        except OSError as exc:
            sock.close()
            raise RanksApart(
                f"rank {self._rank} of {self._stage} cannot reach rank {seat.rank} ({exc}); the "
                "ranks of a stage must be on one host, and in one container"
            ) from exc
        return _Link(seat.rank, sock)

    def _let_in(self, door: socket.socket, seat: Seat) -> _Link:
        door.settimeout(MEET_S)
        while True:
            try:
                sock, _ = door.accept()
            except TimeoutError as exc:
                raise self._gone(seat.rank) from exc
            if peer_of(sock)[0] == seat.pid:
                return _Link(seat.rank, sock)
            sock.close()


def ranks_of(parallel: Any) -> int:
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def stage_of(name: str) -> str:
    """Return the stage of a rank with this name, as in "thinker.tp1", or of one without ranks."""
    return _RANK.sub("", name)


def in_order(seats: Iterable[Seat], stage: str) -> list[Seat]:
    """Return the ranks in the order of their daemons. Raises: RanksApart if two share a daemon."""
    by_daemon: dict[tuple[int, int], Seat] = {}
    for seat in seats:
        if seat.daemon is None:
            raise RanksApart(
                f"rank {seat.rank} of {stage} finds no swapd at {seat.folder}. Start one for each "
                "GPU: swapd serve --device cuda:0 --budget ..., and so on; or set their folders, "
                "as in endpoint: /run/swapd/gpu{gpu}"
            )
        other = by_daemon.setdefault(seat.daemon, seat)
        if other is not seat:
            raise RanksApart(
                f"ranks {other.rank} and {seat.rank} of {stage} would share the swapd at "
                f"{seat.folder}, but each needs that of its own GPU. Put {{gpu}} in the endpoint "
                "for its number, as in /run/swapd/gpu{gpu}"
            )
    return [by_daemon[daemon] for daemon in sorted(by_daemon)]


def daemon_at(folder: Path) -> tuple[str, tuple[int, int] | None]:
    """Return a runtime folder and its identity in the order of ranks; None if it is missing."""
    try:
        found = folder.stat()
    except OSError:
        return str(folder), None
    return str(folder), (found.st_dev, found.st_ino)


def _close(link: _Link | None) -> None:
    if link is not None:
        with suppress(OSError):  # the other side has already left
            link.sock.shutdown(socket.SHUT_RDWR)  # wakes a turn in another thread
        link.sock.close()
