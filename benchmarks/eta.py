"""`python -m benchmarks.eta [--seconds 15] [--simulated]`: how long waits were said to take.

Plays the seven workloads of `policy/workloads.py` in real time, for so many seconds each: a real
daemon on the host device at 1 GB/s, a client for each component, and two requests at a time, each
of which takes the next of the trace. A use takes a time of its component, more or less by up to a
tenth. Each request asks for a forecast right before its acquire. Prints, of the acquires that
waited or should have, the shares that the daemon granted after as long as it had said, within 15 %
and 50 %; those of which the time was not known count as missed. Exit code 1: less than half within
15 %, or less than nine in ten within 50 %. `--simulated`: the core alone, on a virtual clock, so
that nothing else on this machine matters.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import NamedTuple

import swapd_client
from benchmarks.policy.workloads import Workload, workloads
from swapd import spawn
from swapd.core import Residency, actions, events
from swapd.core.status import forecast
from swapd.replay.rerun import SimulatedMachine
from swapd.shared import protocol

MIB = 1 << 20
#: The room of each workload is so large, for any unit of its sizes.
ROOM = 192 * MIB
BYTES_PER_S = 1_000_000_000
#: The uses of the components of a workload take the first of these, the second, and so on.
USES_S = (0.2, 0.12, 0.08, 0.25, 0.15, 0.1)
SPREAD = 0.1
AT_A_TIME = 2
SEED = 7
#: Requests of which nothing is counted: nothing was measured before.
WARM = 16
#: Shorter waits are none: the messages take as long.
LEAST_S = 0.003


class Wait(NamedTuple):
    name: str
    said_s: float | None
    took_s: float

    @property
    def error(self) -> float:
        return abs(self.took_s - self.said_s) / self.said_s if self.said_s else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--errors", action="store_true", help="print each wait")
    arguments = parser.parse_args()
    sys.stdout.write(f"{'':10} {'waits':>6} {'not known':>9} {'within 15 %':>11} {'50 %':>6}\n")
    every = list[Wait]()
    for workload in workloads(SEED):
        waits = simulate(workload) if arguments.simulated else play(workload, arguments.seconds)
        _say(workload.name, waits)
        for wait in waits if arguments.errors else ():
            said = "not known" if wait.said_s is None else f"{wait.said_s:.3f}"
            sys.stdout.write(f"    {wait.name:10} said {said:>9} took {wait.took_s:.3f}\n")
        every += waits
    _say("all", every)
    return int(within(every, 0.15) < 0.5 or within(every, 0.5) < 0.9)


def _say(name: str, waits: list[Wait]) -> None:
    lost = sum(wait.said_s is None for wait in waits)
    shares = f"{within(waits, 0.15):>11.0%} {within(waits, 0.5):>6.0%}"
    sys.stdout.write(f"{name:10} {len(waits):>6} {lost:>9} {shares}\n")
    sys.stdout.flush()


def within(waits: list[Wait], share: float) -> float:
    return sum(wait.error <= share for wait in waits) / len(waits) if waits else 1.0


def play(workload: Workload, seconds: float) -> list[Wait]:
    """The waits of a workload that is played for so long."""
    unit = ROOM // workload.room
    uses = dict(zip(workload.sizes, USES_S, strict=False))
    with ExitStack() as stack:
        budget = f"{workload.room * unit // MIB + len(workload.sizes)}MiB"
        daemon = spawn.daemon(budget=budget, bandwidth=BYTES_PER_S)
        folder = stack.enter_context(daemon).folder
        clients = {
            name: stack.enter_context(swapd_client.connect(folder, label=name))
            for name in workload.sizes
        }
        for name, size in workload.sizes.items():
            clients[name].register(name, {"w": name.encode().ljust(size * unit)})
        until = time.monotonic() + seconds
        trace = enumerate(workload.requests)

        def serve(drawn: random.Random) -> Iterator[Wait]:
            """The waits of one after the other of the requests."""
            for number, name in trace:
                if time.monotonic() > until:
                    return
                use_s = uses[name] * drawn.uniform(1 - SPREAD, 1 + SPREAD)
                wait = _use(clients[name], name, use_s)
                if number >= WARM and max(wait.said_s or LEAST_S, wait.took_s) > LEAST_S:
                    yield wait

        drawn = [random.Random(SEED + i) for i in range(AT_A_TIME)]
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            found = threads.map(lambda one: list(serve(one)), drawn)
            return [wait for waits in found for wait in waits]


def _use(client: swapd_client.Client, name: str, use_s: float) -> Wait:
    said_s = client.forecast(name).seconds
    with client.acquire(name) as lease:
        time.sleep(use_s)  # a GPU computes meanwhile: this process only waits
    return Wait(name, said_s, lease.waited_s)


# --- on a virtual clock ------------------------------------------------------------------

#: Chunks of the room, and requests of each workload.
CHUNKS, REQUESTS = 4096, 600


class Asked(NamedTuple):
    slot: int
    number: int
    name: str
    said_s: float | None


class Simulation:
    """The same requests for the core around a simulated device."""

    def __init__(self, workload: Workload) -> None:
        chunk = ROOM // CHUNKS
        unit = ROOM // workload.room
        self._uses = dict(zip(workload.sizes, USES_S, strict=False))
        self._owners = dict(zip(workload.sizes, count(1), strict=False))
        self._drawn = random.Random(SEED)
        self._trace = enumerate(workload.requests[:REQUESTS])
        self._numbers = count(1)
        self._asked: dict[tuple[int, int], Asked] = {}
        self.waits = list[Wait]()
        self._core = Residency(CHUNKS + len(workload.sizes), chunk)
        self._machine = SimulatedMachine(self._core, BYTES_PER_S, self._heard)
        for name, session in self._owners.items():
            self._machine.feed(events.SessionOpened(0.0, session, name))
            nbytes = workload.sizes[name] * unit
            self._ask(session, protocol.Register(next(self._numbers), name, nbytes))
        self._machine.run()
        for name, session in self._owners.items():
            self._ask(session, protocol.Commit(next(self._numbers), name))
        for slot in range(AT_A_TIME):
            self._machine.at(0.0, partial(self._acquire, slot))
        self._machine.run()

    def _ask(self, session: int, request: protocol.AnyOrder) -> None:
        self._machine.feed(events.SessionRequest(self._machine.now, session, request))

    def _acquire(self, slot: int) -> None:
        number, name = next(self._trace, (0, ""))
        if not name:
            return
        session, request = self._owners[name], next(self._numbers)
        asks = protocol.ForecastRequest(request, (name,))
        told = forecast(self._core, asks, session, self._machine.now)
        assert isinstance(told, protocol.Forecast)
        self._asked[session, request] = Asked(slot, number, name, told.seconds)
        self._ask(session, protocol.Acquire(request, (name,), agent=slot))

    def _heard(self, said: events.AnyEvent | actions.AnyAction) -> None:
        if not isinstance(said, actions.Grant):
            return
        asked = self._asked.pop((said.session, said.request))
        if asked.number >= WARM and max(asked.said_s or LEAST_S, said.waited_s) > LEAST_S:
            self.waits.append(Wait(asked.name, asked.said_s, said.waited_s))
        use_s = self._uses[asked.name] * self._drawn.uniform(1 - SPREAD, 1 + SPREAD)
        ends = partial(self._release, said.session, said.request, asked.slot)
        self._machine.at(self._machine.now + use_s, ends)

    def _release(self, session: int, lease: int, slot: int) -> None:
        self._ask(session, protocol.Release(next(self._numbers), lease))
        self._acquire(slot)


def simulate(workload: Workload) -> list[Wait]:
    return Simulation(workload).waits


if __name__ == "__main__":
    sys.exit(main())
