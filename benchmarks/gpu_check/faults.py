"""Stray accesses by a real kernel: whether they fault, in the offending process only.

Run as a program it is the offender, or a bystander with the same chunk.
"""

import socket
import sys

from benchmarks.gpu_check import raw
from benchmarks.gpu_check.raw import Child, Gpu, Mapped, adopted
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.torchish import bytes_at, start, synchronize
from swapd.device.driver import Access

#: The offender's access, and the mapping of its chunk at that time.
OFFENCES = {
    "read what is unmapped": ("unmapped", "read"),
    "read what is revoked": ("revoked", "read"),
    "write what is read-only": ("read-only", "write"),
    "write what is unmapped": ("unmapped", "write"),
}


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    with (
        Mapped(gpu, settings.chunk_bytes, 1) as chunk,
        gpu.export(chunk.handles[0]) as fd,
        Child("faults", settings, "bystander", "read-only", "read") as bystander,
    ):
        gpu.fill(chunk.address, chunk.nbytes, 3)
        bystander.ask("take", fd.fileno())
        for offence, (mapped, access) in OFFENCES.items():
            with check.part(offence, guarantee=True):
                with Child("faults", settings, "offender", mapped, access) as offender:
                    said = offender.ask("take", fd.fileno())
                    ended = offender.process.wait(30)
                # an exit code says nothing: a failed import has one too
                faulted = said.startswith("fault") or ended < 0
                how = said or f"the process has ended: {ended}"
                check.holds(f"{offence}: a fault", faulted, how)
                others = gpu.read(chunk.address, 4) == b"\3\3\3\3"
                others = others and bystander.ask("look") == "3"
                check.holds(f"{offence}: nothing of it in other processes", others)


def _look(address: int, settings: Settings) -> int:
    """Read the first bytes with a kernel."""
    return int(bytes_at(address, 256, settings).max().item())


def _offend(settings: Settings, address: int, access: str) -> str:
    try:
        if access == "read":
            return f"read {_look(address, settings)}"
        bytes_at(address, 256, settings).add_(1)
        synchronize(settings)
    except RuntimeError as exc:
        return f"fault: {str(exc).splitlines()[0]}"
    return "wrote"


def main(text: str, number: str, role: str, mapped: str, access: str) -> None:
    settings = Settings.decode(text)
    nbytes = settings.chunk_bytes
    gpu = Gpu(settings)
    start(settings)
    with socket.socket(fileno=int(number)) as sock:
        _, (fd,) = raw.receive(sock)
        address = adopted(gpu, fd, nbytes, Access.READ)
        if role == "bystander":
            raw.send(sock, "taken")
            while raw.receive(sock)[0]:
                raw.send(sock, str(_look(address, settings)))
            return
        if mapped == "unmapped":
            gpu.unmap(address, nbytes)
        elif mapped == "revoked":
            gpu.set_access(address, nbytes, Access.NONE)
        raw.send(sock, _offend(settings, address, access))


if __name__ == "__main__":
    main(*sys.argv[1:])
