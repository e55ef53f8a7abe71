"""A component's address range on the GPU; the counterpart of `swapd_client.memory.mapping.Range`.

Lives here: which chunks are mapped there, with what access, and when the range is memory of
this process's own. No messages, no torch, no waiting for the GPU's work.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from swapd.device.driver import Access
from swapd.device.pieces import numbers
from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd_client.errors import DeviceFailed
from swapd_client.session.gpu.card import Card


class GpuRange:
    """Reserved once for a component of `nbytes`; chunks come and go behind it.

    Thread-safe. Mapping costs some calls of the driver for each chunk, hiding and showing the
    same chunks again one call for all. So chunks are put there while they are being filled, and
    may be touched one after the other as they have been. No work that uses the range may be on the
    GPU when it is hidden. The range is never freed: tensors may live as long as they like.

    After an error that this process's GPU context does not survive, nothing can be unmapped, and
    nothing need be: no work of this process runs there any more. So hiding then succeeds.
    """

    #: Whether the CPU can touch the bytes.
    addressable = False

    def __init__(
        self, nbytes: int, card: Card, *, writable: bool, before: "GpuRange | None" = None
    ) -> None:
        """`before`: a private one of this GPU, of as many bytes and with room for the chunks, whose
        addresses and memory this one takes over. It has that memory until chunks are shown, or
        `give_up_private`. Raises: DeviceUnavailable, DeviceFailed.
        """
        self._card = card
        self._span = vm.round_up(max(nbytes, 1), card.chunk_bytes)
        self._writable = writable
        self._lock = threading.Lock()
        self.nbytes = nbytes
        #: Stable from now until the end of the process.
        with card.using() as driver:
            self.address: int = driver.reserve(self._span) if before is None else before.address
        #: How much room there is for chunks.
        self.reserved: int = self._span if before is None else before.reserved
        self.taken_over = before is not None
        self.when_left: Callable[[], None] | None = before.when_left if before else None
        #: Memory of this process's own that is mapped there, by the bytes of each mapping.
        self._pieces: tuple[int, ...] = () if before is None else before._pieces
        #: The chunks that are mapped there, whether or not they may be touched.
        self._mapped: tuple[int, ...] = ()
        #: How many of them may, the first ones.
        self._allowed = 0
        #: All of them, and every byte is there.
        self._shown = False
        self._private = False
        self.generation = 0
        #: The chunks of this generation, while they have the latest bytes; else the master has.
        self._latest: tuple[int, ...] | None = None
        #: Memory set aside for `make_private`: handle, and size.
        self._own: tuple[int, int] | None = None

    def __repr__(self) -> str:
        where = "in" if self._shown else "out"
        return f"<GpuRange {self.address:#x} {self.nbytes} B {where} gen={self.generation}>"

    @property
    def shown(self) -> bool:
        """Whether the bytes can be touched."""
        return self._shown

    @property
    def over(self) -> bool:
        """Never: it is not freed, and who takes it over asks first."""
        return False

    @property
    def on_chunks(self) -> bool:
        """Whether memory of the daemon's is mapped; private memory may be, for want of other."""
        return bool(self._mapped)

    def is_shown(self, generation: int) -> bool:
        """Whether `show` would find nothing to do."""
        return self._shown and generation == self.generation

    def show(self, generation: int, runs: Runs) -> None:
        """Put the chunks of this generation behind the range.

        Blocks until the daemon has sent them. Raises: DeviceFailed, SessionEnded; then it is
        hidden, or as it was.
        """
        if self.is_shown(generation) or self._show_again(generation):
            return
        chunks, handles = self._imported(runs)
        with self._lock:
            self._drop_private()
            self._put(chunks, handles)
            self.generation = generation
            self._show_mapped()
        self._say_left()

    def put(self, generation: int, runs: Runs) -> None:
        """Map the chunks of this generation, which are being filled; none can be touched yet.

        Blocks, and raises, as `show`.
        """
        if self.is_shown(generation):
            return
        chunks, handles = self._imported(runs)
        with self._lock:
            if not self.is_shown(generation):
                self._drop_private()
                if generation != self.generation:
                    self._latest = None
                    self._forbid()
                self._put(chunks, handles)
                self.generation = generation
        self._say_left()

    def allow(self, generation: int, chunks: int) -> None:
        """The first `chunks` of this generation are filled: they can be touched.

        Nothing if they are no longer there: whoever waits for the others hears why. Raises:
        DeviceFailed.
        """
        with self._lock:
            if generation == self.generation and self._mapped and not self._private:
                self._allow(chunks, writable=self._writable)

    def hide(self, generation: int | None = None) -> None:
        """Any access faults from now on; the chunks may be shown again cheaply.

        With `generation`, only if it is not a newer one that is shown. Raises: DeviceFailed.
        """
        with self._lock:
            if not (self._private or self._is_newer_than(generation)):
                with self._unless_lost():
                    self._forbid()

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`; and the chunks are others' to use, or to lend away."""
        with self._lock:
            if self._private or self._is_newer_than(generation):
                return
            with self._unless_lost():
                self._unmap()

    def drop(self, numbers: Iterable[int]) -> None:
        """The memory of these chunks goes away: be on none of it."""
        with self._lock:
            gone = set(numbers)
            if not self._private and not gone.isdisjoint(self._mapped):
                self._unmap()
            if self._latest is not None and not gone.isdisjoint(self._latest):
                self._latest = None

    def saved(self, generation: int) -> None:
        """The master has the latest bytes now; the chunks of `generation` are others' to use."""
        with self._lock:
            if generation == self.generation:
                self._latest = None

    def set_memory_aside(self) -> None:
        """Have memory for `make_private`. Raises: DeviceMemoryExhausted; nothing has changed."""
        with self._lock:
            if self._own is None and self.nbytes:
                self._own = self._card.allocate(self.nbytes)

    def give_memory_back(self) -> None:
        """It was set aside, and is not needed."""
        with self._lock:
            if self._own is not None:
                handle, _ = self._own
                self._own = None
                with self._unless_lost(), self._card.using() as driver:
                    driver.release(handle)

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool, saved: int = 0) -> None:
        """Make the range memory of this process's own, with the component's bytes in it.

        The bytes are those of `master`, copied, or zeros; or, with `keep_shown`, those of the
        chunks if they are later, and then it stays on them, which the daemon must have given up;
        but the first `saved` chunks, which it may have overwritten, are copied. Raises:
        DeviceMemoryExhausted if there is no room, DeviceFailed; then nothing is mapped.
        """
        with self._lock:
            if self._private:
                return
            if self._pieces:
                pass  # it has not been given up
            elif keep_shown and self._latest is not None:
                handles = self._card.imports(self._latest, writable=self._writable)
                self._put(self._latest, handles)
                if not self._writable:
                    self._allowed = 0  # for reading: that is not enough
                self._allow(len(self._latest), writable=True)
                if saved and master is not None:
                    overwritten = min(saved * self._card.chunk_bytes, self.nbytes)
                    self._card.fill(self.address, master, overwritten)
                self._pieces = (self._card.chunk_bytes,) * len(self._mapped)
            else:
                self._unmap()
                if self.nbytes:
                    self._pieces = (self._move_in(master),)
            self._shown = self._private = True
            self._card.has_private |= self.nbytes > 0

    def give_up_private(self) -> None:
        """The component is registered: of the memory that was taken over nothing is left.

        Waits for all work of this process on the GPU. Raises: DeviceFailed.
        """
        if self._pieces:
            self._card.settle()
        with self._lock:
            self._drop_private()
        self._say_left()

    def stay_private(self) -> bool:
        """Registering failed: be what was taken over, for good. False if that is gone."""
        with self._lock:
            if self._pieces:
                self._shown = self._private = True
                self._card.has_private = True
            return self._private

    def used_by(self, things: Iterable[object]) -> None:
        """Nothing: work on the GPU may outlive the tensors it reads, so private memory stays."""

    def discard(self) -> None:
        """Free the range: only before any tensor was made over it."""
        try:
            self.give_memory_back()
            with self._card.using() as driver:
                self._unmap()
                driver.free(self.address, self._span)
        except DeviceFailed as exc:
            self._card.complain(exc)  # addresses are many; what went wrong before is told

    def _imported(self, runs: Runs) -> tuple[tuple[int, ...], list[int]]:
        """The chunks, and what to map them by; memory that was taken over is in use no more."""
        chunks = tuple(numbers(runs))
        handles = self._card.imports(chunks, writable=self._writable)
        if self._pieces:
            self._card.settle()
        return chunks, handles

    def _say_left(self) -> None:
        if self.when_left is not None and not (self._pieces or self._private):
            left, self.when_left = self.when_left, None
            left()

    def _show_again(self, generation: int) -> bool:
        """Have it shown if its chunks are mapped, put there or hidden; whether they were.

        Somebody waits for the last bytes, so nothing is looked up.
        """
        with self._lock:
            if generation != self.generation or not self._mapped or self._pieces:
                return False
            self._show_mapped()
            return True

    # --- under the lock ------------------------------------------------------------------

    def _show_mapped(self) -> None:
        self._allow(len(self._mapped), writable=self._writable)
        self._latest = self._mapped
        self._shown = True

    def _is_newer_than(self, generation: int | None) -> bool:
        return generation is not None and generation < self.generation

    def _put(self, chunks: tuple[int, ...], handles: list[int]) -> None:
        if chunks != self._mapped:
            self._unmap()
            self._card.map(self.address, handles)
            self._mapped = chunks

    def _allow(self, chunks: int, *, writable: bool) -> None:
        if chunks > self._allowed:
            at = self.address + self._allowed * self._card.chunk_bytes
            self._card.allow(at, chunks - self._allowed, writable=writable)
            self._allowed = chunks

    def _forbid(self) -> None:
        self._shown = False
        allowed, self._allowed = self._allowed, 0
        if allowed and not self._card.forbid(self.address, allowed):
            self._unmap()

    def _unmap(self) -> None:
        self._shown = False
        self._allowed = 0
        if self._mapped:
            self._card.unmap(self.address, len(self._mapped))
            self._mapped = ()

    def _drop_private(self) -> None:
        if self._private or not self._pieces:
            return
        with self._card.using() as driver:
            while self._pieces:
                *before, last = self._pieces
                driver.unmap(self.address + sum(before), last)
                self._pieces = tuple(before)

    def _move_in(self, master: OwnedFd | None) -> int:
        handle, nbytes = self._own or self._card.allocate(self.nbytes)
        self._own = None
        with self._card.using() as driver:
            try:
                driver.map(self.address, nbytes, handle)
            finally:
                driver.release(handle)  # mapped it lives on
            driver.set_access(self.address, nbytes, Access.READ_WRITE)
        if master is None:
            self._card.zero(self.address, self.nbytes)
        else:
            self._card.fill(self.address, master, self.nbytes)
        return nbytes

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Errors do not count any more once the GPU is lost for this process."""
        try:
            yield
        except DeviceFailed as exc:
            if not self._card.lost:
                raise
            self._card.complain(exc)
