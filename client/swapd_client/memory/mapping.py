"""A component's address range in this process: one stable address over changing memory.

Lives here: mapping chunks at the range, shelving them beside it, and making the range private
memory, or taking that over. No messages, no torch.
"""

import errno
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd.shared.units import size
from swapd_client.errors import LimitReached
from swapd_client.memory import place
from swapd_client.session.life import Files


class Uses:
    """The users of a range of addresses: storages of tensors, views, makers of views.

    The next component at these addresses takes it over. The garbage collector calls in any thread
    and under any lock, so nothing here takes one.
    """

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[object]] = {}
        self._numbers = itertools.count()
        #: Whether `add` was called: before that, the users are unknown.
        self._known = False
        #: Called when the last has gone.
        self.ended: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self._living) or not self._known

    def add(self, things: Iterable[object]) -> None:
        """Count these until they are collected."""
        self._known = True
        for thing in things:
            number = next(self._numbers)
            self._living[number] = weakref.ref(thing, partial(self._forget, number))

    def _forget(self, number: int, _: object) -> None:
        self._living.pop(number, None)
        if not self._living and self.ended is not None:
            self.ended()


#: Ranges that are private memory, while objects have bytes there.
_private: set["Range"] = set()
#: Private ranges without such objects, to be freed.
_unused: set["Range"] = set()


class Range:
    """Reserved once for a component of `nbytes`; chunks come and go behind it.

    All methods are thread-safe and take well under a millisecond, except the first mapping of new
    chunks. The range is freed when it is private memory and its last tensor or view is gone; these
    may live as long as they like.
    """

    #: Whether the CPU can touch the bytes.
    addressable = True

    def __init__(
        self,
        nbytes: int,
        chunk_bytes: int,
        files: Files,
        *,
        writable: bool,
        before: "Range | None" = None,
    ) -> None:
        """`before`: a private range of the same size, whose addresses and memory this one takes
        over.

        It has that memory until chunks are shown, or `give_up_private`. Raises: LimitReached.
        """
        self._chunk_bytes = chunk_bytes
        span = vm.round_up(max(nbytes, 1), chunk_bytes)
        self._files = files
        self._writable = writable
        #: Re-entrant: a signal handler may acquire.
        self.lock: Any = threading.RLock()
        self.nbytes = nbytes
        #: Stable from now until the end of the process.
        self.address: int = _reserve(span) if before is None else before.address
        self._reserved: int = span if before is None else before._reserved
        #: Part of the last chunk may stay unmapped: the old chunks may have been smaller.
        self._span = min(span, self._reserved)
        self.taken_over = before is not None
        self.when_left: Callable[[], None] | None = None
        #: Whether the range still has the memory that it took over.
        self._has_before = self.taken_over
        #: Keeps the page tables of an evicted component, so that showing it again is cheap.
        try:
            self._shelf = _reserve(self._span)
        except BaseException:
            if before is None:
                vm.free(self.address, span)
            raise
        self._can_shelve = True
        #: The chunks whose pages are at the range or on the shelf.
        self._runs: Runs = ()
        #: Whether all bytes can be touched; and whether none can. In between it is neither.
        self.shown = False
        self._hidden = True
        self._private = False
        self.over = False
        self._process = os.getpid()
        self.generation = 0
        #: The chunks of this generation, while they have the latest bytes; None: the host copy has.
        self._latest: Runs | None = None
        self._uses = Uses() if before is None else before._give_up(self)

    def __repr__(self) -> str:
        where = "in" if self.shown else "out"
        return f"<Range {self.address:#x} {self.nbytes} B {where} gen={self.generation}>"

    @property
    def on_chunks(self) -> bool:
        return not (self._hidden or self._private)

    def is_shown(self, generation: int) -> bool:
        return self.shown and generation == self.generation

    def show(self, generation: int, runs: Runs) -> None:
        """Put the chunks of this generation behind the range. No-op if it is private memory: then
        others may use the chunks. Raises: LimitReached; then any access faults."""
        with self.lock:
            if self._private or self.is_shown(generation):
                return
            self.generation, self.shown = generation, False
            self._latest = runs
            self._has_before = False
            try:
                self._put(runs)
            except BaseException as exc:  # perhaps after some of the runs
                self._runs = ()
                vm.revoke(self.address, self._span)
                if isinstance(exc, OSError):
                    raise _refused(self.nbytes, exc) from exc
                raise

    lend = show  # in one call, which needs no parts

    def reach(self, generation: int, nbytes: int) -> None:
        """Nothing: all of it is accessible since the grant."""

    def hide(self, generation: int | None = None) -> None:
        """Any access faults from now on. With `generation`, only if the range shows none newer."""
        with self.lock:
            if self._private or self._hidden:
                return
            if generation is not None and generation < self.generation:
                return
            # first: a signal handler that acquires finds that it must map all of it
            runs, self._runs, self.shown = self._runs, (), False
            if self._shelve(runs) and not self._runs:
                self._runs = runs
            else:  # or a signal handler has acquired, and the shelf has some of its pages
                vm.revoke(self.address, self._span)
                self._runs = ()
            self.shown, self._hidden = False, True  # last: an interrupted one is done again

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`: shelved pages do not keep the daemon from lending the chunks. Without
        `generation`, for good: no page is shelved."""
        self.hide(generation)
        if generation is None and not self._private:
            with self.lock:
                self._can_shelve, self._runs = False, ()
                vm.revoke(self.address, self._span)
                self._free_shelf()

    def drop(self, numbers: tuple[int, ...]) -> None:
        """Nothing: the host's files are returned as holes in them, not as a whole."""

    def saved(self, generation: int) -> None:
        """The host copy has the latest bytes; the daemon may lend the chunks of `generation`."""
        with self.lock:
            if generation == self.generation:
                self._latest = None

    def set_memory_aside(self) -> None:
        """Nothing: the kernel copies private pages on write."""

    def give_memory_back(self) -> None:
        """Nothing."""

    def used_by(self, things: Iterable[object]) -> None:
        self._uses.add(things)

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Make the range ordinary memory of this process, with the component's bytes in it.

        The bytes come from `master` (the host copy), copied page by page on write; without it,
        zeros. With `keep_shown`, the bytes of the chunks are used if they are later; then the
        daemon must not have lent the chunks. Afterwards nothing is shared, and a late revocation
        has no effect. The range is freed if no tensor or view of it is left. Raises: OSError if the
        system refuses the memory; then any access faults.
        """
        with self.lock:
            if not self._private:
                try:
                    self._move_home(master, keep_shown=keep_shown)
                except OSError:
                    vm.revoke(self.address, self._span)  # its tensors fault, until they are garbage
                    self._be_private()
                    raise
            self._be_private()
        free_unused()

    def _move_home(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Replace the daemon's memory at the range by this process's, with the same bytes."""
        nbytes = vm.round_up(self.nbytes)
        if nbytes and self._uses and not self._has_before:
            if keep_shown and self._latest is not None:
                self._put(self._latest)
                self._copy_in_place()
            elif master is None:
                vm.map_anonymous(nbytes, at=self.address)
            else:
                vm.map_private(master.fileno(), nbytes, at=self.address)
        if nbytes < self._span:  # the rest of the last chunk would keep the arena alive
            vm.revoke(self.address + nbytes, self._span - nbytes)

    def give_up_private(self) -> None:
        with self.lock:
            if self._has_before:
                self._has_before = False
                vm.revoke(self.address, self._span)

    def stay_private(self) -> bool:
        with self.lock:
            if not (self._has_before or self._private):
                return False
            self._be_private()
        free_unused()
        return True

    def discard(self) -> None:
        vm.free(self.address, self._span)
        self._free_shelf()

    def _give_up(self, to: "Range") -> Uses:
        """Hand the addresses, and the bytes there, to another range."""
        self.over = True
        _private.discard(self)
        self._uses.ended = to._end_of_uses
        return self._uses

    def _be_private(self) -> None:
        """The range has its memory. After an interrupt it may be done again."""
        _private.add(self)
        self._uses.ended = self._end_of_uses
        self._runs = ()
        self._has_before, self.shown, self._private = False, True, True
        if not self._uses:
            _unused.add(self)
        self._free_shelf()

    def _free_shelf(self) -> None:
        shelf, self._shelf = self._shelf, 0
        if shelf:
            vm.unmap(shelf, self._span)

    def _end_of_uses(self) -> None:
        """The garbage collector calls this, under any lock."""
        if self._private:
            _unused.add(self)
            free_unused()

    def _free_if_unused(self) -> bool:
        """Whether the question is settled. Takes no lock that this thread may hold."""
        if os.getpid() != self._process:  # a child does not have the mapping
            return True
        if self.lock._is_owned():
            return False
        with self.lock:  # of private memory: no thread waits for anything while it holds it
            if self.over:
                return True
            if self._uses:
                return False
            place.forget(self)
            _private.discard(self)
            self.over = True
            if vm.unmap(self.address, self._reserved):
                self.over = False  # the process has as many mappings as it may
            return self.over

    def _put(self, runs: Runs) -> None:
        """Have the pages of `runs` at the range: already there, from the shelf, or mapped anew."""
        # first: a signal handler that acquires, or the next call, maps all of it anew
        before, self._runs = self._runs, ()
        shelved, self._hidden = self._hidden, False
        if before != runs or (shelved and not self._unshelve(runs)):
            for at, first, n in self._pieces(runs):
                number, place = divmod(first, self._files.chunks_per_file)
                vm.map_shared(
                    self._files.get(number, writable=self._writable).fileno(),
                    place * self._chunk_bytes,
                    n,
                    writable=self._writable,
                    at=self.address + at,
                )
        self._runs, self.shown = runs, True

    def _copy_in_place(self) -> None:
        nbytes = vm.round_up(self.nbytes)
        vm.map_anonymous(nbytes, at=self._shelf)  # no new addresses, which an interrupt would lose
        vm.leave_out_of_cores(self._shelf, nbytes)
        vm.copy(self._shelf, self.address, self.nbytes)
        vm.move_pages(self._shelf, self.address, nbytes)

    def _shelve(self, runs: Runs) -> bool:
        if not self._can_shelve:
            return False
        try:
            for at, _, n in self._pieces(runs):
                vm.move_pages(self.address + at, self._shelf + at, n)
        except OSError as exc:  # unmap, and fault again later
            self._can_shelve = exc.errno != errno.EINVAL  # an old kernel
            return False
        vm.protect_none(self.address, self._span)
        return True

    def _unshelve(self, runs: Runs) -> bool:
        if not self._can_shelve:
            return False
        for at, _, n in self._pieces(runs):
            vm.move_pages(self._shelf + at, self.address + at, n)
        return True

    def _pieces(self, runs: Runs) -> list[tuple[int, int, int]]:
        """(offset in the range, first chunk, bytes) of each run."""
        pieces = []
        at = 0
        for first, count in runs:
            pieces.append((at, first, min(count * self._chunk_bytes, self._span - at)))
            at += count * self._chunk_bytes
        return pieces


def _reserve(nbytes: int) -> int:
    try:
        return vm.reserve(nbytes)
    except OSError as exc:
        raise _refused(nbytes, exc) from exc


def _refused(nbytes: int, exc: OSError) -> LimitReached:
    return LimitReached(
        f"cannot map {size(nbytes)} into this process: {exc.strerror}. It may have as many "
        "mappings as the system allows: raise vm.max_map_count with sysctl. Nothing is lost"
    )


def free_unused() -> None:
    for where in _unused.copy():
        if where._free_if_unused():  # else the system refuses, or a thread holds its lock
            _unused.discard(where)
