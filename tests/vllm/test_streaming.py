"""vllm-omni's stages that stream (`async_chunk: true`), with room for the largest and a quarter.

Its own schedulers, runners, chunk transfer and connector; three engines under strict isolation.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import streams, swaps
from tests.vllm.engines import MIB, Engine, Nursery, Scene, rounds_until, scene

ROUNDS = 3
#: The number of requests at once; each has room in its stage's KV cache, which takes turns.
TOGETHER = 4
CACHES: dict[str, object] = {"kv_cache_memory_bytes": 16 * MIB, **streams.EXACT}
#: The largest with its cache, plus a quarter, in float32.
EXACT_BUDGET = "388MiB"
#: The talker's tokens for a sound; the thinker makes three times as many for a request.
CHUNKS = 8
THINKER, TALKER, CODE2WAV = streams.NAMES


@pytest.fixture(scope="module")
def streaming(
    tmp_path_factory: pytest.TempPathFactory, models: Path, deep: Path, nursery: Nursery
) -> Path:
    """A folder of the three."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / THINKER).symlink_to(deep / THINKER)
    (folder / TALKER).symlink_to(models / TALKER)
    nursery.call("tests.vllm.models:write_all", str(folder), CODE2WAV)
    return folder


@pytest.fixture(scope="module")
def said(streaming: Path, nursery: Nursery) -> list[list[Any]]:
    """The output of vllm-omni for each request without swapd."""
    with scene(streaming, nursery) as made:
        engines = streams.start(made, None, {})
        return [streams.ask(engines, number).said for number in range(ROUNDS)]


@pytest.fixture(scope="module")
def said_exactly(streaming: Path, nursery: Nursery) -> list[list[Any]]:
    """The same of requests that come one after the other, in numbers of 32 bits."""
    with scene(streaming, nursery) as made:
        engines = streams.start(made, None, {}, **streams.EXACT)
        return [streams.ask(engines, number).said for number in range(TOGETHER)]


@pytest.fixture
def place(streaming: Path, nursery: Nursery) -> Iterator[Scene]:
    with scene(streaming, nursery) as made:
        yield made


def came(daemon: Daemon) -> list[str]:
    daemon.watch.seen("CopyIn")  # reads all records until now
    return swaps.copies_in(daemon.watch.history)


def rounds(
    daemon: Daemon, engines: list[Engine], said: list[list[Any]], talker: int
) -> list[list[str]]:
    """The stages that came in for each request but the first, before which loading left some in.

    For at least one of them the talker came in `talker` times.
    """
    found: list[list[str]] = []
    for number in rounds_until(
        lambda: len(found) >= ROUNDS and talker in [one.count(TALKER) for one in found[1:]],
        f"the talker came in {talker} times for a request",
    ):
        before = len(came(daemon))
        assert streams.ask(engines, number % ROUNDS).said == said[number % ROUNDS]
        found.append(came(daemon)[before:])
    status = daemon.status()
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)
    return found[1:]


def test_a_request_costs_few_swaps_and_sounds_begin_before_the_thinker_has_ended(
    place: Scene, said: list[list[Any]]
) -> None:
    daemon = place.daemon(budget=streams.BUDGET)
    engines = streams.start(place, daemon, {"chunks_per_turn": CHUNKS})
    for stages in rounds(daemon, engines, said, 2):  # the first inside the thinker's request
        assert len(stages) <= 4
        assert stages.count(TALKER) <= 2
        assert CODE2WAV not in stages, "it fits beside the largest"


def test_a_stage_that_finishes_first_gives_way_once(place: Scene, said: list[list[Any]]) -> None:
    daemon = place.daemon(budget=streams.BUDGET)
    engines = streams.start(place, daemon, {"chunks_per_turn": 0})
    for stages in rounds(daemon, engines, said, 1):
        assert stages.count(TALKER) == 1
        assert CODE2WAV not in stages


def stages_that_came(daemon: Daemon) -> list[str]:
    """The same, each with its cache."""
    stages = [name.removesuffix(".kv") for name in came(daemon)]
    return [one for one, before in zip(stages, ["", *stages], strict=False) if one != before]


@pytest.mark.parametrize("scheduling", [{}, streams.AHEAD], ids=["in turn", "async scheduling"])
def test_requests_that_come_at_once_are_answered_as_each_alone_and_share_the_swaps(
    place: Scene, said_exactly: list[list[Any]], scheduling: Mapping[str, object]
) -> None:
    daemon = place.daemon(budget=EXACT_BUDGET)
    settings = {"chunks_per_turn": CHUNKS, "kv": "auto"}
    engines = streams.start(place, daemon, settings, **CACHES, **scheduling)
    found: list[list[str]] = []
    for _ in rounds_until(
        lambda: len(found) >= ROUNDS and max(one.count(TALKER) for one in found[1:]) >= 2,
        "the talker began before the thinker had ended",
    ):
        before = len(stages_that_came(daemon))
        heard = streams.ask_together(engines, range(TOGETHER)).said
        for (*tokens, sounds), (*expected, expected_sounds) in zip(
            heard, said_exactly, strict=True
        ):
            assert tokens == expected
            for sound, wanted in zip(sounds, expected_sounds, strict=True):
                assert sound == pytest.approx(wanted, abs=1e-5)
        found.append(stages_that_came(daemon)[before:])
    for stages in found[1:]:  # before the first, loading left some in
        assert len(stages) <= 2 * TOGETHER
        assert CODE2WAV not in stages, "it fits beside the largest"
    status = daemon.status()
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)
