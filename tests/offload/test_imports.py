"""`torch._dynamo` takes seconds of CPU to import: only processes that compile pay for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery

Run = Callable[[str], None]

PROGRAM = Path(__file__).parent / "programs" / "imports.py"


@pytest.fixture
def run(nursery: Nursery, daemon: Daemon) -> Run:
    def run(case: str) -> None:
        status, said = nursery.run(PROGRAM, case, daemon.folder)
        assert status == 0, said

    return run


def test_an_attached_model_imports_nothing_that_only_a_compiler_needs(run: Run) -> None:
    run("only_attached")


def test_what_is_compiled_afterwards_is_compiled_as_if_it_had_been_there(run: Run) -> None:
    run("compiled_afterwards")


def test_blocks_first_compiled_in_a_pass_that_holds_all_of_it_are_streamed_later(
    run: Run,
) -> None:
    """Then the import of `torch._dynamo` comes while the blocks' hooks are removed."""
    run("first_compiled_while_all_is_held")
