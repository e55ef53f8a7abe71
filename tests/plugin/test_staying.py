"""A stage that stays is refused at its start if another stage's turn would not fit beside it."""

import pytest
import torch
from torch import nn

from swapd.plan.advice import CHUNK_BYTES, DoesNotFit
from swapd.plan.demands import Demand, GpuFacts, WeightGroup
from swapd.plan.shares import divide
from swapd_client import TooLarge
from swapd_client.vllm.pipeline import Components
from swapd_client.vllm.stage.kv_cache import KvTerms, Layer
from tests.guarantees.harness import MIB
from tests.plugin.test_stage import (
    PATIENCE_S,
    Model,
    Scene,
    X,
    await_leases,
    leases,
    take_step,
    wanted,
)
from tests.plugin.test_window import Deep

#: The options of a stage that never leaves.
STAYS = {"cpu_offload_enabled": False}


def of(mib: int) -> nn.Module:
    """A layer of so many MiB."""
    return nn.Linear(1024, mib * 256, bias=False)


def test_a_stage_that_would_take_anothers_room_for_good_is_refused_when_it_starts(
    scene: Scene,
) -> None:
    first, model = scene.stage("thinker")
    first.note(["a"], ())
    first.begin()
    first.end()
    late = scene.connect("code2wav", **STAYS)
    with pytest.raises(TooLarge) as refused:
        late.memory.take({"": of(8)})
    assert (
        "stage 'code2wav' would stay, and leave thinker no room for its turn. Staying components "
        "(8 MiB of code2wav) and the turn of thinker (10 MiB) need 18 MiB, and swapd has a "
        "--budget of 16 MiB. Give it 18MiB at least, or have code2wav take turns: leave cpu_offload"
    ) in str(refused.value)
    status = scene.daemon.status()
    assert {c.name for c in status.components} == {"thinker"}
    assert (status.evictions, leases(scene.daemon)) == (0, {"thinker": 1})
    first.begin()
    with torch.inference_mode():
        assert torch.equal(model(X), Model()(X))
    first.end()


def test_what_stays_is_added_up(scene: Scene) -> None:
    first, _ = scene.stage("thinker")
    with first.using():
        pass
    small, small_one = scene.connect("encoder", **STAYS), of(2)
    small.memory.take({"": small_one})
    late = scene.connect("code2wav", **STAYS)
    with pytest.raises(TooLarge) as refused:
        late.memory.take({"": of(6)})
    assert "Staying components (2 MiB of encoder + 6 MiB of code2wav)" in str(refused.value)
    late.memory.take({"": of(4)})
    with late.using(), small.using():
        pass
    with first.using():
        await_leases(scene.daemon, {"thinker": 1})
    assert scene.daemon.status().evictions == 0, "all of it is in"


def test_a_turn_has_to_fit_beside_what_stays_in_use_or_still_to_come(scene: Scene) -> None:
    stays = scene.connect("code2wav", **STAYS)
    stays.memory.take({"": of(8)})
    late = scene.connect("thinker")
    with pytest.raises(TooLarge, match="can lend 8 MiB"):
        late.memory.take({"": Model()})
    with stays.using(), pytest.raises(TooLarge, match="can lend 8 MiB"):
        late.memory.take({"": Model()})
    late.memory.take({"": of(8)})


def test_a_stage_without_room_beside_a_pin_is_told_of_it_and_runs_without_it(scene: Scene) -> None:
    first, _ = scene.stage("thinker")
    with first.using():
        scene.daemon.observer.pin("thinker")
    late = scene.connect("talker")
    late.memory.take({"": of(12)})
    with pytest.raises(TooLarge, match="swapd unpin thinker"), late.using():
        pass
    scene.daemon.observer.unpin("thinker")
    with late.using():
        assert leases(scene.daemon) == {"talker": 1}


def test_a_pipeline_that_stays_is_refused_too(scene: Scene) -> None:
    first, _ = scene.stage("thinker")
    with first.using():
        pass
    late = scene.connect("dit", **STAYS)
    pipeline = nn.Sequential(of(4), of(4))
    with pytest.raises(TooLarge, match="or have dit take turns"):
        Components(late, late.options, pipeline, {"0": "dit", "1": "vae"})
    assert {c.name for c in scene.daemon.status().components} == {"thinker"}
    assert pipeline[0](X).shape == (1, 4 * 256), "it is as it was"


@pytest.mark.usefixtures("patient")
def test_a_small_stage_that_streams_stays_where_others_have_room_beside_it(scene: Scene) -> None:
    small, first, second = (scene.connect(name) for name in ("code2wav", "thinker", "talker"))
    small.memory.take({"": of(2)})
    small.turns.streaming.begin_with(dict, receives=True)
    first.memory.take({"": of(6)})
    first.memory.lend_cache(4 * MIB, KvTerms("auto", prefixes=False, layers=[Layer(0, 2 * MIB)]))
    second.memory.take({"": of(10)})
    asked = wanted(small)
    for stage in small, first:
        take_step(stage, "a")
    came = scene.meanwhile(second.begin)
    assert asked.wait(PATIENCE_S), "it came in first, so it is asked first"
    small.note((), ["a"])
    small.rest()
    first.note((), ["a"])
    first.rest()
    assert came.wait(PATIENCE_S)
    assert leases(scene.daemon) == {"code2wav": 1, "talker": 1}
    second.end()


def test_a_stage_whose_layers_stream_leaves_room_for_those_beside_its_turn(scene: Scene) -> None:
    """As `swapd plan` counts it: all of its layers would not even fit alone."""
    large, model = scene.connect("thinker", enable_layerwise_offload=True), Deep(layers=12)
    large.memory.take({"": model})
    small = scene.connect("code2wav")
    small.memory.take({"": of(2)})
    small.turns.streaming.begin_with(dict, receives=True)
    for stage in (large, small):
        take_step(stage, "a")
        stage.note((), ["a"])
        stage.rest()
    await_leases(scene.daemon, {"code2wav": 1})


def test_a_small_stage_that_streams_gives_way_between_two_steps_only(scene: Scene) -> None:
    small, first = scene.connect("code2wav", finish_within_s=0), scene.connect("thinker")
    second = scene.connect("talker")
    small.memory.take({"": of(2)})
    small.turns.streaming.begin_with(dict, receives=True)
    first.memory.take({"": of(6)})
    second.memory.take({"": of(10)})
    asked = wanted(small)
    small.note(["a"], ())
    small.begin()
    take_step(first, "a")
    came = scene.meanwhile(second.begin)
    assert asked.wait(PATIENCE_S)
    with small.turns.gate.lock:
        small.turns.end_if_idle()  # as its own thread does
    assert small.turns.held
    small.end()
    assert not small.turns.held
    first.note((), ["a"])
    first.rest()
    assert came.wait(PATIENCE_S)
    second.end()


def test_the_plan_and_the_stages_count_alike_what_stays_and_what_takes_turns(scene: Scene) -> None:
    """Even if a stage stays, its KV cache takes turns."""
    status = scene.daemon.status()
    scale = CHUNK_BYTES // status.chunk_bytes  # the plan's chunks are larger

    def claim(name: str, weights: int, cache: int, *, stays: bool) -> Demand:
        nbytes = weights * MIB * scale
        return Demand(
            name=name,
            stage_id=0,
            kind="ar",
            ours=True,
            parts=(WeightGroup(name, nbytes, nbytes, stays),),
            room=0,
            least_cache=cache * MIB * scale,
            said=True,
        )

    def planned(late_cache: int) -> int:
        """The bytes of an arena in which these take turns."""
        claims = [claim("talker", 6, 4, stays=True), claim("thinker", 4, late_cache, stays=False)]
        card = GpuFacts(0, status.budget_bytes * scale, 1e9, overhead=0)
        return divide(card, claims).budget_bytes // scale

    terms = KvTerms("drop", prefixes=False, layers=[Layer(0, 2 * MIB)])
    stays = scene.connect("talker", **STAYS)
    stays.memory.take({"": of(6)})
    stays.memory.lend_cache(4 * MIB, terms)
    late = scene.connect("thinker")
    late.memory.take({"": of(4)})
    with pytest.raises(DoesNotFit):
        planned(8)
    with pytest.raises(TooLarge):
        late.memory.lend_cache(8 * MIB, terms)
    assert planned(6) == status.budget_bytes
    late.memory.lend_cache(6 * MIB, terms)
    for stage in (stays, late, stays, late):
        with stage.using():
            pass
    assert scene.daemon.status().peak_bytes == status.budget_bytes
