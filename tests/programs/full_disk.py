"""A swap log on a disk with room for half a batch: a limit on file sizes plays the full disk."""

import resource
import tempfile
import threading
from pathlib import Path

from swapd.core.actions import DropHostCopy
from swapd.log.records import Record, parse, render
from swapd.log.swap_log import SwapLogFile

UNLIMITED = resource.RLIM_INFINITY


class Watched(SwapLogFile):
    """Sets an event when it has tried to write."""

    tried = threading.Event()

    def _append(self, lines: list[bytes]) -> None:
        try:
            super()._append(lines)
        finally:
            self.tried.set()


def line(seq: int) -> bytes:
    return render(Record(seq, 0, 1.5, action=DropHostCopy(seq, "x" * 100)))


def main(path: Path) -> None:
    first = SwapLogFile(path, 1 << 20, 1e12)
    first.write([line(1)])
    first.close()
    whole = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 2, UNLIMITED))
    second = Watched(path, 1 << 20, 1e12)
    second.write([line(2), line(3)])
    second.tried.wait()
    assert path.read_bytes() == whole, path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
    second.write([line(4)])
    second.close()
    records = [parse(text) for text in path.read_bytes().splitlines()]
    assert [(r.seq, r.dropped) for r in records] == [(1, 0), (4, 2), (4, 0)], records


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder, "log"))
