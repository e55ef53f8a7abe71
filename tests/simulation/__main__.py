"""`python -m tests.simulation`: play seeds, and tell the story of one that breaks a promise."""

import argparse
import gc
import hashlib
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

from tests.simulation.seed import Outcome, play

#: Seeds of one piece of work.
BATCH = 50
#: Lines of a story without a component.
LINES = 80
_NAME = re.compile(r"\b[abcd][0-9]+\.[0-9]+\b")


def story(outcome: Outcome, name: str | None) -> list[str]:
    """What happened to `name`, or to the component in question; else all that happened last."""
    if name == "all":
        told = outcome.story or []
    elif about := name or next(iter(_NAME.findall(outcome.problem)), None):
        owner = f"worker {about[1:].partition('.')[0]}"
        told = [
            (at, who, what)
            for at, who, what in outcome.story or []
            if about in what or (who == owner and what.startswith("is "))
        ]
    else:
        told = (outcome.story or [])[-LINES:]
    return [f"{at:12.5f}  {by:9}  {what}" for at, by, what in told]


def _batch(seeds: range) -> list[Outcome]:
    gc.disable()  # it takes a tenth of the time, and finds little
    outcomes = [play(seed) for seed in seeds]
    gc.collect()
    return outcomes


def play_all(seeds: range, processes: int) -> int:
    """Play them; print those that break a promise, and return how many do."""
    began, broken, records, traces = time.monotonic(), 0, 0, hashlib.sha256()
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor(processes) as pool:
        for one in chain.from_iterable(pool.map(_batch, batches)):
            records += one.records
            traces.update(one.trace.encode())
            if one.problem:
                broken += 1
                print(f"{one.problem}\n  python -m tests.simulation --seed {one.seed}", flush=True)  # noqa: T201
    print(f"{len(seeds)} seeds, {records} records, traces {traces.hexdigest()[:16]}")  # noqa: T201
    print(f"{broken} broken, in {time.monotonic() - began:.0f} s")  # noqa: T201
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="play this one, and tell its story")
    what.add_argument("--seeds", help="A:B: play those from A to below B")
    parser.add_argument("--name", help="tell the story of this component; all: of everything")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.seeds:
        first, _, end = options.seeds.partition(":")
        return min(play_all(range(int(first), int(end)), options.processes), 1)
    outcome = play(options.seed, told=True)
    print("\n".join(story(outcome, options.name)))  # noqa: T201
    print(f"seed {outcome.seed}: {outcome.records} records, trace {outcome.trace}")  # noqa: T201
    print(outcome.problem or "no promise was broken")  # noqa: T201
    return bool(outcome.problem)


if __name__ == "__main__":
    sys.exit(main())
