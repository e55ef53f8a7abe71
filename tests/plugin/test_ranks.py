"""The errors of one rank of a stage that all others see, and ranks that cannot meet.

The ranks are threads here; `test_stages_with_ranks.py` has real daemons, and the order of leases.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from swapd_client.vllm.ranks import RankGone, Ranks, RanksApart
from tests.plugin.gather import Gather

#: A limit for hangs, in seconds.
PATIENCE_S = 30.0


def nothing() -> None:
    """Does nothing: for a rank without a lease."""


class Stage:
    """Ranks that have met, each with a thread that makes its steps."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.threads = [ThreadPoolExecutor(1, f"rank {i}") for i in range(len(folders))]
        gather = Gather(len(folders))
        met = [
            self.threads[i].submit(Ranks, i, folder, gather.share(i), stage="thinker")
            for i, folder in enumerate(folders)
        ]
        self.ranks: list[Ranks] = []
        problems = []
        for future in met:
            if problem := future.exception(PATIENCE_S):
                problems.append(problem)
            else:
                self.ranks.append(future.result())
        if problems:
            self.close()
            raise ExceptionGroup("they did not meet", problems)  # type: ignore[type-var]

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.close()
        for thread in self.threads:
            thread.shutdown()

    def step(self, rank: int, hold: Callable[[], object] = nothing) -> "Future[None]":
        """Have a rank take its turn, and call `hold` in it."""

        def turn() -> None:
            with self.ranks[rank].acquiring(lambda: False, nothing):
                hold()

        return self.threads[rank].submit(turn)


@contextmanager
def stage(*folders: Path) -> Iterator[Stage]:
    made = Stage(folders)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The folders of three daemons, in the order of leases."""
    made = [tmp_path / name for name in "abc"]
    for folder in made:
        folder.mkdir()
    return sorted(made, key=lambda folder: (folder.stat().st_dev, folder.stat().st_ino))


def test_who_gets_no_memory_says_so_to_all_that_come_later(folders: list[Path]) -> None:
    def fail() -> None:
        raise ValueError("the copy failed")

    with stage(*folders) as made:
        steps = [made.step(0, fail), made.step(1), made.step(2)]
        with pytest.raises(ValueError, match="the copy failed"):
            steps[0].result(PATIENCE_S)
        for step in steps[1:]:
            with pytest.raises(RankGone, match=r"rank 0 of thinker .*the copy failed"):
                step.result(PATIENCE_S)
        for step in [made.step(rank) for rank in range(3)]:
            step.result(PATIENCE_S)  # the next call works


def test_the_end_of_a_rank_is_noticed_by_all_that_come_later(folders: list[Path]) -> None:
    with stage(*folders) as made:
        waiting = [made.step(1), made.step(2)]
        made.ranks[0].close()
        for step in waiting:
            with pytest.raises(RankGone, match="rank 0 of thinker has ended"):
                step.result(PATIENCE_S)


def test_the_end_of_a_rank_is_noticed_by_the_one_before(folders: list[Path]) -> None:
    with stage(*folders[:2]) as made:
        made.ranks[1].close()
        with pytest.raises(RankGone, match="rank 1 of thinker has ended"):
            made.step(0).result(PATIENCE_S)


def test_a_rank_that_leaves_waits_for_nobody_any_more(folders: list[Path]) -> None:
    with stage(*folders[:2]) as made:
        waiting = made.step(1)
        made.ranks[1].close()
        with pytest.raises(RankGone):
            waiting.result(PATIENCE_S)


def test_two_ranks_at_one_daemon_are_refused_whatever_its_path(
    folders: list[Path], tmp_path: Path
) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(folders[0])
    with pytest.raises(ExceptionGroup) as raised:
        Stage([folders[0], alias])
    assert [type(problem) for problem in raised.value.exceptions] == [RanksApart, RanksApart]
    said = str(raised.value.exceptions[0])
    assert "ranks 0 and 1 of thinker would share the swapd at" in said
    assert "/run/swapd/gpu{gpu}" in said


def test_a_daemon_that_is_not_there_is_said_by_all_ranks(
    folders: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        Stage([folders[0], tmp_path / "none"])
    for problem in raised.value.exceptions:
        assert isinstance(problem, RanksApart)
        assert f"rank 1 of thinker finds no swapd at {tmp_path / 'none'}" in str(problem)


def test_nothing_is_left_open(folders: list[Path]) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with stage(*folders) as made:
        made.ranks[0].close()
    made.ranks[0].wake()  # too late, and harmless
    made.ranks[0].close()
    assert descriptors() == before
