"""The contract every device keeps. One suite, `tests/device/test_contract.py`, holds it."""

from typing import Protocol

from swapd.fds import OwnedFd
from swapd.protocol import Runs


class DeviceError(Exception):
    """The device could not do it. The message says what was asked and why it failed."""


class Device(Protocol):
    """An arena of `chunks` chunks of `chunk_bytes` bytes, allocated once.

    Copies block the calling thread, which is never the event loop's; the GIL is released
    meanwhile. One copy in and one copy out may run at the same time, on disjoint chunks.
    """

    name: str
    chunk_bytes: int
    chunks: int

    def export(self, *, writable: bool) -> OwnedFd:
        """A descriptor through which a worker can map chunks. The caller owns it.

        Chunk i is at offset i * chunk_bytes. Without `writable` no mapping made through it
        can ever be written to.
        """

    def copy_in(self, runs: Runs, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes at address `source` into the chunks of `runs`, in order.

        The caller keeps `source` mapped until it returns. Raises: DeviceError; then the
        chunks' contents are undefined, and they are still the caller's.
        """

    def copy_out(self, runs: Runs, target: int, nbytes: int) -> None:
        """Copy the first `nbytes` bytes of the chunks of `runs` to address `target`.

        Raises: DeviceError; then the target's contents are undefined, the chunks' are not.
        """

    def close(self) -> None:
        """Free the arena. Mappings in workers keep their memory alive."""
