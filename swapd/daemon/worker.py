"""One session as the daemon's I/O sees it: its lifeline, its board, the files sent to it.

Decides nothing. Everything here runs on the loop and never blocks.
"""

import os
from collections.abc import Iterable
from functools import partial

from swapd.daemon.lifeline import Lifeline
from swapd.device import Device
from swapd.device.pieces import numbers
from swapd.shared import protocol
from swapd.shared.board import Boards
from swapd.shared.fds import OwnedFd, keep
from swapd.shared.protocol import Runs

#: Files of one packet: all are open for a moment, from the descriptors left free.
FILES_MAX = 16


class Worker:
    def __init__(self, lifeline: Lifeline, device: Device, spare: int = 0) -> None:
        """`spare`: descriptors to leave to others. Raises: OSError when there are no more."""
        self.lifeline = lifeline
        self.boards = Boards()
        keep(self.boards.fd, spare)
        self._device = device
        #: (file, writable): files sent to it that it has not let go of.
        self._files: set[tuple[int, bool]] = set()

    @property
    def chunk_bytes(self) -> int:
        return self._device.chunk_bytes

    def welcome(self, rpc: str, *, strict: bool) -> None:
        device = self._device
        message = protocol.Welcome(
            version=protocol.VERSION,
            session=self.lifeline.session,
            token=self.lifeline.token,
            rpc=rpc,
            device=device.name,
            chunk_bytes=device.chunk_bytes,
            chunks=device.chunks,
            strict=strict,
            chunks_per_file=device.chunks_per_file,
            uuid=device.uuid,
        )
        self.lifeline.send(message, export=lambda: [OwnedFd(os.dup(self.boards.fd.fileno()))])

    def send_files(self, runs: Runs, *, writable: bool) -> None:
        """Send the missing descriptors that it needs to map `runs`."""
        numbers = [n for n in files_of(runs, self._device) if (n, writable) not in self._files]
        for at in range(0, len(numbers), FILES_MAX):
            some = tuple(numbers[at : at + FILES_MAX])
            export = partial(self._export, some, writable=writable)
            self.lifeline.send(protocol.Files(some, writable), export=export)
            self._files.update((n, writable) for n in some)

    def _export(self, numbers: Iterable[int], *, writable: bool) -> list[OwnedFd]:
        """Raises: OSError when descriptors have run out, for now; DeviceError."""
        fds: list[OwnedFd] = []
        try:
            fds.extend(self._device.export(number, writable=writable) for number in numbers)
        except BaseException:
            for fd in fds:
                fd.close()
            raise
        return fds

    def forget_files(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """It must let go of these files: the next grant of them sends them again.

        Returns those that it had.
        """
        gone = set(numbers)
        had = {key for key in self._files if key[0] in gone}
        self._files -= had
        return tuple(sorted({n for n, _ in had}))

    def close(self) -> None:
        self.boards.close()


def files_of(runs: Runs, device: Device) -> list[int]:
    """The files of `runs`, in order."""
    per_file = device.chunks_per_file
    return list(dict.fromkeys(chunk // per_file for chunk in numbers(runs)))


def whole_files(runs: Runs, device: Device) -> list[int]:
    """The files all of whose chunks are in `runs`."""
    per_file = device.chunks_per_file
    chunks = set(numbers(runs))
    return [
        f
        for f in files_of(runs, device)
        if chunks.issuperset(range(f * per_file, (f + 1) * per_file))
    ]
