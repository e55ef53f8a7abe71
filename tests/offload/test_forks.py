"""Objects dropped in a forked child free the child's own resources, and none of the parent's.

A child has other memory at addresses that it did not inherit, and other files at the numbers of
descriptors that it closed. It must not send on its parent's connections.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery

PROGRAM = Path(__file__).parent / "programs" / "forks.py"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("tests.offload.modules")
    yield nursery
    nursery.close()


Run = Callable[[str], None]


@pytest.fixture
def run(nursery: Nursery, daemon: Daemon) -> Run:
    def run(case: str) -> None:
        status, said = nursery.run(PROGRAM, case, daemon.folder)
        assert status == 0, said

    return run


def test_a_client_dropped_in_a_child_unmaps_nothing_there(run: Run) -> None:
    run("a_client_dropped")


def test_a_board_stays_mapped_until_the_process_is_over(run: Run) -> None:
    """The end of a process does not wait for threads that write to it."""
    run("a_board_at_exit")


def test_copies_of_weights_are_a_childs_own(run: Run) -> None:
    run("copies_of_weights")


def test_a_descriptor_dropped_in_a_child_closes_none_of_the_childs(run: Run) -> None:
    """A process that becomes a service closes all descriptors, and then reuses their numbers."""
    run("a_descriptor_dropped")


@pytest.mark.parametrize("how", ["whole", "streamed_all_in", "streamed", "in_use"])
def test_what_a_thread_holds_when_another_forks_stays_its_own(run: Run, how: str) -> None:
    run(how)


def test_a_lease_and_a_generator_dropped_in_a_child_say_nothing_there(run: Run) -> None:
    run("a_lease_and_a_generator_dropped")
