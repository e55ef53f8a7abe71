"""Stages of several ranks, as their workers use them: a rank is a thread here, with a `Stage`.

Each of the daemons has room for one component. Isolation is strict.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import permutations
from zlib import crc32

import pytest
import torch

from swapd_client.vllm.options import Options
from swapd_client.vllm.stage import Stage, rejoining
from tests.guarantees.harness import PATIENCE_S, Daemon, World
from tests.plugin.gather import Gather

REQUESTS = 6
STEPS = 8
WIDTH = 1024  # 4 MiB of weights


class Together:
    """The steps of ranks that compute each of them together, as in collectives."""

    def __init__(self, ranks: int) -> None:
        self._all = threading.Barrier(ranks)

    @contextmanager
    def step(self, rank: int) -> Iterator[None]:
        self._all.wait(PATIENCE_S)
        yield
        self._all.wait(PATIENCE_S)


class Pipeline(Together):
    """Those of ranks that pass them on: each receives from the one before, and has sent its last
    output before it sends the next, as vLLM's ranks do."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._links = [queue.Queue[int](1) for _ in range(ranks - 1)]
        self._steps = [0] * ranks
        #: The most steps that a rank was ahead of the last one.
        self.ahead = 0

    @contextmanager
    def step(self, rank: int) -> Iterator[None]:
        if rank > 0:
            assert self._links[rank - 1].get(timeout=PATIENCE_S) == self._steps[rank]
        yield
        if rank < len(self._links):
            self._links[rank].put(self._steps[rank], timeout=PATIENCE_S)
        self._steps[rank] += 1
        self.ahead = max(self.ahead, self._steps[0] - self._steps[-1])


class Rank:
    """A rank, and the thread that steps it."""

    def __init__(
        self,
        stage: str,
        number: int,
        endpoint: str,
        share: Callable[[str], Sequence[str]] | None,
        together: Together,
    ) -> None:
        self._name = stage if share is None else f"{stage}.tp{number}"
        self._number = number
        self._endpoint = endpoint
        self._share = share
        self._together = together
        self._value = float(crc32(self._name.encode()) % 4096)
        self._thread = ThreadPoolExecutor(1, self._name)
        self.stage: Stage | None = None

    def start(self) -> "Future[None]":
        return self._thread.submit(self._start)

    def serve(self) -> "Future[None]":
        return self._thread.submit(self._serve)

    def change(self) -> "Future[None]":
        return self._thread.submit(self._change)

    def _start(self) -> None:
        options = Options(endpoint=self._endpoint)
        self.stage = Stage.connect(
            options, self._name, gpu=None, rank=self._number, share=self._share
        )
        self._model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self._model.weight.fill_(self._value)
        self.stage.memory.take({"": self._model})

    def _serve(self) -> None:
        assert self.stage is not None
        for request in range(REQUESTS):
            for step in range(STEPS):
                came = [f"{request}"] if step == 0 else []
                went = [f"{request - 1}"] if step == 0 and request else []
                self.stage.note(came, went)
                self.stage.begin()
                with self._together.step(self._number):
                    least, most = self._model.weight.detach().aminmax()  # in one pass
                    assert least == most == self._value
                self.stage.end()
        self.stage.note([], [f"{REQUESTS - 1}"])
        self.stage.rest()

    def _change(self) -> None:
        assert self.stage is not None
        self._value += 1
        with self.stage.memory.changing(), torch.no_grad(), Together.step(self._together, 0):
            self._model.weight.fill_(self._value)

    def close(self) -> None:
        if self.stage is not None:
            self.stage.close()
        self._thread.shutdown()


class Cast:
    """The ranks of all stages of a test."""

    def __init__(self, ends: ExitStack) -> None:
        self._ends = ends
        self._ranks: list[Rank] = []

    def stage(
        self, name: str, daemons: Sequence[Daemon], kind: type[Together] = Together
    ) -> Together:
        """Start a stage with a rank at each of the daemons."""
        together = kind(len(daemons))
        gather = Gather(len(daemons))
        made = [
            Rank(
                name,
                rank,
                str(daemon.folder),
                gather.share(rank) if len(daemons) > 1 else None,
                together,
            )
            for rank, daemon in enumerate(daemons)
        ]
        for rank in made:
            self._ends.callback(rank.close)
        for started in [rank.start() for rank in made]:
            started.result(PATIENCE_S)
        self._ranks += made
        return together

    def serve(self) -> None:
        """Let all stages serve all their requests at the same time."""
        for served in self.begin():
            served.result(PATIENCE_S)

    def begin(self) -> "list[Future[None]]":
        return [rank.serve() for rank in self._ranks]

    def wait_for_daemons(self) -> None:
        """Have all ranks wait for their next daemons, as on GPUs."""
        for rank in self._ranks:
            assert rank.stage is not None
            rank.stage.connection.wait_s = PATIENCE_S

    def serve_until(self, met: Callable[[], bool]) -> int:
        """Serve until `met()`: the stages got into each other's way. Returns the requests of each.

        On a busy machine, one stage may have finished before another begins.
        """
        times = 1
        self.serve()
        while not met():
            self.serve()
            times += 1
        return times * REQUESTS

    def change(self) -> None:
        """Give all stages new weights at the same time."""
        for changed in [rank.change() for rank in self._ranks]:
            changed.result(PATIENCE_S)


@pytest.fixture
def daemons(world: World) -> list[Daemon]:
    """Two daemons with the shortest quanta: they ask for wanted memory at once."""
    return [world.daemon(name, budget="6MiB") for name in ("one", "two")]


@pytest.fixture
def cast() -> Iterator[Cast]:
    with ExitStack() as ends:
        yield Cast(ends)


def loads(daemon: Daemon) -> list[int]:
    return [component.loads for component in daemon.status().components]


@pytest.mark.parametrize("crosswise", [False, True])
def test_two_stages_take_turns_by_requests(
    daemons: list[Daemon], cast: Cast, crosswise: bool
) -> None:
    cast.stage("a", daemons)
    cast.stage("b", daemons[::-1] if crosswise else daemons)
    requests = cast.serve_until(lambda: all(sum(loads(daemon)) > 2 for daemon in daemons))
    for daemon in daemons:
        assert len(loads(daemon)) == 2
        assert max(loads(daemon)) <= requests + 1


@pytest.mark.parametrize("at", [0, 1])
def test_a_stage_on_one_of_the_devices_waits_for_requests_too(
    daemons: list[Daemon], cast: Cast, at: int
) -> None:
    """The wanted memory may be that of rank 0, or of the rank that waits for it."""
    cast.stage("a", daemons)
    cast.stage("c", daemons[at : at + 1])
    requests = cast.serve_until(lambda: daemons[at].component(f"a.tp{at}").loads > 1)
    assert daemons[at].component(f"a.tp{at}").loads <= requests + 1
    assert daemons[1 - at].component(f"a.tp{1 - at}").loads == 1


@pytest.mark.parametrize("other", [*permutations(range(3))], ids=str)
@pytest.mark.parametrize("kind", [Together, Pipeline])
def test_pipelines_take_turns_with_others_in_any_order_of_daemons(
    world: World, cast: Cast, kind: type[Together], other: Sequence[int]
) -> None:
    """Three ranks each: the first one, the one in the middle and the last one may each be first."""
    three = sorted(
        (world.daemon(name, budget="6MiB") for name in ("one", "two", "three")),
        key=lambda daemon: daemon.folder.stat().st_ino,
    )
    in_order = cast.stage("a", three, Pipeline)
    cast.stage("b", [three[at] for at in other], kind)
    cast.serve_until(lambda: all(sum(loads(daemon)) > 2 for daemon in three))
    assert isinstance(in_order, Pipeline)
    assert in_order.ahead > 1, "its steps did not overlap"
    cast.change()
    cast.serve()


def test_all_ranks_get_new_weights(daemons: list[Daemon], cast: Cast) -> None:
    cast.stage("a", daemons)
    cast.stage("b", daemons)
    cast.change()
    cast.serve()


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("noticed_in", ["a step", "a change"])
def test_a_rank_whose_daemon_is_gone_keeps_its_place(
    daemons: list[Daemon], cast: Cast, noticed_in: str, gone: int
) -> None:
    cast.stage("a", daemons)
    cast.stage("b", daemons)
    cast.serve()
    daemons[gone].kill()
    if noticed_in == "a step":
        cast.serve()
    cast.change()
    cast.serve()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_comes_back_to_its_daemon_by_itself(
    world: World,
    daemons: list[Daemon],
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
    gone: int,
) -> None:
    """The stages serve meanwhile; the ranks at the other daemon go on taking turns."""
    monkeypatch.setattr(rejoining, "LOOK_S", 0.01)
    cast.stage("a", daemons)
    cast.stage("b", daemons)
    cast.serve()
    daemons[gone].kill()
    cast.serve()
    again = world.daemon(("one", "two")[gone], budget="6MiB")
    cast.serve()
    names = {f"a.tp{gone}", f"b.tp{gone}"}
    while names:
        names.discard(again.await_record("Commit").name)
    cast.serve_until(lambda: sum(loads(again)) > 2)
    cast.change()
    cast.serve()


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("dies", ["in a request", "between requests"])
def test_ranks_wait_for_their_next_daemon_where_not_all_weights_fit(
    world: World, daemons: list[Daemon], cast: Cast, dies: str, gone: int
) -> None:
    cast.stage("a", daemons)
    cast.stage("b", daemons)
    cast.wait_for_daemons()
    cast.serve()
    served = cast.begin() if dies == "in a request" else []
    daemons[gone].kill()
    served += cast.begin()
    again = world.daemon(("one", "two")[gone], budget="6MiB")
    for one in served:
        one.result(PATIENCE_S)
    cast.serve_until(lambda: sum(loads(again)) > 2)
    cast.change()
    cast.serve()
