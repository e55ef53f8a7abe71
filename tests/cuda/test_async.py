"""The asyncio client on the GPU: its loop never waits for the driver, nor for the GPU's work."""

from pathlib import Path

from tests.cuda.gpu_world import World
from tests.processes import output_of

PROGRAM = Path(__file__).parent / "programs" / "async_client.py"


def run(world: World, case: str) -> None:
    output_of(PROGRAM, case, world.daemon().folder, env=world.fake.environment())


def test_it_swaps_and_maps_in_threads(world: World) -> None:
    run(world, "swaps")


def test_a_release_never_blocks_and_waits_for_the_work(world: World) -> None:
    run(world, "a_release_with_work_pending")


def test_a_task_that_holds_another_lease_waits_and_the_loop_does_not(world: World) -> None:
    run(world, "a_task_with_another_lease")


def test_a_stream_waits(world: World) -> None:
    run(world, "a_stream_that_waits")


def test_an_acquire_cancelled_as_it_is_mapped_holds_nothing(world: World) -> None:
    run(world, "an_acquire_cancelled")


def test_closing_waits_for_what_is_pending(world: World) -> None:
    run(world, "closing_with_work_pending")
