"""A process with many components or requests. `worker.py FOLDER`, then commands on standard input.

Each is a line: `own N` registers N components of 4 KiB, `big BYTES` one of so many bytes, `plain
BYTES` makes the kernel do the same without swapd, `status N` sends N requests for the status.
Prints `ok` after each.
"""

import mmap
import os
import sys

import swapd_client
from swapd.daemon.host_copies import SLICE_BYTES
from swapd.shared import vm
from swapd.shared.fds import OwnedFd


def main(folder: str) -> None:
    client = swapd_client.connect(folder, label="much")
    print("ok", flush=True)  # noqa: T201
    for number, line in enumerate(sys.stdin):
        command, _, argument = line.strip().partition(" ")
        _run(client, command, int(argument), number)
        print("ok", flush=True)  # noqa: T201


def _run(client: swapd_client.Client, command: str, argument: int, number: int) -> None:
    if command == "own":
        for i in range(argument):
            client.register(f"much-{os.getpid()}-{i}", {"data": bytearray(4096)})
    elif command == "big":
        memory = memoryview(mmap.mmap(-1, argument))
        client.register(f"big-{os.getpid()}-{number}", {"data": memory})
    elif command == "plain":
        _allocate_fill_map(argument)
    elif command == "status":
        for _ in range(argument):
            client.status()


def _allocate_fill_map(nbytes: int) -> None:
    """Make the kernel's part of a registration, in a file of this process's own."""
    with (
        OwnedFd(os.memfd_create("plain", os.MFD_CLOEXEC)) as fd,
        mmap.mmap(-1, nbytes) as source,
        memoryview(source) as what,
    ):
        os.ftruncate(fd.fileno(), nbytes)
        for at in range(0, nbytes, SLICE_BYTES):
            os.posix_fallocate(fd.fileno(), at, min(SLICE_BYTES, nbytes - at))
        with mmap.mmap(fd.fileno(), nbytes) as written:
            for at in range(0, nbytes, SLICE_BYTES):
                written[at : at + SLICE_BYTES] = what[at : at + SLICE_BYTES]
        address = vm.map_shared(fd.fileno(), 0, nbytes, writable=False)
        for at in range(0, nbytes, SLICE_BYTES):
            vm.populate(address + at, min(SLICE_BYTES, nbytes - at), writable=False)
        vm.free(address, nbytes)


if __name__ == "__main__":
    main(sys.argv[1])
