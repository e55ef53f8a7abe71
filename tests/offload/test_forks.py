"""Objects dropped in a forked child free the child's own resources, and none of the parent's.

A child has other memory at addresses that it did not inherit, and other files at the numbers of
descriptors that it closed. It must not send on its parent's connections.
"""

from collections.abc import Iterator
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


#: A descriptor: a process that becomes a service closes all of them, and then reuses their numbers.
#: A board: the end of a process does not wait for threads that write to it.
DROPPED = [
    "a_client_dropped",
    "a_board_at_exit",
    "copies_of_weights",
    "a_descriptor_dropped",
    "a_lease_and_a_generator_dropped",
    "detached_in_the_child",
]
#: What a thread holds when another thread forks.
HELD = ["whole", "streamed_all_in", "streamed", "in_use", "while_a_thread_attaches"]


@pytest.mark.parametrize("case", [*DROPPED, *HELD])
def test_a_child_frees_its_own_and_nothing_of_its_parents(
    nursery: Nursery, daemon: Daemon, case: str
) -> None:
    status, said = nursery.run(PROGRAM, case, daemon.folder)
    assert status == 0, said
