"""The board: words that only grow, and waits that end."""

import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swapd.shared.board import (
    ARRIVED,
    LANDED,
    SLOTS,
    ArrivalFailed,
    Board,
    Boards,
    LoadProgress,
    place,
    word,
)
from swapd.shared.fds import OwnedFd
from tests.processes import output_of
from tests.threads import started


@pytest.fixture
def boards() -> Iterator[Boards]:
    with closing(Boards()) as boards:
        yield boards


def waits(
    board: Board, slot: int, target: int, which: int = ARRIVED, **ends: Any
) -> tuple[threading.Thread, list[str]]:
    """A thread that waits, and its result."""
    came: list[str] = []

    def wait() -> None:
        try:
            came.append("arrived" if board.wait(slot, target, which, **ends) else "nothing")
        except ArrivalFailed:
            came.append("failed")

    thread = started(wait)
    return thread, came


def test_segments_arrive_in_order_of_their_bytes(boards: Boards) -> None:
    progress = LoadProgress(boards, (10, 10, 30), 30, 4)
    for nbytes, segments in ((0, 0), (9, 0), (10, 2), (29, 2), (30, 3)):
        progress.landed(5, nbytes)
        assert boards.board.has(0, word(5, segments))
        assert not boards.board.has(0, word(5, segments + 1))


def test_a_component_of_no_bytes_arrives(boards: Boards) -> None:
    LoadProgress(boards, (0,), 0, 4).landed(1, 0)
    assert boards.board.has(0, word(1, 1))


def test_one_generation_is_said_to_be_saved(boards: Boards) -> None:
    progress = LoadProgress(boards, (30,), 30, 4)
    progress.landed(6, 30)
    assert not boards.board.is_saved(0, 6)
    progress.saved(6)
    assert (boards.board.is_saved(0, 6), boards.board.is_saved(0, 7)) == (True, False)
    assert boards.board.has(0, word(6, 1)), "the two words are not in each other's way"
    assert not boards.board.is_saved(1, 6)


def test_a_wait_ends_when_the_word_is_there(boards: Boards) -> None:
    thread, came = waits(boards.board, 3, word(2, 2))
    boards.board.set(3, word(1, 9))
    boards.board.set(3, word(2, 1))
    boards.board.set(3, word(2, 2))
    thread.join()
    assert came == ["arrived"]


def test_a_wait_in_another_process_ends_too(boards: Boards) -> None:
    program = Path(__file__).parent / "programs" / "board_wait.py"

    def answer() -> None:
        boards.board.wait(1, word(1, 1))
        boards.board.set(0, word(7, 3))

    thread = started(answer)
    fd = boards.fd.fileno()
    assert output_of(program, fd, fds=[fd]) == "arrived\n"
    thread.join()


def test_a_failure_ends_the_waits_for_its_generation_only(boards: Boards) -> None:
    board = boards.board
    board.set(0, word(4, 1))
    thread, came = waits(board, 0, word(4, 2))
    board.fail(0, 4)
    thread.join()
    assert came == ["failed"]
    with pytest.raises(ArrivalFailed):
        board.has(0, word(4, 1))
    board.set(0, word(5, 1))
    assert board.has(0, word(5, 1))
    board.fail(0, 4)  # too late
    assert board.has(0, word(5, 1))


def test_a_wait_for_what_was_evicted_meanwhile_fails(boards: Boards) -> None:
    boards.board.set(0, word(9, 0))
    with pytest.raises(ArrivalFailed):
        boards.board.wait(0, word(8, 1))


def test_the_end_ends_every_wait(boards: Boards) -> None:
    waiting = [waits(boards.board, slot, word(1 << 40, 1)) for slot in (0, 5, SLOTS - 1)]
    boards.board.fail_all([0, 5, SLOTS - 1])
    for thread, came in waiting:
        thread.join()
        assert came == ["failed"]


@pytest.mark.parametrize("before", [0, word(1, 1), word(1 << 16, 0), word(0xFFFF, 0xFFFF), 1 << 62])
def test_the_end_changes_what_a_sleeper_compares(boards: Boards, before: int) -> None:
    """Otherwise a thread that has compared, and does not sleep yet, would never wake."""
    board = boards.board
    board.set(3, before)
    board.fail_all([3])
    halves = (ctypes.c_uint32 * 2).from_address(board.address + place(3))
    assert halves[0] != before & 0xFFFFFFFF
    assert halves[1] >> 30, "still larger than any word of a residency"
    for generation in (0, 1, 0xFFFF, 1 << 40):
        with pytest.raises(ArrivalFailed):
            board.has(3, word(generation, 1))


def test_an_ended_session_is_known_by_its_board(boards: Boards) -> None:
    theirs = Board(boards.fd)
    for slot in (0, SLOTS - 1):
        boards.board.set(slot, word(1, 1))
        boards.board.set_saved(slot, 1)
        boards.board.fail(slot, 1)
    assert not theirs.ended, "nothing else is written there"
    boards.close()
    assert theirs.ended
    assert boards.board.is_saved(0, 1)


def test_slots_run_out_and_are_given_back(boards: Boards) -> None:
    taken = [LoadProgress(boards, (1,), 1, 4) for _ in range(SLOTS)]
    with pytest.raises(IndexError):
        boards.take()
    taken[17].close()
    assert boards.take() == 17


def test_no_worker_can_shrink_the_board_under_the_daemon(boards: Boards) -> None:
    with OwnedFd(os.dup(boards.fd.fileno())) as fd:
        for attempt in (
            lambda: os.ftruncate(fd.fileno(), 0),
            lambda: fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()


def test_chunks_land_one_by_one_and_the_last_one_with_the_last_byte(boards: Boards) -> None:
    progress = LoadProgress(boards, (10,), 10, 4)
    for nbytes, chunks in ((0, 0), (3, 0), (4, 1), (9, 2), (10, 3)):
        progress.landed(5, nbytes)
        assert boards.board.has(0, word(5, chunks, LANDED), LANDED)
        assert not boards.board.has(0, word(5, chunks + 1, LANDED), LANDED)


def test_who_waits_for_chunks_hears_of_a_failure_and_of_the_end(boards: Boards) -> None:
    board = boards.board
    ends: list[Callable[[], None]] = [lambda: board.fail(0, 4), lambda: board.fail_all([0])]
    for end in ends:
        board.set(0, word(4, 1, LANDED), LANDED)
        thread, came = waits(board, 0, word(4, 2, LANDED), LANDED)
        end()
        thread.join()
        assert came == ["failed"]


def test_a_wait_has_an_end_of_its_own(boards: Boards) -> None:
    assert not boards.board.wait(0, word(1, 1), until=time.monotonic())
    given_up = threading.Event()
    thread, came = waits(boards.board, 0, word(1, 1), unless=given_up.is_set)
    given_up.set()
    boards.board.wake(0)
    thread.join()
    assert came == ["nothing"]
