"""A component's address range on the GPU; the counterpart of `memory.mapping.Range`."""

from collections.abc import Callable, Iterable

from swapd.device.base import numbers
from swapd.device.driver import Access
from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd_client.errors import DeviceFailed
from swapd_client.memory.place import Place
from swapd_client.session.gpu.card import Card


class GpuRange(Place):
    """An address range, reserved once for a component of `nbytes`; chunks come and go in it.

    Mapping costs driver calls for each chunk; hiding and showing the same chunks again
    costs one call for all. So chunks are mapped during the copy, and made accessible as they fill,
    or as the holder of an early lease waits for them. No GPU work may use the range when it is
    hidden. The range is never freed once it is in use, because tensors may live for ever, and work
    may outlive the tensors that it reads.

    After an error that destroys the GPU context, nothing can be unmapped, but no work runs any
    more: hiding then succeeds.
    """

    def __init__(
        self, nbytes: int, card: Card, *, writable: bool, before: "GpuRange | None" = None
    ) -> None:
        """`before`: a private range of as many bytes to take over, with room for the chunks.

        Its memory stays until chunks are shown, or `give_up_private`. Raises: DeviceFailed.
        """
        super().__init__(nbytes, taken_over=before is not None)
        self._card = card
        self._span = vm.round_up(max(nbytes, 1), card.chunk_bytes)
        self._writable = writable
        with card.using() as driver:
            self.address: int = driver.reserve(self._span) if before is None else before.address
        self.reserved: int = self._span if before is None else before.reserved
        self.when_left = before.when_left if before else None
        #: Sizes of the mappings of private memory, side by side from the range's address on.
        self._pieces: tuple[int, ...] = before._pieces if before else ()
        #: Private memory that is not mapped yet, but set aside: handle and size.
        self._aside: tuple[int, int] | None = None
        #: The mapped chunks, accessible or not.
        self._mapped: tuple[int, ...] = ()
        #: Number of accessible chunks, from the first on.
        self._allowed = 0
        #: As `_allowed`, but more after an interrupt in a driver call.
        self._to_forbid = 0
        self._private = False

    @property
    def on_chunks(self) -> bool:
        return bool(self._mapped)

    def is_shown(self, generation: int) -> bool:
        return self.is_lent(generation) and self._allowed == len(self._mapped)

    def is_lent(self, generation: int) -> bool:
        """Whether leases may use the chunks that they have reached."""
        return self.shown and generation == self.generation

    def show(self, generation: int, runs: Runs) -> None:
        """Map and show the chunks of this generation. Blocks until the daemon has sent them.

        Raises: DeviceFailed, SessionEnded; then the range is hidden, or unchanged.
        """
        if not (self.is_shown(generation) or self._show_again(generation)):
            self._exchange(generation, runs, self._show_mapped)

    def lend(self, generation: int, runs: Runs) -> None:
        if not self.is_lent(generation):
            self._exchange(generation, runs, self._lend)

    def put(self, generation: int, runs: Runs) -> None:
        """Map chunks without access. Blocks and raises as `show`."""
        if not self.is_lent(generation):
            self._exchange(generation, runs)

    def _exchange(
        self, generation: int, runs: Runs, then: Callable[[], None] = lambda: None
    ) -> None:
        """Map these chunks in place of others, after work on memory taken over."""
        chunks = tuple(numbers(runs))
        handles = self._card.imports(chunks, writable=self._writable)
        if self._pieces:
            self._card.settle()
        with self.lock:
            if not (self._private or self.is_shown(generation)):  # private: others use the chunks
                self._unmap_private()
                if generation != self.generation:
                    self._latest = None
                    self._forbid()
                self._put(chunks, handles)
                self.generation = generation
                then()
        self._say_left()

    def allow(self, generation: int, chunks: int) -> None:
        """Make the first `chunks`, which are filled, accessible. Raises: DeviceFailed.

        No-op if they are no longer mapped: the next wait raises the reason.
        """
        with self.lock:
            if generation == self.generation and self._mapped and not self._private:
                self._allow(chunks, writable=self._writable)

    def reach(self, generation: int, nbytes: int) -> None:
        with self.lock:
            if self.is_lent(generation) and not self._private:
                self._allow(-(-nbytes // self._card.chunk_bytes), writable=self._writable)

    def hide(self, generation: int | None = None) -> None:
        self._withdraw(self._forbid, generation)

    def revoke(self, generation: int | None = None) -> None:
        self._withdraw(self._unmap, generation)

    def _withdraw(self, withdraw: Callable[[], None], generation: int | None) -> None:
        with self.lock:
            newer = generation is not None and generation < self.generation
            if not (self._private or newer):
                with self._card.unless_lost():
                    withdraw()

    @property
    def has_latest(self) -> bool:
        """Whether the chunks have the latest bytes."""
        return self._latest is not None

    def let_go(self) -> None:
        """Unmap the chunks of a dead daemon: the host copy has the bytes."""
        self.revoke()
        self.saved(self.generation)

    def leave(self) -> None:
        """As `let_go`, but the range may become private memory later."""
        self.let_go()
        self._card.has_private |= self.nbytes > 0

    def drop(self, numbers: Iterable[int]) -> None:
        with self.lock:
            gone = set(numbers)
            if not self._private and not gone.isdisjoint(self._mapped):
                self._unmap()
            if self._latest is not None and not gone.isdisjoint(self._latest):
                self._latest = None

    def set_memory_aside(self) -> None:
        with self.lock:
            if self._aside is None and self.nbytes:
                self._aside = self._card.allocate(self.nbytes)

    def give_memory_back(self) -> None:
        with self.lock:
            if self._aside is not None:
                handle, _ = self._aside
                self._aside = None
                with self._card.unless_lost(), self._card.using() as driver:
                    driver.release(handle)

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Make the range private memory, with the bytes of `master`, or zeros.

        With `keep_shown` it keeps chunks with later bytes, which the daemon must have given up.
        Raises: OutOfMemory, DeviceFailed; then nothing is mapped.
        """
        with self.lock:
            if self._private:
                return
            if self._pieces:
                pass  # not given up yet
            elif keep_shown and self._latest is not None:
                handles = self._card.imports(self._latest, writable=self._writable)
                self._put(self._latest, handles)
                if not self._writable:
                    self._allowed = 0  # read access is not enough
                self._allow(len(self._latest), writable=True)
                self._pieces = (self._card.chunk_bytes,) * len(self._mapped)
            else:
                self._unmap()
                if self.nbytes:
                    self._move_in(master)
            self.shown = self._private = True
            self._card.has_private |= self.nbytes > 0

    def give_up_private(self) -> None:
        """Free the memory taken over, after all GPU work of this process. Raises: DeviceFailed."""
        if self._pieces:
            self._card.settle()
        with self.lock:
            if not self._private:
                self._unmap_private()
        self._say_left()

    def stay_private(self) -> bool:
        with self.lock:
            if self._pieces:
                self.shown = self._private = True
            self._card.has_private |= self.nbytes > 0
            return self._private or not self.generation

    def discard(self) -> None:
        try:
            self.give_memory_back()
            with self._card.using() as driver:
                self._unmap()
                driver.free(self.address, self._span)
        except DeviceFailed as exc:
            self._card.complain(exc)  # address space is plentiful, and the first error is reported

    def _say_left(self) -> None:
        if self.when_left is not None and not (self._pieces or self._private):
            left, self.when_left = self.when_left, None
            left()

    def _show_again(self, generation: int) -> bool:
        """Show chunks that are mapped already; False if there are none."""
        with self.lock:
            if generation != self.generation or not self._mapped or self._pieces:
                return False
            self._show_mapped()
            return True

    # --- under the lock ------------------------------------------------------------------

    def _move_in(self, master: OwnedFd | None) -> None:
        """Map private memory with the bytes of `master`, or zeros."""
        handle, nbytes = self._aside or self._card.allocate(self.nbytes)
        self._aside = None
        with self._card.using() as driver:
            try:
                driver.map(self.address, nbytes, handle)
            finally:
                driver.release(handle)  # the mapping keeps it alive
            driver.set_access(self.address, nbytes, Access.READ_WRITE)
        if master is None:
            self._card.zero(self.address, self.nbytes)
        else:
            self._card.fill(self.address, master, self.nbytes)
        self._pieces = (nbytes,)

    def _unmap_private(self) -> None:
        if not self._pieces:
            return
        with self._card.using() as driver:
            while self._pieces:
                *before, last = self._pieces
                driver.unmap(self.address + sum(before), last)
                self._pieces = tuple(before)

    def _show_mapped(self) -> None:
        self._allow(len(self._mapped), writable=self._writable)
        self._lend()

    def _lend(self) -> None:
        self._latest = self._mapped
        self.shown = True

    def _put(self, chunks: tuple[int, ...], handles: list[int]) -> None:
        if chunks != self._mapped:
            self._unmap()
            self._card.map(self.address, handles)
            self._mapped = chunks

    def _allow(self, chunks: int, *, writable: bool) -> None:
        if chunks > self._allowed:
            at = self.address + self._allowed * self._card.chunk_bytes
            self._to_forbid = chunks
            self._card.allow(at, chunks - self._allowed, writable=writable)
            self._allowed = chunks

    def _forbid(self) -> None:
        self.shown = False
        self._allowed = 0
        if self._to_forbid and not self._card.forbid(self.address, self._to_forbid):
            self._unmap()
        self._to_forbid = 0

    def _unmap(self) -> None:
        self.shown = False
        self._allowed = 0
        if self._mapped:
            self._card.unmap(self.address, len(self._mapped))
            self._mapped = ()
        self._to_forbid = 0
