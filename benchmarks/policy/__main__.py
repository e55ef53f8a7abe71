"""`python -m benchmarks.policy [--seeds 3]`, or with a trace: `TRACE.csv [--room 1 4] [--load 8.45
0.3] [--overtake 4 16 64] [--picture FRONTIER.svg]`.

Without a trace: bytes that the core's rules of eviction load for the workloads of `workloads.py`,
over the fewest that any schedule loads; means of so many seeds.

A trace has a request a line, with a header that names at least `t_s` (its arrival, seconds),
`model` and `exec_s`. GenTD26 of Alibaba's clusterdata, cut to these columns, is one. It is served
by the core's own decisions, with room for so many models of one size, and first come, first served.
A server that asks for one request at a time has the device to itself, so its loads hide behind
nothing; requests that ask for themselves have loads run beside other requests. Prints loads a
request, the wait until a request runs, and how often the first to wait was overtaken; `--picture`
draws the first two.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Literal, get_args

from benchmarks.policy.clients import Asking, Clients, Request, Served
from benchmarks.policy.picture import Point, frontier
from benchmarks.policy.workloads import Workload, workloads
from swapd.core.records import Rules
from swapd.replay.optimum import fewest

HEADER = (
    f"{'room':>4} {'load s':>6} {'asks':>8} {'overtake':>8} {'loads/request':>13} {'of FCFS':>7} "
    f"{'wait mean s':>11} {'p99 s':>8} {'overtaken':>9}"
)
#: The first seed; the others follow.
SEED = 7
Eviction = Literal["next_use", "lru"]


def main() -> int:
    arguments = _arguments()
    if arguments.trace is None:
        _say_evictions(range(SEED, SEED + arguments.seeds))
        return 0
    try:
        requests = read(arguments.trace)
    except (OSError, KeyError, ValueError) as exc:
        sys.stderr.write(f"{arguments.trace} is no trace with t_s, model and exec_s: {exc!r}\n")
        return 2
    _say(f"{len(requests)} requests for {len({r.model for r in requests})} models")
    _say(HEADER)
    curves = {
        f"room for {room}, {load_s:g} s, {asks}": _say_all(
            requests, room, load_s, asks, arguments.overtake
        )
        for room in arguments.room
        for load_s in arguments.load
        for asks in ("one", "at once")
    }
    if arguments.picture is not None:
        arguments.picture.write_text(frontier(curves, "loads a request, p99 of waiting"))
    return 0


# --- eviction ----------------------------------------------------------------------------


def _say_evictions(seeds: Iterable[int]) -> None:
    kinds: tuple[Eviction, ...] = get_args(Eviction)
    _say("bytes / optimum " + "".join(f"{kind:>9}" for kind in kinds))
    for alike in zip(*map(workloads, seeds), strict=True):
        least = [optimum(one) for one in alike]
        ratios = [
            mean(loaded(one, kind) / of for one, of in zip(alike, least, strict=True))
            for kind in kinds
        ]
        _say(f"{alike[0].name:<15} " + "".join(f"{ratio:>9.3f}" for ratio in ratios))


def optimum(workload: Workload) -> int:
    """The fewest bytes that any choice of evictions loads."""
    least = fewest([frozenset((one,)) for one in workload.requests], workload.sizes, workload.room)
    assert least.exact
    return least.nbytes


def loaded(workload: Workload, eviction: Eviction) -> int:
    """What the core loads for a workload, one request after the other."""
    clients = Clients(workload.sizes, 0.01, workload.room, Rules(eviction=eviction), "in order")
    requests = [Request(10.0 * i, name, 1.0) for i, name in enumerate(workload.requests)]
    return clients.run(requests).loaded


# --- order of service --------------------------------------------------------------------


def _say_all(
    requests: list[Request], room: int, load_s: float, asks: Asking, bounds: Iterable[int]
) -> list[Point]:
    first_come: Asking = "one" if asks == "one" else "in order"
    fcfs = serve(requests, room, load_s, first_come, Rules(overtake=0))
    runs = {"FCFS": fcfs}
    _say(_line(room, load_s, asks, "FCFS", fcfs, fcfs))
    for bound in bounds:
        runs[str(bound)] = serve(requests, room, load_s, asks, Rules(overtake=bound))
        _say(_line(room, load_s, asks, str(bound), runs[str(bound)], fcfs))
    return [Point(n, run.loads / len(requests), _p99(run.waited_s)) for n, run in runs.items()]


def serve(requests: list[Request], room: int, load_s: float, asks: Asking, rules: Rules) -> Served:
    """Serve a trace of models of one size, of which `room` fit."""
    models = dict.fromkeys(sorted({request.model for request in requests}), 1)
    return Clients(models, load_s, room, rules, asks).run(requests)


def read(path: Path) -> list[Request]:
    """The requests of a trace, by arrival. Raises: OSError, KeyError, ValueError."""
    with path.open(newline="") as lines:
        found = [
            Request(float(line["t_s"]), line["model"], float(line["exec_s"]))
            for line in csv.DictReader(lines)
        ]
    return sorted(found, key=attrgetter("arrives_s"))


def _line(room: int, load_s: float, asks: str, bound: str, served: Served, fcfs: Served) -> str:
    waits = served.waited_s
    return (
        f"{room:>4} {load_s:>6g} {asks:>8} {bound:>8} {served.loads / len(waits):>13.3f} "
        f"{served.loads / fcfs.loads:>7.2f} {mean(waits):>11.1f} {_p99(waits):>8.1f} "
        f"{served.overtaken:>9}"
    )


def _p99(waits: Sequence[float]) -> float:
    return sorted(waits)[int(0.99 * len(waits))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, nargs="?", help="a CSV file")
    parser.add_argument("--seeds", type=int, default=3, help="of the workloads (3)")
    parser.add_argument("--room", type=int, nargs="+", default=[1, 4], help="models (1 4)")
    parser.add_argument("--load", type=float, nargs="+", default=[8.45, 0.3], help="seconds")
    parser.add_argument("--picture", type=Path, help="an SVG of the rows, at most 4 curves")
    parser.add_argument(
        "--overtake", type=int, nargs="+", default=[4, 16, 64], help="bounds (4 16 64)"
    )
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
