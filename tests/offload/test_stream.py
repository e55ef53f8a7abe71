"""A component block by block, in one process and against a real daemon.

Isolation is strict: an access to a block without a lease ends the test.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client, Deadlock, TooLarge
from swapd_client.memory.component import Component
from swapd_client.offload.stream import Stream
from tests.contents import bytes_of
from tests.offload.modules import await_none_leased
from tests.processes import start_python, tell
from tests.threads import run_together, started

#: A chunk of the host device: the size of a block.
BLOCK = 2 << 20
PROGRAMS = Path(__file__).parent / "programs"


class Model(NamedTuple):
    """A family of blocks, whose bytes are their numbers from `first` on."""

    client: Client
    stream: Stream
    blocks: int
    first: int

    def use(self, part: int) -> None:
        """Does the work of a block's forward: reads all of it."""
        self._read(self.stream.parts[part], self.first + part)

    def _read(self, name: str, number: int) -> None:
        view = Component(self.client.session.own(name)).view("w")
        assert bytes(view) == bytes([number]) * len(view)

    def run(self, part: int) -> None:
        """Does what a pass does for a block, and reads what is outside the blocks, too."""
        self.stream.here().need(part)
        try:
            self.use(part)
            if self.stream.rest is not None:
                self._read(self.stream.rest, self.first - 1)
        finally:
            self.stream.here().done(part)

    def forward(self, order: Sequence[int] = ()) -> None:
        if lease := self.stream.whole():
            self.stream.note(lease)
            with lease:
                for part in order or range(self.blocks):
                    self.use(part)
            return
        self.stream.here().enter()
        try:
            for part in order or range(self.blocks):
                self.run(part)
        finally:
            self.stream.here().leave()

    def states(self) -> dict[str, str]:
        return {c.name: c.state for c in self.client.status().components}

    def held(self) -> list[str]:
        family, components = self.stream.family, self.client.status().components
        return [c.name for c in components if c.part_of == family and c.leases]

    def resident(self) -> set[str]:
        return {n for n, state in self.states().items() if state not in ("absent", "revoking")}


def family(
    client: Client,
    blocks: int,
    *,
    resident: int | str | None = 0,
    rest: bool = True,
    name: str = "m",
    chunks: int = 1,
    mutable: bool = False,
    first: int = 1,
) -> Model:
    """`chunks`: the number that a block takes."""
    parts = {"rest": {"w": bytes([first - 1])}} if rest else {}
    parts |= {str(i): {"w": bytes([first + i]) * chunks * BLOCK} for i in range(blocks)}
    registered = client.register_family(name, parts, resident=resident, mutable=mutable)
    made = [c.name for c in registered]
    stream = Stream(client, name, made.pop(0) if rest else None, made)
    return Model(client, stream, blocks, first)


class Daemons:
    """The daemons of this file's tests: each must be as empty at the end as at the start."""

    def __init__(self) -> None:
        self._running: dict[int, spawn.Spawned] = {}
        self._stack = ExitStack()

    def of(self, chunks: int) -> spawn.Spawned:
        if chunks not in self._running:
            made = spawn.daemon(budget=chunks * BLOCK, isolation="strict")
            self._running[chunks] = self._stack.enter_context(made)
        return self._running[chunks]

    def close(self) -> None:
        self._running.clear()
        self._stack.close()


DAEMONS = Daemons()


@pytest.fixture(scope="module", autouse=True)
def _daemons() -> Iterator[None]:
    yield
    DAEMONS.close()


@contextmanager
def swapd(chunks: int) -> Iterator[Client]:
    """A client of a daemon with this many chunks."""
    with swapd_client.connect(DAEMONS.of(chunks).folder) as client:
        while client.status().components:
            pass  # the last test's components go with its session, which has just ended
        yield client


# --- a pass ------------------------------------------------------------------------------


@pytest.mark.parametrize(("resident", "kept"), [(0, ""), (2, "26"), (4, "1357"), (8, "01234567")])
def test_what_is_kept_is_spread_and_is_not_copied_again(resident: int, kept: str) -> None:
    with swapd(12) as client:
        model = family(client, 8, resident=resident * BLOCK + 1)
        for _ in range(5):
            model.forward()
        loads = {c.name: c.loads for c in client.status().components}
        assert {i for i in "01234567" if loads[f"m/{i}"] == 1} == set(kept)
        assert loads["m/rest"] == 1
        assert all(n >= 5 for n in loads.values() if n != 1), "the others at each pass"


# --- any order ---------------------------------------------------------------------------

PASSES = {
    "as declared": range(6),
    "backwards": [5, 4, 3, 2, 1, 0],
    "some skipped": [0, 3, 4],
    "each twice": [0, 0, 1, 1, 2, 2],
    "all twice": [0, 1, 2, 3, 4, 5] * 2,
    "one again and again": [0, 3, 1, 3, 2, 3],
    "none": [],
}


@pytest.mark.parametrize("answers", ["in time", "late"])
def test_passes_may_differ(answers: str) -> None:
    with swapd(12) as client, pytest.MonkeyPatch.context() as patch:
        if answers == "late":
            patch.setattr(client.leasing, "collect", lambda *_, within_s: None)
        model = family(client, 6, resident=2 * BLOCK + 1)
        for order in [*PASSES.values(), *PASSES.values()]:
            model.forward(order)
        assert model.held() == []


@pytest.mark.parametrize("answers", ["in time", "late"])
def test_a_block_that_runs_again_at_once_is_not_copied_again(answers: str) -> None:
    with swapd(12) as client, pytest.MonkeyPatch.context() as patch:
        if answers == "late":
            patch.setattr(client.leasing, "collect", lambda *_, within_s: None)
        model = family(client, 3)
        for _ in range(4):
            model.forward([0, 0, 0, 2])
        loads = {c.name: c.loads for c in client.status().components}
        # while the order is new, the declared order is read ahead; and the hints of the last pass
        assert loads["m/0"] <= 4 + 1 + 2


def test_what_was_read_ahead_stays_in_if_it_is_needed_before_the_answer_is_read() -> None:
    with swapd(12) as client:
        model = family(client, 1)
        asked = client.session.next_id()
        client.leasing.ask(asked, "m/0")
        # by now its copy is under way: the daemon takes a thread's requests in order
        client.status()
        with client.leasing.acquire_in_place_of(asked, "m/0") as lease:
            lease.wait()
            model.use(0)
            assert [c.leases for c in client.status().components if c.name == "m/0"] == [1]
        assert {c.name: c.loads for c in client.status().components}["m/0"] == 1
        assert model.held() == []


def test_a_block_may_run_within_another() -> None:
    with swapd(12) as client:
        model = family(client, 4)
        stream = model.stream
        for _ in range(2):
            stream.here().enter()
            stream.here().need(0)
            stream.here().need(1)
            model.use(0)
            model.use(1)
            stream.here().done(1)
            model.use(0)
            stream.here().done(0)
            stream.here().leave()
            assert model.held() == []


def test_blocks_within_each_other_that_never_fit_together_are_refused() -> None:
    with swapd(3) as client:
        model = family(client, 3)
        for _ in range(2):
            model.stream.here().enter()
            model.stream.here().need(0)
            model.stream.here().need(1)
            with pytest.raises(TooLarge):
                model.stream.here().need(2)
            model.stream.here().leave()
            assert model.held() == []


# --- errors ------------------------------------------------------------------------------


def test_a_pass_that_was_never_left_is_left_by_the_next() -> None:
    with swapd(12) as client:
        model = family(client, 6)
        model.stream.here().enter()
        model.stream.here().need(3)
        model.forward()
        assert model.held() == []


def test_a_thread_that_ends_in_the_middle_leaves_nothing() -> None:
    with swapd(12) as client:
        model = family(client, 6)

        def half() -> None:
            model.stream.here().enter()
            model.run(0)
            model.stream.here().need(1)

        started(half).join()
        await_none_leased(client)
        model.forward()


def test_blocks_that_are_written_keep_what_was_written() -> None:
    with swapd(6) as client:
        model = family(client, 4, mutable=True)
        views = [Component(client.session.own(name)).view("w") for name in model.stream.parts]
        for step in range(1, 4):
            model.stream.here().enter()
            for part, view in enumerate(views):
                model.stream.here().need(part)
                assert view[0] == (step - 1 or part + 1)
                view[:] = bytes([step]) * len(view)
                model.stream.here().done(part)
            model.stream.here().leave()
        assert client.status().bytes_out >= 2 * 4 * BLOCK


# --- several at once ---------------------------------------------------------------------


def together(*calls: Callable[[], None]) -> None:
    """Run each in a thread of its own, over and over and at once."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        start.wait()
        try:
            for _ in range(5):
                call()
        except BaseException as exc:  # noqa: BLE001 - said below, where it is seen
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    run_together(*threads)
    if failed:
        raise failed[0]


@pytest.mark.parametrize("chunks", [3, 5, 12])
def test_two_streams_go_on_where_both_do_not_fit(chunks: int) -> None:
    """With three, each holds its rest, and one block has no room beside both."""
    with swapd(chunks) as client:
        one = family(client, 4, name="one", chunks=2)
        two = family(client, 4, name="two", chunks=2, first=100)  # equal bytes would share memory
        together(one.forward, two.forward)
        assert one.held() == []
        assert client.status().waiting == 0


def test_two_streams_go_on_where_each_holds_a_block_that_the_other_needs_room_of() -> None:
    with swapd(2) as client:
        both = threading.Barrier(2, timeout=60)

        def nested(model: Model) -> None:
            model.stream.here().need(0)
            both.wait()
            model.run(1)
            model.use(0)
            model.stream.here().done(0)
            both.wait()

        one = family(client, 2, rest=False, name="one")
        two = family(client, 2, rest=False, name="two", first=100)
        together(partial(nested, one), partial(nested, two))
        assert (one.held(), two.held()) == ([], [])


def test_a_thread_that_holds_something_else_is_told_of_a_deadlock() -> None:
    with swapd(4) as client:
        model = family(client, 2, chunks=2)
        for name in "ab":
            client.register(name, {"x": bytes_of(name, BLOCK)})
        held = client.acquire("a", "b")
        with pytest.raises(Deadlock):
            model.forward()
        held.release()
        assert model.held() == []
        model.forward()


@pytest.mark.parametrize("needed", [1, 3])
def test_what_is_read_ahead_is_given_up_for_what_the_thread_waits_for(needed: int) -> None:
    with swapd(4) as client:
        model = family(client, 2, chunks=2)  # the first fits beside the rest, and the second waits
        client.register("a", {"x": bytes_of("a", needed * BLOCK)})
        model.stream.here().enter()
        client.acquire("a", timeout=60).release()
        for part in range(2):
            model.run(part)
        model.stream.here().leave()
        assert model.held() == []


def line_of(worker: "subprocess.Popen[str]") -> str:
    assert worker.stdout
    return worker.stdout.readline()


@pytest.mark.parametrize("chunks", [3, 7])
def test_two_processes_stream_at_once_though_memory_holds_a_few_blocks_only(chunks: int) -> None:
    with (
        spawn.daemon(budget=chunks * BLOCK, isolation="strict") as daemon,
        start_python(PROGRAMS / "streaming_worker.py", daemon.folder, "one", 2, 1) as one,
        start_python(PROGRAMS / "streaming_worker.py", daemon.folder, "two", 2, 100) as two,
    ):
        for worker in (one, two):
            assert line_of(worker) == "ready\n"
        for worker in (one, two):
            assert worker.stdin
            tell(worker, "go")
        for worker in (one, two):
            assert line_of(worker) == "[]\n"
