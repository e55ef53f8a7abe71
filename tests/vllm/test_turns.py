"""Two real engines in processes of their own, and one swapd with room for one, strictly isolated.

Each gives plain vLLM's answers, token for token, though its weights come and go; and they come and
go between requests, not at every step.
"""

from collections.abc import Mapping

from tests.guarantees import harness
from tests.guarantees.harness import Daemon
from tests.vllm import swaps
from tests.vllm.engines import (
    PATIENT,
    REQUESTS,
    TOKENS,
    Scene,
    await_components,
    on_swapd,
    rounds_until,
)

Expected = Mapping[str, list[list[list[int]]]]

NAMES = ("thinker", "talker")


def copies(daemon: Daemon) -> list[str]:
    daemon.watch.seen("CopyIn")  # reads all records until now
    return swaps.copies_in(daemon.watch.history)


def check_nothing_was_lost(daemon: Daemon) -> None:
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)


def test_requests_in_turn_cost_a_swap_each_before_their_first_step(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    engines = scene.on_swapd(daemon, *NAMES)
    before = len(copies(daemon))
    for number, prompts in enumerate(REQUESTS):
        for engine in engines:
            engine.ask(prompts, TOKENS)
            engine.step(1)
            begun = len(copies(daemon))
            assert engine.finish() == expected[engine.label][number]
            assert len(copies(daemon)) == begun, "a swap inside a request"
    switches = len(REQUESTS) * len(engines)
    assert switches - 1 <= len(copies(daemon)) - before <= switches
    check_nothing_was_lost(daemon)
    for engine in engines:
        engine.shut_down()
    await_components(daemon)


def test_engines_that_are_busy_at_once_take_turns_of_whole_requests(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    settings = {"finish_within_s": harness.PATIENCE_S}
    engines = scene.start(
        *(on_swapd(scene.models / name, daemon.folder, settings) for name in NAMES),
        imports=PATIENT,
    )
    copied = len(copies(daemon))
    turns: list[swaps.Turn] = []
    for number in rounds_until(
        lambda: swaps.switches(turns) > len(engines),
        "one had its turn before the other had answered all requests",
    ):
        for engine in engines * number:
            engine.begin("serve", REQUESTS, TOKENS)
            engine.begin("rest")
        for engine in engines * number:
            answers = engine.result()
            assert [tokens for tokens, _, _ in answers] == expected[engine.label]
            turns.extend(swaps.Turn(engine.label, *times) for _, *times in answers)
            engine.result()
    in_turn = copies(daemon)[copied:]
    assert not swaps.inside(turns, daemon.watch.history)
    assert len(in_turn) <= 2 * swaps.switches(turns)
    check_nothing_was_lost(daemon)
