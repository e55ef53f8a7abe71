"""Engines that start at once on one GPU: each measures its own memory, and no other's."""

from tests.cuda.gpu_world import MIB, World


def test_three_engines_that_start_at_once_measure_themselves_alone(world: World) -> None:
    """An engine's workspace is not free for another; a cache of one does not count as another's."""
    daemon = world.daemon()
    workers = world.workers(daemon, "thinker", "talker", "code2wav")
    for worker in workers:
        worker.measure()  # all have a context on the GPU before one measures
    loads, keeps = 12 * MIB, 6 * MIB
    starting = [worker.start("start_as_engine", loads, keeps) for worker in workers]
    for started in starting:
        assert started.result() == [0, 0, -keeps]
