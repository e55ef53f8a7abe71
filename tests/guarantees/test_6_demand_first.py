"""Guarantee 6: who asks waits for the memory and the copies of others, and for no guess."""

import pytest

from tests.guarantees.harness import MIB, World


@pytest.mark.parametrize("behind", ["prefetches", "a timed out acquire", "a killed process"])
def test_an_urgent_acquire_does_not_wait_for_copies_that_nobody_waits_for(
    world: World, behind: str
) -> None:
    daemon = world.daemon(budget="256MiB", bandwidth="20MB/s")
    guesser, asker = world.workers(daemon, "guesser", "asker")
    names = [f"g{i}" for i in range(5)]
    for i, name in enumerate(names):
        guesser.register(name, 40 * MIB, seed=i)
    small = asker.register("small", 2 * MIB, seed=9)
    match behind:
        case "prefetches":
            guesser.prefetch(*names)
        case "a timed out acquire":
            guesser.start("acquire", *names, timeout=0.5)
        case "a killed process":
            guesser.start("acquire", *names)
    daemon.await_record("CopyIn", name=names[-1])
    if behind == "a timed out acquire":
        daemon.await_record("Refuse", code="timeout")
    if behind == "a killed process":
        guesser.kill()
    asker.acquire("small", priority=10)
    assert asker.look("small")[1] == small
    assert not daemon.watch.seen("CopiedIn")[1:], "its own copy is the first to end"


def test_a_full_arena_of_guesses_gives_its_memory_up(world: World) -> None:
    daemon = world.daemon(budget="64MiB", bandwidth="10MB/s")
    guesser, asker = world.workers(daemon, "guesser", "asker")
    guesser.register("guess", 60 * MIB, seed=1)
    content = asker.register("asked", 8 * MIB, seed=2)
    guesser.prefetch("guess")
    daemon.await_record("CopyIn", name="guess")
    asker.acquire("asked")
    assert asker.look("asked")[1] == content
    assert daemon.component("guess").loads == 0
    asker.release("asked")
    assert guesser.acquire("guess")
