"""A component's range on the GPU, alone: each test is a case of a program, with a card of its own.

The program makes chunks, as the daemon would, and sends them by `Files`.
"""

from pathlib import Path

import pytest

from tests import fakecuda
from tests.processes import output_of

PROGRAM = Path(__file__).parent / "programs" / "gpu_range.py"


def run(case: str, *args: str, **knobs: object) -> None:
    with fakecuda.machine(total=64 << 20, **knobs) as fake:
        output_of(PROGRAM, case, *args, env=fake.environment())
        assert fake.held_bytes() == 0


both_drivers = pytest.mark.parametrize("unmap_one", [False, True], ids=["at once", "one by one"])


@both_drivers
def test_the_same_address_whatever_is_behind(unmap_one: bool) -> None:
    run("shown_at_one_address", unmap_one=unmap_one)


@both_drivers
def test_where_nothing_stays_mapped_without_access_it_is_unmapped(unmap_one: bool) -> None:
    run("without_mappings_that_nobody_may_use", unmap_one=unmap_one)


def test_no_chunk_is_reached_without_a_lease() -> None:
    run("reached_without_a_lease")


def test_what_was_reached_is_hidden_whatever_an_interrupt_left_undone() -> None:
    run("reached_and_interrupted")


def test_two_threads_that_are_granted_the_same_import_it_once() -> None:
    run("imported_by_two_threads")


def test_a_chunk_that_could_not_be_imported_can_be_the_next_time() -> None:
    run("imported_the_second_time")


def test_a_chunk_is_imported_once_and_shown_again_by_one_call() -> None:
    run("imported_once")


def test_dropped_chunks_are_free_memory() -> None:
    run("dropped")


def test_a_late_revocation_takes_no_newer_chunks_away() -> None:
    run("revoked_late")


def test_a_range_waits_for_chunks_and_meanwhile_for_nobody_else() -> None:
    """The thread that brings the chunks must handle revocations first."""
    run("waiting_for_chunks")


@pytest.mark.parametrize(
    "faults",
    ["cuMemMap 2 after=1 times=1", "cuMemImportFromShareableHandle 999 after=1 times=1"],
    ids=["map", "import"],
)
def test_a_failure_half_way_leaves_it_hidden_and_it_may_be_tried_again(faults: str) -> None:
    run("failing_half_way", faults)


def test_memory_of_its_own() -> None:
    run("with_memory_of_its_own")


def test_memory_taken_over_is_freed_or_stays_whoever_is_granted_it_late() -> None:
    run("taken_over")


def test_of_a_range_that_is_let_go_nothing_stays_mapped() -> None:
    run("let_go")


def test_no_event_is_left_of_a_stream_that_waited_for_a_component() -> None:
    run("waited_for_by_a_stream")


def test_an_error_that_more_memory_would_not_mend_is_said_as_it_is() -> None:
    run("refused_memory_of_its_own")


def test_no_room_for_memory_of_its_own() -> None:
    run("without_room_for_memory_of_its_own")


def test_what_was_saved_is_taken_from_the_master() -> None:
    run("saved")


def test_once_the_gpu_is_lost_hiding_succeeds_and_showing_does_not() -> None:
    run("on_a_lost_gpu")


def test_a_range_that_was_never_bound_is_freed() -> None:
    run("never_bound")
