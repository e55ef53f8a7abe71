"""A layout's bytes at an address of a test's."""

import os

from swapd.shared import vm
from swapd_client.memory.layout import Layout


def fill(layout: Layout, address: int) -> None:
    """Fill a host copy, and map it at `address`, over what was mapped there."""
    span = vm.round_up(max(layout.nbytes, 1))
    fd = os.memfd_create("filled", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, span)
        layout.fill_file(fd)
        vm.map_shared(fd, 0, span, writable=True, at=address)
    finally:
        os.close(fd)
