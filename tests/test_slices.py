"""Short work of one session waits for a slice of another's long work, and no longer."""

import threading
from collections.abc import Iterator

import pytest

from swapd.daemon.slices import Slices, Work, whole

PATIENCE_S = 60.0


@pytest.fixture
def slices() -> Iterator[Slices]:
    made = Slices(1, "test")
    yield made
    made.shutdown()


def steps(log: list[str], name: str, count: int) -> Work[str]:
    for i in range(count):
        log.append(f"{name}{i}")
        yield
    return name


def held(gate: threading.Event) -> Work[None]:
    """Blocks the thread until the test has submitted all of its work."""
    gate.wait(PATIENCE_S)
    yield


def test_sessions_take_turns_and_the_work_of_each_is_done_in_order(slices: Slices) -> None:
    log: list[str] = []
    gate = threading.Event()
    slices.submit(0, held(gate))
    submitted = [(1, "a", 3), (1, "b", 1), (2, "c", 2), (3, "d", 1)]
    futures = [slices.submit(session, steps(log, name, n)) for session, name, n in submitted]
    gate.set()
    assert [future.result(PATIENCE_S) for future in futures] == ["a", "b", "c", "d"]
    assert log == ["a0", "c0", "d0", "a1", "c1", "a2", "b0"]


def test_a_small_piece_of_work_is_done_long_before_a_large_one_of_another(slices: Slices) -> None:
    log: list[str] = []
    gate = threading.Event()
    slices.submit(0, held(gate))
    large = slices.submit(1, steps(log, "large", 1000))
    small = slices.submit(2, steps(log, "small", 1))
    gate.set()
    small.result(PATIENCE_S)
    large.result(PATIENCE_S)
    assert log.index("small0") == 1


def test_one_session_is_never_served_by_two_threads_at_once() -> None:
    slices = Slices(3, "test")
    inside, most = 0, 0
    lock = threading.Lock()

    def busy() -> Work[None]:
        nonlocal inside, most
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            yield

    for future in [slices.submit(1, busy()) for _ in range(5)]:
        future.result(PATIENCE_S)
    slices.shutdown()
    assert most == 1


def test_what_fails_is_told_and_what_comes_after_it_is_done(slices: Slices) -> None:
    def fails() -> Work[None]:
        yield
        raise ValueError("injected")

    failed, after = slices.submit(1, fails()), slices.submit(1, steps([], "after", 2))
    with pytest.raises(ValueError, match="injected"):
        failed.result(PATIENCE_S)
    assert after.result(PATIENCE_S) == "after"


async def test_closing_waits_for_a_slice_and_does_no_other(slices: Slices) -> None:
    log: list[str] = []
    gate, begun, closed = threading.Event(), threading.Event(), threading.Event()

    def work() -> Work[None]:
        try:
            begun.set()
            assert gate.wait(PATIENCE_S)
            yield
        finally:
            closed.set()

    busy = slices.submit(1, work())
    assert begun.wait(PATIENCE_S)
    behind = slices.submit(1, steps(log, "behind", 1))
    other = slices.submit(2, steps(log, "other", 1))
    idle = slices.close()
    assert other.cancelled()
    assert not idle.done()
    gate.set()
    await slices.finish()
    assert closed.is_set()
    late = slices.submit(3, steps(log, "late", 1))
    assert all(future.cancelled() for future in (busy, behind, late))
    assert not log


def test_all_at_once_is_the_same() -> None:
    log: list[str] = []
    assert whole(steps(log, "x", 3)) == "x"
    assert log == ["x0", "x1", "x2"]
