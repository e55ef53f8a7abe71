"""Stages of one device start one after the other, with any number of ranks.

The ranks are threads here, the daemons real; `tests/vllm/test_starting.py` has real engines.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd_client.vllm.start_turn import StartTurn
from tests.plugin.gather import Gather

#: A limit for hangs, in seconds.
PATIENCE_S = 60.0


class Stage:
    """The ranks of a stage, a thread each."""

    def __init__(self, name: str, *folders: Path) -> None:
        self._starts = [StartTurn(f"{name}.tp{i}", folder) for i, folder in enumerate(folders)]
        self._threads = ThreadPoolExecutor(len(folders))
        self._gather = Gather(len(folders))

    def begin(self) -> "list[Future[None]]":
        return [
            self._threads.submit(start.begin, self._gather.share(i))
            for i, start in enumerate(self._starts)
        ]

    def end(self) -> None:
        for start in self._starts:
            start.end()
        self._threads.shutdown()


@pytest.fixture
def daemons() -> Iterator[list[spawn.Spawned]]:
    with ExitStack() as stack:
        yield [stack.enter_context(spawn.daemon(budget="8MiB")) for _ in range(2)]


def starting(daemon: spawn.Spawned) -> list[str]:
    with swapd_client.connect(daemon.folder) as client:
        return [label.partition(":")[0] for label in client.status().starting]


def test_stages_on_two_devices_never_wait_for_each_other(daemons: list[spawn.Spawned]) -> None:
    """Their ranks 0 are on different devices; still, one stage starts before the other."""
    one, two = (daemon.folder for daemon in daemons)
    for _ in range(5):
        stages = [Stage("thinker", one, two), Stage("talker", two, one)]
        begun = [stage.begin() for stage in stages]
        while not any(all(rank.done() for rank in ranks) for ranks in begun):
            pass
        first = next(i for i, ranks in enumerate(begun) if all(rank.done() for rank in ranks))
        assert not all(rank.done() for rank in begun[1 - first])
        stages[first].end()
        for rank in begun[1 - first]:
            rank.result(PATIENCE_S)
        assert all(len(starting(daemon)) == 1 for daemon in daemons)
        stages[1 - first].end()
        assert all(starting(daemon) == [] for daemon in daemons)


def test_a_stage_of_which_one_rank_has_no_daemon_starts_nowhere(
    daemons: list[spawn.Spawned], tmp_path: Path
) -> None:
    stage = Stage("thinker", daemons[0].folder, tmp_path)
    for rank in stage.begin():
        with pytest.raises(RuntimeError, match=r"cannot start.*swapd serve"):
            rank.result(PATIENCE_S)
    assert starting(daemons[0]) == []
    stage.end()


def test_ranks_that_share_a_daemon_are_left_to_be_refused(daemons: list[spawn.Spawned]) -> None:
    stage = Stage("thinker", daemons[0].folder, daemons[0].folder)
    for rank in stage.begin():
        rank.result(PATIENCE_S)
    assert starting(daemons[0]) == []
    stage.end()
