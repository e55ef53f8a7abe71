"""The ranks of one stage take their leases one after the other, in the order of their daemons.

Each rank's weights are in the daemon of its own GPU, and a step needs all ranks: a rank that has
its lease waits in a collective for the ranks that have none yet. No daemon sees that wait, so two
stages on two GPUs could hold one lease each and wait for the other for ever. Two rules prevent it:

1. A rank asks for its lease when the rank before it holds one for this same step, and then tells
   the next. The order is that of the daemons, so it is the same for all stages, even if their ranks
   0 are on different GPUs.
2. A lease kept from an earlier step is not held for this one until the rank's turn has come. A
   rank that has to wait for its memory tells the ranks after it, which then give back the leases
   that they kept, once these are wanted. Between steps `Stage` does so.

That is enough. Call a lease firm if it is wanted and its rank keeps it until a step is over: the
rank holds it for that step, or keeps it with no waiting rank before it. The step then waits for
later ranks in the order only, because the earlier ones hold leases too, or have done their share of
the step and gone on. Each later rank is about to hold a lease, or waits at its daemon for another
firm lease. So all waits lead to later daemons, and there are no cycles. The last wait is for a step
for which all ranks of a stage hold leases, and such a step ends.

Hence each rank may decide by itself to keep a lease or to give it back. A rank that always fits, or
whose daemon is gone, still tells the next rank. A rank without a daemon rejoins the next daemon by
itself, between two of its steps and before its turn in the next: in one step it has a lease or
needs none. Until then it holds nothing of any daemon, and registering waits for no lease, so it
adds no wait. A daemon keeps its place in the order over a restart, because its folder defines the
place. If the folder was removed meanwhile, stages that start later could have another order, so the
rank does not rejoin.

The ranks of a pipeline (`pipeline_parallel_size`) need not be in one step: vLLM has several in
flight, and a rank that has sent its part goes on. All of the above holds for them too, because a
rank in a step waits only for what others do in that step or in an earlier one: it receives its
input, and waits until its last output was received. A rank without its turn in such a step is later
in the order; one that had its turn holds its lease, or is done. `execute_model` and `sample_tokens`
of a step are under one lease, also if vLLM reads results of earlier steps in between. vLLM's own
executor (`mp`) tells all ranks of each step at once. Others may call a rank only when it has input,
which may come from a rank that waits for that one's turn: so they are refused. A rank tells the
next one of its turn when it begins the step. So the steps of a pipeline overlap only if its ranks
are in the order of the daemons; otherwise each begins when the one before is over (`in_turn`).

All ranks must make the same calls in the same order, as vLLM's executors do. They are on one host,
each connected with the next, so the others notice when one dies. When they meet, they also pass the
memory of their `LossCounts` from rank to rank.
"""

import ctypes
import os
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

#: Seconds that a rank waits for the next one to connect; all ranks exist by then.
MEET_S = 60.0

_HOLDS = b"+"
_WAITS = b"?"
_CANNOT = b"-"
_LONGEST = 4096


class RanksApart(SwapdError, RuntimeError):
    """The ranks of a stage cannot take turns together as they were started."""


class RankGone(SwapdError, RuntimeError):
    """Another rank of the stage has ended, or could not get its memory: no step is possible."""


class Seat(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    address: str
    folder: str
    #: The folder's device and inode, which are the same by all paths and in all containers.
    daemon: tuple[int, int] | None


class LossCounts:
    """How often each rank of a stage has lost something, in memory that they share.

    A rank writes its own count before it computes a step. The rank whose output vLLM takes reads
    all counts when the step has computed. No rank sends a message or waits. That is enough: a rank
    can change the result of a step only by what it sends in that step, and it writes its count
    before. So the reader sees at least the losses that the step can have read. It may see a later
    one, too: then the step is computed again without need. A rank that dies leaves its count.
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
        """The losses of all ranks; it never decreases."""
        return sum(self._counts)

    def set(self, losses: int) -> None:
        self._counts[self._rank] = losses


class _Link(NamedTuple):
    rank: int
    sock: socket.socket


class Ranks:
    """One rank's place in the order. Used by the thread that steps; `wake` by any."""

    def __init__(
        self, rank: int, folder: Path, share: Callable[[str], Sequence[str]], *, stage: str
    ) -> None:
        """Meet the others. Blocks until all are there.

        `folder` is the runtime folder of this rank's daemon. `share` returns the strings of all
        ranks, one each, after all of them have called it: a gather over the stage's process group.
        Raises: RanksApart, in all ranks alike; RankGone.
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
            #: The ranks in the order of their daemons.
            self.in_turn = [seat.rank for seat in seats]
            at = seats.index(mine)
            try:
                if at > 0:
                    self._last = self._reach(seats[at - 1])
                if at + 1 < len(seats):
                    self._next = self._let_in(door, seats[at + 1])
                #: How often each rank has lost its KV cache.
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
        """Wait until the ranks before have their leases; this one gets its own in the block.

        After the block the next rank is told.

        Call it once for each step, also if the lease was kept. The block calls `waits` before it
        waits for memory. While an earlier rank waits, this one calls `give_back()` if `wanted()`,
        which it calls at first, and again after each `wake`. If the block raises, so do the turns
        of all later ranks. Raises: RankGone; if the next rank is gone, the lease may be held.
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
        """Call when this rank will wait for memory, in its turn. Never blocks. Raises: RankGone."""
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
        """Let a rank that waits for its turn check whether its lease is wanted. Does not block."""
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
        except (OSError, ValueError) as exc:  # also if none came with it
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
    """The ranks of a stage with this `parallel_config` of vLLM: they divide each of its steps."""
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def in_order(seats: Iterable[Seat], stage: str) -> list[Seat]:
    """The ranks in the order of their daemons. Raises: RanksApart unless each has its own."""
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
    """A daemon's runtime folder, and its identity for ranks; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return str(folder), None
    return str(folder), (found.st_dev, found.st_ino)


def _close(link: _Link | None) -> None:
    if link is not None:
        with suppress(OSError):  # the other side has already left
            link.sock.shutdown(socket.SHUT_RDWR)  # a turn that waits in another thread ends
        link.sock.close()
