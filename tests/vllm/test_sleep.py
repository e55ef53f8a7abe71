"""vLLM's sleep mode: the weights and the KV cache leave the device, and the tokens after it are
those of plain vLLM's, token for token. `test_serving.py` has its routes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm.engines import Engine, Scene, await_off, on_swapd, plain
from tests.vllm.test_kv import ALONE, CACHE, TOKENS
from tests.vllm.test_kv_lost import BUDGET, BY_BLOCKS, HEARS

#: One cannot be computed again by another batch without other last bits.
OPTIONS: Mapping[str, Any] = {"kv_cache_memory_bytes": CACHE, "dtype": "float32"}
Said = list[list[list[int]]]


def used_by(other: Engine, daemon: Daemon, said: Said) -> Callable[[], None]:
    """Check, while the talker sleeps: the other engine has the device, and evicts nobody."""

    def use() -> None:
        await_off(daemon, "talker")
        before = daemon.status().evictions
        assert [other.generate(few, TOKENS) for few in ALONE] == said
        assert daemon.status().evictions == before

    return use


def life(engine: Engine, new_weights: Path, asleep: Callable[[], None] = lambda: None) -> Said:
    """Its answers before and after sleep: at each level, by tags, in requests, with new weights."""
    said = [engine.generate(few, TOKENS) for few in ALONE]
    for level, tags in ((1, []), (2, []), (1, ["weights", "kv_cache"])):
        engine.ask(ALONE[level], TOKENS)
        engine.step(5)
        engine.sleep(level, "keep")
        asleep()
        for few in [[tag] for tag in tags] or [[]]:
            engine.wake_up(*few)
        said.append(engine.finish())
        said += [engine.generate(few, TOKENS) for few in ALONE]
    engine.sleep(2)
    engine.wake_up("weights")
    asleep()
    engine.call("reload_weights", None, str(new_weights))
    engine.wake_up("kv_cache")
    return said + [engine.generate(few, TOKENS) for few in ALONE]


@pytest.mark.parametrize("kv", ["auto", "private"])
def test_what_sleeps_leaves_the_device_and_wakes_with_the_tokens_of_plain_vllm(
    scene: Scene, other: Path, kv: str
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    talker = scene.models / "talker"
    alone, slept, thinker = scene.start(
        plain(talker, **OPTIONS, enable_prefix_caching=True),
        on_swapd(talker, daemon.folder, {"kv": kv}, **OPTIONS, enable_prefix_caching=True),
        on_swapd(scene.models / "thinker", daemon.folder, **OPTIONS),
    )
    expected = [thinker.generate(few, TOKENS) for few in ALONE]
    assert life(slept, other, used_by(thinker, daemon, expected)) == life(alone, other)
    assert daemon.status().bytes_out == 0, "a cache that sleeps is not saved"
    assert "swapd could not save" not in slept.log
    assert ("the KV cache of talker stays on the device" in slept.log) == (kv == "private")


@pytest.mark.parametrize(
    ("kv", "more"),
    [("auto", {"scheduler_cls": HEARS}), ("drop", BY_BLOCKS)],
    ids=["swapd's scheduler", "vLLM's own, a dropped cache"],
)
def test_requests_of_a_server_go_on_after_its_sleep_as_their_mode_says(
    scene: Scene, kv: str, more: Mapping[str, Any]
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    talker = scene.models / "talker"
    slept, thinker = scene.start(
        on_swapd(talker, daemon.folder, {"kv": kv}, **OPTIONS, **more),
        on_swapd(scene.models / "thinker", daemon.folder, **OPTIONS),
        multiprocessing=True,
    )
    use = used_by(thinker, daemon, [thinker.generate(few, TOKENS) for few in ALONE])
    expected = [slept.generate(few, TOKENS) for few in ALONE]
    for mode in ("keep", "wait", "abort"):
        slept.ask(ALONE[0], TOKENS)
        slept.step(3)
        slept.sleep(1, mode)
        use()
        slept.wake_up()
        (said,) = slept.finish()
        assert said == expected[0][0][: len(said)]
        assert len(said) == TOKENS or mode == "abort"
        assert [slept.generate(few, TOKENS) for few in ALONE] == expected
    assert daemon.status().bytes_out == 0
