"""`python -m benchmarks.modelled [--chunk auto] [--swap 2GiB] [--evict 8GiB] [--out FILE]`.

Uses the stub driver of tests/fakecuda with the costs that the driver's calls and copies had on an
H200, and adds all of swapd's own work on this machine's processors. So a figure from here is one
that a GPU may reach; it is not a measurement of a GPU. Copies move nothing, so sizes are those of
real models.

Exit codes: 0 both bounds hold, 1 one does not.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.modelled.measure import Costs, Measured, evictions, swap_ins
from swapd.shared.units import parse_size

#: Least share of the bare copy's rate.
SWAP_IN_BOUND = 0.97
#: Most processor time in the worker that loses the component.
EVICTION_BOUND_MS = 5.0


def main() -> int:
    arguments = _arguments()
    costs = Costs()
    _say(f"costs: {costs}")
    swap = swap_ins(costs, arguments.chunk, parse_size(arguments.swap), arguments.rounds)
    ratio = swap.bare_ms / swap.ms
    _say(
        f"swap-in of {arguments.swap} in chunks of {swap.chunk}: {swap.ms:.2f} ms, the copy "
        f"{swap.bare_ms:.2f} ms: {ratio:.3f} of the copy, {_against(ratio >= SWAP_IN_BOUND)} "
        f"(bound {SWAP_IN_BOUND})"
    )
    evicted = evictions(costs, arguments.chunk, parse_size(arguments.evict), arguments.rounds)
    _say(
        f"strict eviction of {arguments.evict} in chunks of {evicted.chunk}: {evicted.ms:.2f} ms "
        f"of work in the worker, {evicted.calls_ms:.2f} ms of it the driver's, "
        f"{_against(evicted.ms < EVICTION_BOUND_MS)} (bound {EVICTION_BOUND_MS:g} ms)"
    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(_report(costs, swap, evicted), indent=2) + "\n")
    return 0 if ratio >= SWAP_IN_BOUND and evicted.ms < EVICTION_BOUND_MS else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modelled", description=__doc__)
    parser.add_argument("--chunk", default="auto", help="the daemons' --chunk (auto)")
    parser.add_argument("--swap", default="2GiB", help="one component that is swapped in (2GiB)")
    parser.add_argument("--evict", default="8GiB", help="one that is evicted (8GiB)")
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement (15)")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    return parser.parse_args()


def _report(costs: Costs, swap: Measured, evicted: Measured) -> dict[str, Any]:
    return {
        "costs": dataclasses.asdict(costs),
        "swap_in": dataclasses.asdict(swap),
        "strict_eviction": dataclasses.asdict(evicted),
    }


def _against(holds: bool) -> str:
    return "ok" if holds else "FAILED"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
