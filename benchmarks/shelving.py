"""The cost of an eviction on the host device: `python -m benchmarks.shelving [--mib 256]`.

The daemon moves a component's page tables aside, and back on the next load (`swapd.shared.vm`).
Beside it: unmapping the same range, and faulting its pages in again. Medians, in turn in one run.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

from swapd.shared import vm

ROUNDS = 21


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shelving", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the component (256)")
    nbytes = parser.parse_args().mib << 20
    file = os.memfd_create("shelving")
    os.ftruncate(file, nbytes)
    used, shelf = vm.reserve(nbytes), vm.reserve(nbytes)
    vm.map_shared(file, 0, nbytes, writable=True, at=used)
    vm.populate(used, nbytes, writable=True)
    steps: dict[str, Callable[[], object]] = {
        "page tables moved aside": lambda: vm.move_pages(used, shelf, nbytes),
        "page tables moved back": lambda: vm.move_pages(shelf, used, nbytes),
        "unmapped instead": lambda: vm.revoke(used, nbytes),
        "mapped and faulted in again": lambda: _fault_in(file, used, nbytes),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            taken[name].append(_timed(step))
    for name, times in taken.items():
        sys.stdout.write(f"{name:28} {1000 * statistics.median(times):7.2f} ms\n")
    return 0


def _fault_in(file: int, address: int, nbytes: int) -> None:
    vm.map_shared(file, 0, nbytes, writable=True, at=address)
    vm.populate(address, nbytes, writable=True)


def _timed(step: Callable[[], object]) -> float:
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


if __name__ == "__main__":
    sys.exit(main())
