"""Work in slices: whose turn it is, and what becomes of it when it is closed."""

import threading
from collections.abc import Generator, Iterator

import pytest

from swapd.slices import Slices

PATIENCE_S = 60.0


@pytest.fixture
def slices() -> Iterator[Slices]:
    made = Slices(1, "test")
    yield made
    made.shutdown()


class Held:
    """Work of which the first slice waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.closed = False

    def work(self) -> Generator[None, None, str]:
        try:
            self.begun.set()
            assert self.let_go.wait(PATIENCE_S)
            yield
            return "done"
        finally:
            self.closed = True


def counted(done: list[str], name: str, count: int) -> Generator[None, None, str]:
    for _ in range(count):
        done.append(name)
        yield
    return name


def test_a_short_job_waits_for_a_slice_of_a_long_one_and_one_session_keeps_its_order(
    slices: Slices,
) -> None:
    done: list[str] = []
    held = Held()
    first = slices.submit(0, held.work())
    assert held.begun.wait(PATIENCE_S)
    long = slices.submit(1, counted(done, "long", 100))
    after = slices.submit(1, counted(done, "after", 1))
    short = slices.submit(2, counted(done, "short", 1))
    held.let_go.set()
    results = [one.result(PATIENCE_S) for one in (first, long, after, short)]
    assert results == ["done", "long", "after", "short"]
    assert done.index("short") == 1
    assert done.index("after") == len(done) - 1


def test_what_fails_is_told_to_whoever_waits_and_the_others_go_on(slices: Slices) -> None:
    def fails() -> Generator[None, None, None]:
        yield
        raise ZeroDivisionError

    failed = slices.submit(1, fails())
    with pytest.raises(ZeroDivisionError):
        failed.result(PATIENCE_S)
    assert slices.submit(1, counted([], "next", 1)).result(PATIENCE_S) == "next"


async def test_closing_waits_for_a_slice_and_does_no_other(slices: Slices) -> None:
    done: list[str] = []
    held = Held()
    busy = slices.submit(1, held.work())
    assert held.begun.wait(PATIENCE_S)
    behind = slices.submit(1, counted(done, "behind", 1))
    other = slices.submit(2, counted(done, "other", 1))
    idle = slices.close()
    assert other.cancelled()
    assert not idle.done()
    held.let_go.set()
    await slices.finish()
    assert busy.cancelled()
    assert behind.cancelled()
    assert held.closed
    assert slices.submit(3, counted(done, "late", 1)).cancelled()
    assert not done
