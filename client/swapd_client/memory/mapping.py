"""A component's address range in this process: one stable address over changing memory.

Chunks are mapped at the range, or shelved beside it; or the range is private memory. No messages,
no torch.
"""

import errno
import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd.shared.units import size
from swapd_client.errors import LimitReached
from swapd_client.memory import place
from swapd_client.session.life import Files


class Uses:
    """The users of an address range: storages of tensors, views, makers of views.

    The next component at these addresses takes it over. The garbage collector calls in any thread
    and under any lock, so nothing here takes a lock.
    """

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[object]] = {}
        self._numbers = itertools.count()
        #: Whether users are known at all: `add` was called.
        self._known = False
        self.ended: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        """Whether there may be users."""
        return bool(self._living) or not self._known

    def add(self, things: Iterable[object]) -> None:
        self._known = True
        for thing in things:
            number = next(self._numbers)
            self._living[number] = weakref.ref(thing, partial(self._forget, number))

    def _forget(self, number: int, _: object) -> None:
        self._living.pop(number, None)
        if not self._living and self.ended is not None:
            self.ended()


#: Private ranges in which objects have bytes.
_private: set["Range"] = set()
#: Private ranges without such objects, to be freed.
_unused: set["Range"] = set()


class Range(place.Place):
    """An address range, reserved once for a component of `nbytes`; chunks come and go in it.

    All methods take well under a millisecond, except the first mapping of new chunks. The range is
    freed when it is private memory and its last tensor or view is gone. All of it is accessible if
    any byte is, files of memory are never dropped as a whole, and private memory needs nothing set
    aside: the kernel copies its pages on write.
    """

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
        """`before`: a private range of the same size, to take over.

        Its memory stays until chunks are shown, or `give_up_private`. Raises: LimitReached.
        """
        super().__init__(nbytes, taken_over=before is not None)
        self._chunk_bytes = chunk_bytes
        span = vm.round_up(max(nbytes, 1), chunk_bytes)
        self._files = files
        self._writable = writable
        self.address: int = _reserve(span) if before is None else before.address
        self._reserved: int = span if before is None else before._reserved
        #: Without part of the last chunk, if the old chunks were smaller.
        self._span = min(span, self._reserved)
        #: Whether the range still has memory that it took over.
        self._has_before = self.taken_over
        #: Keeps the page tables of an evicted component, so that showing it again is cheap.
        try:
            self._shelf = _reserve(self._span)
        except BaseException:
            if before is None:
                vm.free(self.address, span)
            raise
        self._can_shelve = True
        #: Chunks with pages at the range or on the shelf.
        self._runs: Runs = ()
        #: Whether no byte can be touched. If neither this nor `shown`, some can.
        self._hidden = True
        self._private = False
        self._process = os.getpid()
        self._uses = Uses() if before is None else before._give_up(self)

    @property
    def on_chunks(self) -> bool:
        return not (self._hidden or self._private)

    def show(self, generation: int, runs: Runs) -> None:
        """Map the chunks of this generation, unless the range is private: others may use the chunks
        then.

        Raises: LimitReached; then any access faults.
        """
        with self.lock:
            if self._private or self.is_shown(generation):
                return
            self.generation, self.shown = generation, False
            self._latest = runs
            self._has_before = False
            try:
                self._put(runs)
            except BaseException as exc:  # some of the runs may be mapped
                self._runs = ()
                vm.revoke(self.address, self._span)
                if isinstance(exc, OSError):
                    raise _refused(self.nbytes, exc) from exc
                raise

    lend = show

    def hide(self, generation: int | None = None) -> None:
        with self.lock:
            if self._private or self._hidden:
                return
            if generation is not None and generation < self.generation:
                return
            # First: a signal handler that acquires then maps all of it.
            runs, self._runs, self.shown = self._runs, (), False
            if self._shelve(runs) and not self._runs:
                self._runs = runs
            else:  # or a signal handler has acquired, and the shelf has some of its pages
                vm.revoke(self.address, self._span)
                self._runs = ()
            self.shown, self._hidden = False, True  # last: an interrupted call is repeated

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`: the daemon may lend the chunks even if their pages are shelved.

        Without `generation` nothing is shelved any more.
        """
        self.hide(generation)
        if generation is None and not self._private:
            with self.lock:
                self._can_shelve, self._runs = False, ()
                vm.revoke(self.address, self._span)
                self._free_shelf()

    def let_go(self) -> None:
        """Also free the range, now or with its last tensor or view. May be repeated."""
        with self.lock:
            if self.over:
                return
            self.revoke()
            self._be_private()
        free_unused()

    def used_by(self, things: Iterable[object]) -> None:
        self._uses.add(things)

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Make the range memory of this process, with the component's bytes.

        They come from `master`, copied page by page on write; without it, they are zeros. With
        `keep_shown`, later bytes of the chunks are used; the daemon must not have lent the chunks
        then. Afterwards nothing is shared, and a late revocation has no effect. The range is freed
        if it has no tensor or view. Raises: OSError if the system refuses the memory; then any
        access faults.
        """
        with self.lock:
            if self.over:  # freed with its last tensor, before its session ended
                return
            if not self._private:
                try:
                    self._move_home(master, keep_shown=keep_shown)
                except OSError:
                    vm.revoke(self.address, self._span)  # its tensors fault
                    self._be_private()
                    raise
            self._be_private()
        free_unused()

    def _move_home(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Replace the daemon's memory by this process's, with the same bytes."""
        nbytes = vm.round_up(self.nbytes)
        if nbytes and self._uses and not self._has_before:
            if keep_shown and self._latest is not None:
                self._put(self._latest)
                self._copy_in_place()
            elif master is None:
                vm.map_anonymous(nbytes, at=self.address)
            else:
                vm.map_private(master.fileno(), nbytes, at=self.address)
        if nbytes < self._span:  # else the rest of the last chunk would keep the arena alive
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
        self.over = True
        _private.discard(self)
        self._uses.ended = to._end_of_uses
        return self._uses

    def _be_private(self) -> None:
        """Mark the range as private. May be repeated after an interrupt."""
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
        """Called by the garbage collector, under any lock."""
        if self._private:
            _unused.add(self)
            free_unused()

    def _free_if_unused(self) -> bool:
        """Free the range if it is unused; return whether that is settled.

        Takes no lock that this thread may hold.
        """
        if os.getpid() != self._process:  # a child does not have the mapping
            return True
        if self.lock._is_owned():
            return False
        with self.lock:  # no thread waits while it holds the lock of private memory
            if self.over:
                return True
            if self._uses:
                return False
            place.forget(self)
            _private.discard(self)
            self.over = True
            if vm.unmap(self.address, self._reserved):
                self.over = False  # the process has all the mappings it may have
            return self.over

    def _put(self, runs: Runs) -> None:
        """Put the pages of `runs` at the range: already there, shelved, or newly mapped."""
        # First: a signal handler that acquires, or the next call, then maps all of it anew.
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
        vm.map_anonymous(nbytes, at=self._shelf)  # no new addresses: an interrupt would lose them
        vm.leave_out_of_cores(self._shelf, nbytes)
        vm.copy(self._shelf, self.address, self.nbytes)
        vm.move_pages(self._shelf, self.address, nbytes)

    def _shelve(self, runs: Runs) -> bool:
        if not self._can_shelve:
            return False
        try:
            for at, _, n in self._pieces(runs):
                vm.move_pages(self.address + at, self._shelf + at, n)
        except OSError as exc:  # the caller unmaps: pages fault in later
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
        """Return (offset in the range, first chunk, bytes) of each run."""
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
        if where._free_if_unused():
            _unused.discard(where)
