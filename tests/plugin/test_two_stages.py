"""Two stages of two ranks each, on two daemons with room for one of them.

Daemons and ranks are processes of their own. Isolation is strict: a rank that reads its weights
without a lease dies.
"""

import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.guarantees.harness import MIB, PATIENCE_S, Daemon, World, environment

PROGRAM = Path(__file__).with_name("rank.py")
NBYTES = 6 * MIB
ROOM_FOR_ONE = "8MiB"
ROOM_FOR_BOTH = "16MiB"

#: The acquire timeout that ends the wait of two ranks for each other.
DEADLOCK_S = 0.5


class Rank:
    """A process of `rank.py`."""

    def __init__(self, name: str, orders: dict[str, Any], peer: socket.socket) -> None:
        self.name = name
        self.process = forked.Popen(
            [sys.executable, str(PROGRAM), json.dumps({**orders, "peer": peer.fileno()})],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(peer.fileno(),),
        )
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name} speaks")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"ended": self.process.wait()})

    def hear(self) -> dict[str, Any]:
        """Its next message."""
        try:
            return self._said.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"{self.name} says nothing") from None

    def expect(self, what: str) -> Any:
        """Take its next message, which must have this key."""
        said = self.hear()
        assert what in said, f"{self.name} said {said}, not {what}"
        return said[what]

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def discard(self) -> None:
        self.process.kill()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def stage(
    name: str,
    daemons: Sequence[Daemon],
    *,
    steps: int = 1,
    stop: bool = False,
    backwards: bool = False,
    together: bool = False,
    timeout: float = PATIENCE_S,
) -> Iterator[list[Rank]]:
    """The ranks of a stage, each at its daemon; they have met."""
    with ExitStack() as ends:
        made: list[Rank] = []
        for number, (daemon, peer) in enumerate(zip(daemons, _connected(ends), strict=True)):
            orders = {
                "stage": name,
                "rank": number,
                "folder": str(daemon.folder),
                "nbytes": NBYTES,
                "steps": steps,
                "stop": stop,
                "backwards": backwards,
                "together": together,
                "timeout": timeout,
            }
            made.append(Rank(f"{name}.tp{number}", orders, peer))
            ends.callback(made[-1].discard)
            peer.close()
        seats = [rank.expect("seat") for rank in made]
        for rank in made:
            rank.tell(seats)
        yield made


def _connected(ends: ExitStack) -> Iterator[socket.socket]:
    """The two ends of a collective."""
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        ends.callback(end.close)
        yield end


def places(world: World) -> list[str]:
    """Names of two daemons, in the order of leases."""
    made = [world.folder / name for name in ("one", "two")]
    for folder in made:
        folder.mkdir(mode=0o700)
    return [f.name for f in sorted(made, key=lambda f: (f.stat().st_dev, f.stat().st_ino))]


@pytest.fixture
def daemons(world: World) -> list[Daemon]:
    """The two daemons, in the order of leases."""
    return [world.daemon(name, budget=ROOM_FOR_ONE) for name in places(world)]


def begin(*stages: Sequence[Rank]) -> None:
    """Begin once all ranks are ready: else one may have finished before another begins."""
    ranks = [rank for ranks in stages for rank in ranks]
    for rank in ranks:
        rank.expect("ready")
    for rank in ranks:
        rank.tell("begin")


def finish(*stages: Sequence[Rank]) -> list[list[list[tuple[int, int]]]]:
    """Wait for the end of all ranks; returns the times of their leases, by stage and rank."""
    return [[[(a, b) for a, b in rank.expect("had")] for rank in ranks] for ranks in stages]


def check_apart(*had: Sequence[tuple[int, int]]) -> None:
    """Check that no two of them had the memory at the same time."""
    for one, other in combinations(had, 2):
        for (_, end), (start, _) in pairwise(sorted([*one, *other])):
            assert end <= start


@pytest.mark.parametrize("crosswise", [False, True])
def test_they_take_turns_and_never_both_hold(daemons: list[Daemon], crosswise: bool) -> None:
    """Crosswise, the second stage's rank 0 is on the second GPU."""
    theirs = daemons[::-1] if crosswise else daemons
    options: dict[str, Any] = {"steps": 40, "together": True}
    with stage("a", daemons, **options) as a, stage("b", theirs, **options) as b:
        begin(a, b)
        (a0, a1), (b0, b1) = finish(a, b)
    if crosswise:
        b0, b1 = b1, b0
    check_apart(a0, b0)
    check_apart(a1, b1)
    for daemon in daemons:
        assert daemon.watch.seen("Evicted"), "they did not get into each other's way"
        assert not daemon.watch.seen("CopyOut")
        assert daemon.status().waiting == 0


@pytest.mark.parametrize("tight", [0, 1])
def test_it_is_enough_that_one_rank_does_not_fit(world: World, tight: int) -> None:
    daemons = [
        world.daemon(name, budget=ROOM_FOR_ONE if at == tight else ROOM_FOR_BOTH)
        for at, name in enumerate(places(world))
    ]
    options: dict[str, Any] = {"steps": 20, "together": True}
    with stage("a", daemons, **options) as a, stage("b", daemons, **options) as b:
        begin(a, b)
        had = finish(a, b)
    check_apart(had[0][tight], had[1][tight])


def test_without_the_order_they_wait_for_each_other(daemons: list[Daemon]) -> None:
    """One stage takes its leases in the wrong order."""
    options: dict[str, Any] = {"stop": True, "timeout": DEADLOCK_S}
    with (
        stage("a", daemons, **options) as a,
        stage("b", daemons, backwards=True, **options) as b,
    ):
        first = a[0], b[1]
        for rank in first:
            rank.expect("got")
        for rank in first:
            rank.tell("go on")
        said = [a[1].hear(), b[0].hear()]
        assert "AcquireTimeout" in [words.get("error") for words in said]


def test_with_it_they_do_not(daemons: list[Daemon]) -> None:
    """The same steps as above, in order."""
    with stage("a", daemons, stop=True) as a:
        a[0].expect("got")
        with stage("b", daemons, stop=True) as b:
            daemons[0].await_record("Waiting")
            a[0].tell("go on")
            a[1].expect("got")
            a[1].tell("go on")
            for rank in b:
                rank.expect("got")
                rank.tell("go on")
            (a0, a1), (b0, b1) = finish(a, b)
    check_apart(a0, b0)
    check_apart(a1, b1)


def test_a_rank_killed_in_a_step_leaves_its_memory_to_others(daemons: list[Daemon]) -> None:
    with stage("a", daemons, stop=True) as a:
        a[0].expect("got")
        a[0].tell("go on")
        a[1].expect("got")  # rank 0 waits for it in the collective
        with stage("b", daemons, steps=3) as b:
            daemons[0].await_record("Waiting")
            a[0].process.kill()
            a[1].tell("go on")
            said = a[1].expect("error")  # as an error of a collective
            assert said in ("ConnectionResetError", "BrokenPipeError")
            finish(b)
    for daemon in daemons:
        for session in daemon.watch.seen("SessionOpened"):
            if "tp" in session.label:
                daemon.watch.until_gone(session.session)
        assert daemon.status().used_bytes == 0


def test_a_rank_killed_while_the_next_waits_for_it_is_named(daemons: list[Daemon]) -> None:
    with stage("a", daemons, stop=True) as a, stage("b", daemons, steps=3) as b:
        waiting = a[0].hear()
        assert "got" in waiting
        a[0].process.kill()
        said = a[1].hear()
        assert said["error"] == "RankGone"
        assert said["message"].startswith("rank 0 of a has ended")
        finish(b)
