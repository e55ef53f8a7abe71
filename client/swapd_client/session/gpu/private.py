"""Private memory at a component's range on the GPU, while the component is not in swapd."""

from swapd.device.driver import Access
from swapd.shared.fds import OwnedFd
from swapd_client.session.gpu.card import Card


class PrivateMemory:
    """The memory of this process for one range. Its methods run under the range's lock."""

    def __init__(self, card: Card, address: int, nbytes: int, pieces: tuple[int, ...]) -> None:
        self._card = card
        self._address = address
        self._nbytes = nbytes
        #: Sizes of its mappings, side by side from the range's address on.
        self.pieces = pieces
        #: Not mapped yet, but set aside for `move_in`: handle and size.
        self._aside: tuple[int, int] | None = None

    def set_aside(self) -> None:
        """Raises: OutOfMemory, DeviceFailed."""
        if self._aside is None and self._nbytes:
            self._aside = self._card.allocate(self._nbytes)

    def give_back(self) -> None:
        """Free what is set aside."""
        if self._aside is not None:
            handle, _ = self._aside
            self._aside = None
            with self._card.unless_lost(), self._card.using() as driver:
                driver.release(handle)

    def move_in(self, master: OwnedFd | None) -> None:
        """Map memory with the bytes of `master`, or zeros. Raises: OutOfMemory, DeviceFailed."""
        handle, nbytes = self._aside or self._card.allocate(self._nbytes)
        self._aside = None
        with self._card.using() as driver:
            try:
                driver.map(self._address, nbytes, handle)
            finally:
                driver.release(handle)  # the mapping keeps it alive
            driver.set_access(self._address, nbytes, Access.READ_WRITE)
        if master is None:
            self._card.zero(self._address, self._nbytes)
        else:
            self._card.fill(self._address, master, self._nbytes)
        self.pieces = (nbytes,)

    def unmap(self) -> None:
        if not self.pieces:
            return
        with self._card.using() as driver:
            while self.pieces:
                *before, last = self.pieces
                driver.unmap(self._address + sum(before), last)
                self.pieces = tuple(before)
