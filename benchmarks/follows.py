"""`python -m benchmarks.follows [--rounds 40]`: waiting for three stages in a cycle.

A real daemon on the host device at 4 GB/s, and three clients, one for each stage of 64 MiB, whose
use takes as long as half a load, one, or two. With room for little more than one stage, the stages
are families of 16 parts, so some come in beside the one in use. The rows "turned" run the cycle
backwards from the half of the rounds on, against what was declared. Prints the mean time of an
acquire, the same over that of LRU on demand in the same run, and the stages loaded for a use.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import swapd_client
from swapd import spawn

MIB = 1 << 20
STAGE = 64 * MIB
BYTES_PER_S = 4_000_000_000
LOAD_S = STAGE / BYTES_PER_S
NAMES = ("thinker", "talker", "code2wav")
#: Rounds before the clock starts: what learns has learned.
WARM = 4


class How(NamedTuple):
    what: str
    eviction: str
    declared: bool = False
    turned: bool = False


class Run(NamedTuple):
    waited_s: float
    loads_a_use: float


HOWS = (
    How("LRU on demand", "lru"),
    How("next_use on demand", "next_use"),
    How("LRU, declared", "lru", declared=True),
    How("next_use, declared", "next_use", declared=True),
    How("LRU on demand, turned", "lru", turned=True),
    How("next_use, declared, turned", "next_use", declared=True, turned=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    for room, of_stages, parts in (("two stages", 2.0, 1), ("a stage and a quarter", 1.25, 16)):
        sys.stdout.write(
            f"\nroom for {room}\n{'':28} {'use':>9} {'waiting':>9} {'of LRU':>7} {'loads/use':>9}\n"
        )
        for use in (0.5, 1.0, 2.0):
            _say(int(of_stages * STAGE), parts, use, rounds)
    return 0


def _say(budget: int, parts: int, use: float, rounds: int) -> None:
    base: dict[bool, float] = {}
    for how in HOWS:
        run = _run(how, budget, parts, use * LOAD_S, rounds)
        waited_s = base.setdefault(how.turned, run.waited_s)
        sys.stdout.write(
            f"{how.what:28} {use:>4} loads {run.waited_s * 1e3:>6.1f} ms "
            f"{run.waited_s / waited_s:>7.2f} {run.loads_a_use:>9.2f}\n"
        )
        sys.stdout.flush()


def _order(rounds: int, *, turned: bool) -> Iterator[str]:
    for number in range(rounds):
        back = turned and number >= rounds // 2
        yield from NAMES[::-1] if back else NAMES


def _run(how: How, budget: int, parts: int, use_s: float, rounds: int) -> Run:
    """The mean time of an acquire, and the loads of a use."""
    with ExitStack() as stack:
        settings = {"budget": budget, "bandwidth": BYTES_PER_S, "eviction": how.eviction}
        folder = stack.enter_context(spawn.daemon(**settings)).folder
        clients = {n: stack.enter_context(swapd_client.connect(folder)) for n in NAMES}
        for number, (name, client) in enumerate(clients.items()):
            part = {"w": bytes([number + 1]) * (STAGE // parts)}
            client.register_family(name, {str(i): part for i in range(parts)}, resident=STAGE)
        if how.declared:
            _declare(clients["thinker"], NAMES)
        for name in _order(WARM, turned=False):
            _use(clients[name], name, use_s)
        loads = clients["thinker"].status().loads
        waited = [_use(clients[name], name, use_s) for name in _order(rounds, turned=how.turned)]
        loads = clients["thinker"].status().loads - loads
        return Run(sum(waited) / len(waited), loads / parts / len(waited))


def _declare(client: swapd_client.Client, names: Sequence[str]) -> None:
    for name, following in itertools.pairwise((*names, names[0])):
        client.follows(following, after=name)


def _use(client: swapd_client.Client, name: str, use_s: float) -> float:
    """Use a stage; return the time of its acquire."""
    since = time.perf_counter()
    with client.acquire(name):
        waited_s = time.perf_counter() - since
        time.sleep(use_s)  # a GPU computes meanwhile: this process only waits
    return waited_s


if __name__ == "__main__":
    sys.exit(main())
