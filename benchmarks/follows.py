"""`python -m benchmarks.follows [--rounds 40]`: waiting for three stages in a cycle.

A real daemon on the host device at 4 GB/s, and three clients, one for each stage of 64 MiB, whose
use takes as long as half a load, one, or two. With room for little more than one stage, the stages
are families of 16 parts, so some come in beside the one in use; a stage that uses its parts one
after the other lends on those that it has finished with. The rows "turned" run the cycle backwards
from the half of the rounds on, against what was declared. Prints the mean time that a use waits,
the same over that of LRU on demand in the same run, and the stages loaded for a use.
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


class Room(NamedTuple):
    what: str
    budget: int
    #: Of a stage. `by_part`: it acquires and releases them one after the other.
    parts: int = 1
    by_part: bool = False


class How(NamedTuple):
    what: str
    eviction: str
    declared: bool = False
    turned: bool = False


class Run(NamedTuple):
    waited_s: float
    loads_a_use: float


ROOMS = (
    Room("two stages", 2 * STAGE),
    Room("a stage and a quarter", STAGE * 5 // 4, 16),
    Room("a stage and a quarter, its parts used one by one", STAGE * 5 // 4, 16, by_part=True),
)
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
    for room in ROOMS:
        titles = f"{'':28} {'use':>9} {'waiting':>9} {'of LRU':>7} {'loads/use':>9}"
        sys.stdout.write(f"\nroom for {room.what}\n{titles}\n")
        for use in (0.5, 1.0, 2.0):
            _say(room, use, rounds)
    return 0


def _say(room: Room, use: float, rounds: int) -> None:
    base: dict[bool, float] = {}
    for how in HOWS:
        run = _run(how, room, use * LOAD_S, rounds)
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


def _run(how: How, room: Room, use_s: float, rounds: int) -> Run:
    """The mean time that a use waits, and its loads."""
    with ExitStack() as stack:
        settings = {"budget": room.budget, "bandwidth": BYTES_PER_S, "eviction": how.eviction}
        folder = stack.enter_context(spawn.daemon(**settings)).folder
        clients = {n: stack.enter_context(swapd_client.connect(folder)) for n in NAMES}
        for number, (name, client) in enumerate(clients.items()):
            part = {"w": bytes([number + 1]) * (STAGE // room.parts)}
            parts = {str(i): part for i in range(room.parts)}
            client.register_family(name, parts, resident=STAGE)
        if how.declared:
            _declare(clients["thinker"], NAMES)
        for name in _order(WARM, turned=False):
            _use(clients[name], name, room, use_s)
        loads = clients["thinker"].status().loads
        order = _order(rounds, turned=how.turned)
        waited = [_use(clients[name], name, room, use_s) for name in order]
        loads = clients["thinker"].status().loads - loads
        return Run(sum(waited) / len(waited), loads / room.parts / len(waited))


def _declare(client: swapd_client.Client, names: Sequence[str]) -> None:
    for name, following in itertools.pairwise((*names, names[0])):
        client.follows(following, after=name)


def _use(client: swapd_client.Client, name: str, room: Room, use_s: float) -> float:
    """Use a stage; return the time of its acquires."""
    names = [f"{name}/{i}" for i in range(room.parts)] if room.by_part else [name]
    waited_s = 0.0
    for one in names:
        since = time.perf_counter()
        with client.acquire(one):
            waited_s += time.perf_counter() - since
            time.sleep(use_s / len(names))  # a GPU computes meanwhile: this process only waits
    return waited_s


if __name__ == "__main__":
    sys.exit(main())
