"""One chunk in several processes: overlap, re-export, and the remains of a dead process.

Run as a program it is the other process: `copier` copies without end on command, `keeper` owns a
chunk and exports it, `writer` writes a word of a page that it gets.
"""

import ctypes
import mmap
import os
import select
import signal
import socket
import statistics
import sys
import time

from benchmarks.gpu_check import raw
from benchmarks.gpu_check.raw import Busy, Child, Gpu, Mapped, adopted, median_s, pinned, seconds
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import KIB, MIB, Settings, fitting
from swapd.device.context import CudaError

PATTERN = 0x5A
#: Seconds that the driver may take to free a dead process's memory.
SETTLE_S = 5.0


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    with check.part("copies of another process"):
        _beside_a_copier(check, gpu, settings)
    with check.part("re-export of an imported chunk", guarantee=True):
        _re_export(check, gpu, settings)
    with check.part("what stays when the owner of a chunk is killed", guarantee=True):
        _after_a_kill(check, gpu, settings)


# --- overlap -----------------------------------------------------------------------------


def _beside_a_copier(check: Check, gpu: Gpu, settings: Settings) -> None:
    """Mutual cost of compute here and copies there, and the delay of small copies."""
    busy = Busy(gpu)
    span = 0.5 if busy.what == "matrix products" else 0.05

    def compute() -> None:
        busy.enqueue(span)
        busy.wait()

    with Child("processes", settings, "copier") as copier, pinned(gpu, 2 * MIB) as host:
        target = gpu.alloc(2 * MIB)

        def small() -> None:
            gpu.copy_in(target, host, 64 * KIB)

        alone = float(copier.ask("rate"))
        compute_alone, small_alone = median_s(compute, 3), median_s(small, 100)
        for piece in (64 * MIB, 16 * MIB, 2 * MIB):
            copier.ask(f"start {piece}")
            compute_beside, small_beside = median_s(compute, 3), median_s(small, 100)
            rate = float(copier.ask("stop"))
            name = f"beside another process's copies in pieces of {piece // MIB} MiB"
            check.row(
                f"{busy.what} {name}, over alone",
                compute_beside / compute_alone,
                "",
                f"the copies at {rate:.3g} GB/s, {alone:.3g} alone",
            )
            check.row(
                f"64 KiB in, {name}",
                small_beside * 1e6,
                "us",
                f"{small_alone * 1e6:.3g} us without",
            )
        gpu.dealloc(target)


class Copier:
    """Bulk copies, as the daemon makes them."""

    def __init__(self, settings: Settings) -> None:
        self.gpu = Gpu(settings)
        unit = settings.chunk_bytes
        wanted = min(settings.probe_bytes, 512 * MIB)
        self.nbytes = fitting(wanted, unit, device_free=self.gpu.free_bytes(), host_copies=1, of=1)

    def serve(self, sock: socket.socket) -> None:
        unit = self.gpu.settings.chunk_bytes
        with (
            Mapped(self.gpu, unit, self.nbytes // unit) as chunks,
            pinned(self.gpu, self.nbytes) as host,
        ):
            while (told := raw.receive(sock)[0]) and told != "end":
                verb, _, piece = told.partition(" ")
                if verb == "rate":
                    took = median_s(lambda: self._all(chunks, host, 16 * MIB), 5)
                    raw.send(sock, str(self.nbytes / 1e9 / took))
                elif verb == "start":
                    raw.send(sock, "started")
                    rate = self._until_told(sock, chunks, host, int(piece))
                    raw.send(sock, str(rate))

    def _all(self, chunks: Mapped, host: int, piece: int) -> None:
        """Four pieces at a time are in flight, as in swapd's own copies."""
        events = [self.gpu.event() for _ in range(4)]
        for number, at in enumerate(range(0, self.nbytes, piece)):
            event = events[number % 4]
            self.gpu.synchronize(event)
            length = min(piece, self.nbytes - at)
            self.gpu.copy_to_device(chunks.address + at, host + at, length, self.gpu.main)
            self.gpu.record(event, self.gpu.main)
        self.gpu.finish(self.gpu.main)
        for event in events:
            self.gpu.destroy_event(event)

    def _until_told(self, sock: socket.socket, chunks: Mapped, host: int, piece: int) -> float:
        rates = []
        while not select.select([sock], [], [], 0)[0]:
            rates.append(self.nbytes / 1e9 / seconds(lambda: self._all(chunks, host, piece)))
        raw.receive(sock)
        return statistics.median(rates or [0.0])


# --- a chunk and its holders --------------------------------------------------------------


def _re_export(check: Check, gpu: Gpu, settings: Settings) -> None:
    """Whether a worker's import can be exported again: then a new daemon could adopt it."""
    unit = settings.chunk_bytes
    with Child("processes", settings, "keeper") as keeper:
        keeper.tell("give")
        _, (fd,) = keeper.hear()
        here = adopted(gpu, fd, unit)
        handle = int(gpu.call(gpu.api.cuMemRetainAllocationHandle, here))
        name, mapped = "an imported chunk can be exported again", [here]
        try:
            again = gpu.export(handle)
        except CudaError as exc:
            check.row(name, False, note=str(exc))
        else:
            mapped.append(adopted(gpu, again.take(), unit))
            same = [gpu.read(address, 16) for address in mapped]
            check.holds(name, same == [bytes([PATTERN] * 16)] * 2)
        for address in mapped:
            gpu.unmap(address, unit)
        gpu.release(handle)


def _after_a_kill(check: Check, gpu: Gpu, settings: Settings) -> None:
    unit = settings.chunk_bytes
    with Child("processes", settings, "keeper") as keeper:
        keeper.tell("give")
        _, (fd,) = keeper.hear()
        here = adopted(gpu, fd, unit)
        before = gpu.free_bytes()
        keeper.process.send_signal(signal.SIGKILL)
        keeper.process.wait()
    whole = all(gpu.read(here + at, 16) == bytes([PATTERN] * 16) for at in range(0, unit, MIB))
    check.holds("a chunk stays when the process that made it is killed", whole)
    gpu.fill(here, unit, 1)
    check.holds("and can be written", gpu.read(here, 1) == b"\1")
    gpu.unmap(here, unit)
    until = time.monotonic() + SETTLE_S
    while gpu.free_bytes() < before + unit and time.monotonic() < until:
        time.sleep(0.01)
    back = (gpu.free_bytes() - before) / MIB
    check.row("memory that came back with the kill and the last unmapping", back, "MiB")


def _keep(settings: Settings, sock: socket.socket) -> None:
    gpu = Gpu(settings)
    with Mapped(gpu, settings.chunk_bytes, 1) as chunk:
        gpu.fill(chunk.address, chunk.nbytes, PATTERN)
        while raw.receive(sock)[0] == "give":
            with gpu.export(chunk.handles[0]) as fd:
                raw.send(sock, "given", fd.fileno())


def _write(settings: Settings, sock: socket.socket) -> None:
    """Write a word, and report the time."""
    _, (fd,) = raw.receive(sock)
    page = mmap.mmap(fd, 4096)
    os.close(fd)
    word = ctypes.c_uint64.from_buffer(page)
    raw.send(sock, "ready")
    while told := raw.receive(sock)[0]:
        time.sleep(0.002)  # until the stream has surely begun to wait
        at = time.perf_counter()
        word.value = int(told.split()[1])
        raw.send(sock, str(at))


def main(settings_text: str, number: str, role: str) -> None:
    settings = Settings.decode(settings_text)
    with socket.socket(fileno=int(number)) as sock:
        if role == "copier":
            Copier(settings).serve(sock)
        elif role == "keeper":
            _keep(settings, sock)
        else:
            _write(settings, sock)


if __name__ == "__main__":
    main(*sys.argv[1:])
