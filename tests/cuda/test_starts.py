"""Engines that start at once on one GPU: each measures what it has taken itself, and no more."""

from tests.cuda.gpu_world import MIB, World


def test_three_engines_that_start_at_once_measure_themselves_alone(world: World) -> None:
    """What is lent to one to load in is not free for another; what one keeps, none has used."""
    daemon = world.daemon()
    workers = world.workers(daemon, "thinker", "talker", "code2wav")
    for worker in workers:
        worker.measure()  # all have a context on the GPU before one measures
    loads, keeps = 12 * MIB, 6 * MIB
    starting = [worker.start("start_as_engine", loads, keeps) for worker in workers]
    for started in starting:
        assert started.result() == [0, 0, -keeps]
