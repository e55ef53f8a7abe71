"""What a session's thread learns for all others: the session's end, wanted names, descriptors."""

import os
import threading
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from swapd.shared import protocol
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Files as Message
from swapd.shared.protocol import Master
from swapd_client.errors import ClientClosed, DaemonGone, SwapdError
from swapd_client.interrupts import covered_block


class Life:
    """The state of one session. `check` is thread-safe, and costs next to nothing."""

    def __init__(self) -> None:
        self.usable = True
        self.error: SwapdError | None = None
        #: Whether the daemon left the session, rather than this process.
        self.deserted = False
        #: Becomes readable, for good, when the session ends.
        self.ended = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        #: Guards registrations and leases: no holder sees half of the session's end. Re-entrant: a
        #: signal handler that closes may have interrupted the holder.
        self.lock = threading.RLock()
        self._process = os.getpid()
        #: Set in a forked child, where the locks may be held for good.
        self.left_to_parent = False
        self._listeners: list[Callable[[SwapdError], None]] = []
        self.told = False
        #: Threads in `changing`, by block.
        self._changing: dict[object, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, or its daemon is about to end."""
        return self.error is not None or self.deserted

    def check(self) -> None:
        """Raise the reason if requests are no longer possible."""
        if self.usable:
            return
        self.check_process()
        assert self.error is not None
        # a kept traceback would keep the frames of all callers
        raise self.error.with_traceback(None)

    def check_process(self) -> None:
        """Raise ClientClosed in a forked child, which has neither the memory nor the locks."""
        if self.left_to_parent:
            raise ClientClosed(
                "this process was forked from one that uses swapd: sessions and weights stay "
                "with the parent. Connect in the child, or start it with spawn"
            )

    @covered_block
    def changing(self) -> Generator[None, None, None]:
        """In the block, components are registered, unregistered or updated as the daemon answers.

        Raises the reason for the session's end. If the session ends in the block, no other thread
        joins the next daemon with these components until the block has ended.
        """
        block = object()
        try:
            self._changing[block] = threading.get_ident()
            self.check()  # not before: joining waits for those that are listed when it looks
            yield
        finally:
            self._changing.pop(block, None)

    def changed_by(self) -> list[int]:
        """Return the threads that are in `changing`."""
        return list(self._changing.values())

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def when_ended(self, listener: Callable[[SwapdError], None]) -> None:
        """Call `listener` with the reason, in the thread that ends the session."""
        self._listeners.append(listener)

    def end(self, error: SwapdError) -> None:
        """Record the reason for the end, once, under the lock."""
        self.error = error
        self.usable = False

    def tell(self, error: SwapdError) -> None:
        """Wake every wait, and call the listeners. Not under the lock."""
        os.eventfd_write(self.ended.fileno(), 1)
        for listener in self._listeners:
            listener(error)
        self.told = True

    def await_end(self) -> None:
        """Block until the session has ended. Not under the lock."""
        while self.error is None:
            self.ended.await_readable()

    def leave_to_parent(self) -> None:
        self.left_to_parent = True
        self.usable = False


class WaiterNotices:
    """What other processes want. Written by the lifeline's thread, read by any."""

    def __init__(self) -> None:
        #: Held components whose memory an acquire waits for.
        self.wanted: set[str] = set()
        #: Whether an acquire waits for leased memory. If so, unused leases are not kept.
        self.hurried = False
        self._listeners: list[Callable[[], None]] = []

    def when_wanted(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not block, in the lifeline's thread when more is wanted."""
        self._listeners.append(listener)

    def hear(self, message: protocol.Wanted | protocol.Hurry) -> None:
        if isinstance(message, protocol.Hurry):
            self.hurried = grown = message.waits
        elif grown := message.wanted:
            self.wanted.add(message.name)
        else:
            self.wanted.discard(message.name)
        if grown:
            for listener in self._listeners:
                listener()


# --- descriptors that the daemon sends: of its device's memory, and of host copies ----------------
# The lifeline's thread adds them; other threads wait for them. Both classes are thread-safe.


#: Seconds to wait for a file: a grant may be read before its files have come.
FILE_S = 30.0
MASTER_S = 30.0

K = TypeVar("K", bound=Hashable)


class _Descriptors(Generic[K]):
    """Descriptors by key, owned by this object until they are taken."""

    def __init__(self) -> None:
        self._fds: dict[K, OwnedFd] = {}
        # for `with`: an interrupt in `Condition.__enter__`, which is Python, leaves the lock held
        self.lock = threading.RLock()
        self._came = threading.Condition(self.lock)
        self._ended = False

    def _await(self, key: K, timeout_s: float) -> bool:
        """Wait for the descriptor; return whether it came. Under the lock, released meanwhile."""
        self._came.wait_for(lambda: key in self._fds or self._ended, timeout_s)
        return key in self._fds

    def end(self) -> None:
        with self.lock:
            self._ended = True
            self._came.notify_all()

    def close(self) -> None:
        for fd in self._fds.values():
            fd.close()
        self._fds.clear()


class Files(_Descriptors[tuple[int, bool]]):
    """One descriptor for each (file, writable)."""

    def __init__(self, chunks_per_file: int) -> None:
        super().__init__()
        self.chunks_per_file = chunks_per_file

    def __repr__(self) -> str:
        return f"<Files {sorted(self._fds)}>"

    def add(self, message: Message, fds: Sequence[OwnedFd]) -> None:
        with self.lock:
            for number, fd in zip(message.numbers, fds, strict=True):
                if self._fds.setdefault((number, message.writable), fd) is not fd:
                    fd.close()
            self._came.notify_all()

    def get(self, number: int, *, writable: bool) -> OwnedFd:
        """Return the descriptor, still owned here. Blocks until it has come. Raises: DaemonGone."""
        with self.lock:
            return self._fds[self._arrived(number, writable)]

    def take(self, number: int, *, writable: bool) -> OwnedFd:
        """As `get`, but the caller then owns the descriptor."""
        with self.lock:
            return self._fds.pop(self._arrived(number, writable))

    def give(self, number: int, fd: OwnedFd, *, writable: bool) -> None:
        """Take back a descriptor that could not be used."""
        self.add(Message((number,), writable), [fd])

    def drop(self, numbers: Iterable[int]) -> None:
        """Close these. The daemon sends them again when they are needed."""
        with self.lock:
            for key in [(n, writable) for n in numbers for writable in (False, True)]:
                if fd := self._fds.pop(key, None):
                    fd.close()

    def drop_all(self, but: Collection[int]) -> None:
        with self.lock:
            self.drop({number for number, _ in self._fds}.difference(but))

    def _arrived(self, number: int, writable: bool) -> tuple[int, bool]:
        if self._await(key := (number, writable), FILE_S):
            return key
        raise DaemonGone(
            f"the daemon did not send file {number} of its memory within {FILE_S:g} s, so the "
            "components there cannot be mapped: see its log. Close this client, then "
            "connect again"
        )


class Masters(_Descriptors[int]):
    """Host copies by request number."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life
        self._said: dict[int, Master] = {}
        self._unwanted: set[int] = set()

    def add(self, master: Master, fd: OwnedFd) -> None:
        with self.lock:
            if master.request in self._unwanted:
                self._unwanted.discard(master.request)
                fd.close()
            else:
                self._said[master.request], self._fds[master.request] = master, fd
                self._came.notify_all()

    def take(self, request: int) -> tuple[Master, OwnedFd]:
        """Wait for a host copy; the caller then owns its descriptor. Raises: SessionEnded."""
        with self.lock:
            if self._await(request, MASTER_S) and not self._ended:
                return self._said.pop(request), self._fds.pop(request)
        self._life.check()
        raise DaemonGone(
            f"the daemon did not send the host copy for request {request} within "
            f"{MASTER_S:g} s: its log may say why. Close this client, then connect again"
        )

    def forget(self, request: int) -> None:
        """Close a host copy now, or when it comes."""
        with self.lock:
            if fd := self._fds.pop(request, None):
                self._said.pop(request, None)
                fd.close()
            else:
                self._unwanted.add(request)
