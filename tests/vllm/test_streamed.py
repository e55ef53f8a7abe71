"""Real engines whose weights do not fit: layers come and go inside each step, unseen by tokens."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.vllm import larger
from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    on_swapd,
    plain,
)
from tests.vllm.models import DEEP, HEAD, write

Expected = Mapping[str, list[list[list[int]]]]

#: Of 147 MiB: 24 layers that take 6 MiB each, and a rest of 10 MiB.
LAYER, REST, LAYERS = 6 * MIB, 10 * MIB, 24
BUDGET = 96 * MIB
#: Nothing hides the peak of a step.
AS_IT_IS = {"load_workspace": 0}
#: It can be sent new weights.
SENT = {"weight_transfer_config": {"backend": "ipc"}}


@pytest.fixture
def place(deep: Path, nursery: Nursery) -> Iterator[Scene]:
    with engines.scene(deep, nursery) as made:
        yield made


def passing(daemon: Daemon, name: str = "deep") -> int:
    return sum(one.name.startswith(f"{name}.streamed/") for one in daemon.status().components)


def names_in(folder: Path) -> list[str]:
    """The names of a checkpoint's tensors."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def check(engine: Engine, expected: Expected, name: str = "deep") -> None:
    for number, prompts in enumerate(REQUESTS):
        assert engine.generate(prompts, TOKENS) == expected[name][number]


@pytest.mark.parametrize(
    ("isolation", "options", "streams", "slots"),
    [
        pytest.param("strict", {"resident": "auto"}, 12, 2, id="as many as do not fit"),
        pytest.param("relaxed", {"resident": "auto"}, 12, 2, id="the same, relaxed"),
        pytest.param("strict", {"cpu_offload_gb": 0.1}, 18, 3, id="cpu_offload_gb"),
        pytest.param("strict", {"enable_layerwise_offload": True}, 24, 3, id="all of them"),
    ],
)
def test_a_stage_larger_than_the_arena_computes_the_same(
    place: Scene,
    expected_deep: Expected,
    isolation: str,
    options: dict[str, Any],
    streams: int,
    slots: int,
) -> None:
    daemon = place.daemon(budget=BUDGET, isolation=isolation)
    of_it = on_swapd(place.models / "deep", daemon.folder, {**AS_IT_IS, **options})
    (engine,) = place.start(of_it)
    check(engine, expected_deep)
    assert passing(daemon) == streams
    assert daemon.status().peak_bytes == REST + (LAYERS - streams + slots) * LAYER


@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        pytest.param({"cpu_offload_gb": 0.07}, 13, id="cpu_offload_gb"),
        pytest.param({"offload_group_size": 4, "offload_num_in_group": 2}, 12, id="groups"),
    ],
)
def test_vllms_own_flags_work_as_written(
    place: Scene, expected_deep: Expected, flags: dict[str, Any], streams: int
) -> None:
    daemon = place.daemon(budget=BUDGET)
    (engine,) = place.start(on_swapd(place.models / "deep", daemon.folder, **flags))
    check(engine, expected_deep)
    assert passing(daemon) == streams
    assert "swapd streams these layers in vLLM's place" in engine.log


def test_two_of_them_take_turns_with_their_caches_and_outlive_the_daemon(
    place: Scene, expected_deep: Expected
) -> None:
    daemon = place.daemon(budget=BUDGET)
    options = {"resident": "70MiB", "kv": "auto", "finish_within_s": 0}
    cache = {"kv_cache_memory_bytes": 8 * MIB}
    engines = place.start(
        *(on_swapd(place.models / name, daemon.folder, options, **cache) for name in DEEP)
    )
    for number in range(2):
        for engine in engines:
            engine.begin("generate", REQUESTS[number], TOKENS)
        for engine in engines:
            assert engine.result() == expected_deep[engine.label][number]
    status = daemon.status()
    assert all(passing(daemon, name) for name in DEEP)
    assert status.peak_bytes <= BUDGET
    engine = engines[0]
    engine.ask(REQUESTS[2], TOKENS)
    engine.step(3)
    daemon.kill()
    assert engine.finish() == expected_deep[engine.label][2]
    daemon = place.daemon_again(daemon, budget=BUDGET)
    daemon.await_record("Commit", name="deep.streamed/model.layers.23")
    assert engine.generate(REQUESTS[3], TOKENS) == expected_deep[engine.label][3]
    assert passing(daemon)


def plainly(place: Scene, new: Path, before: object) -> object:
    """The answer of plain vLLM to a request with new weights of `deep`, which it writes first."""
    write(new, DEEP["deep"]._replace(seed=99))
    (alone,) = place.start(plain(new))
    after = alone.generate(REQUESTS[2], TOKENS)
    alone.close()
    assert after != before
    return after


def test_new_weights_of_a_stage_larger_than_the_arena_are_computed_with_while_another_takes_turns(
    place: Scene, expected_deep: Expected, tmp_path: Path
) -> None:
    after = plainly(place, tmp_path / "new", expected_deep["deep"][2])
    daemon = place.daemon(budget=BUDGET)
    deep, rival = place.start(
        *(on_swapd(place.models / name, daemon.folder, {"resident": "70MiB"}) for name in DEEP)
    )
    check(deep, expected_deep)
    rival.begin("generate", REQUESTS[1], TOKENS)
    deep.call("reload_weights", None, str(tmp_path / "new"))
    assert deep.generate(REQUESTS[2], TOKENS) == after
    assert rival.result() == expected_deep[rival.label][1]
    assert passing(daemon)
    assert daemon.status().bytes_out == 0


def test_weights_sent_to_a_stage_larger_than_the_arena_count_when_all_have_come_and_not_before(
    place: Scene, expected_deep: Expected, tmp_path: Path
) -> None:
    before, new, odd = expected_deep["deep"][2], tmp_path / "new", tmp_path / "odd"
    after = plainly(place, new, before)
    write(odd, DEEP["deep"]._replace(layers=LAYERS + 1, inner=HEAD))
    daemon = place.daemon(budget=BUDGET)
    deep, rival = place.start(
        *(
            on_swapd(place.models / name, daemon.folder, {"resident": "70MiB"}, **SENT)
            for name in DEEP
        ),
        imports="tests.vllm.transfers",
    )
    names = names_in(new)
    half, other_half = names[::2], names[1::2]  # of each layer, some in each

    def send(folder: Path, *names: str) -> None:
        deep.call("update_weights", {"folder": str(folder), "names": names})

    def fails(error: str, then: Callable[[], object]) -> None:
        deep.call("start_weight_update")
        send(new, *half)
        with pytest.raises(EngineFailed, match=error):
            then()

    wrong = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    fails("exceeds dimension size", lambda: send(odd, wrong))
    check(deep, expected_deep)
    unknown = f"model.layers.{LAYERS}.mlp.down_proj.weight"
    fails("no module or parameter", lambda: send(odd, unknown))
    check(deep, expected_deep)
    fails("have not come", lambda: deep.call("finish_weight_update"))
    with pytest.raises(EngineFailed, match="must be called before update_weights"):
        send(new, *other_half)
    check(deep, expected_deep)
    rival.begin("generate", REQUESTS[1], TOKENS)
    deep.call("start_weight_update")
    send(new, *half)
    rival.begin("generate", REQUESTS[3], TOKENS)
    send(new, *other_half)
    deep.call("finish_weight_update")
    assert deep.generate(REQUESTS[2], TOKENS) == after
    assert [rival.result(), rival.result()] == expected_deep[rival.label][1::2]
    fails("exceeds dimension size", lambda: send(odd, wrong))
    with pytest.raises(EngineFailed, match="exceeds dimension size"):
        deep.call("reload_weights", None, str(odd))
    assert deep.generate(REQUESTS[2], TOKENS) == after
    deep.call("start_weight_update")
    send(place.models / "deep", *names)
    deep.call("finish_weight_update")
    check(deep, expected_deep)
    assert passing(daemon)
    assert daemon.status().bytes_out == 0


def test_what_reads_all_weights_at_once_is_refused_and_new_weights_are_not(
    place: Scene, expected_deep: Expected, tmp_path: Path
) -> None:
    daemon = place.daemon(budget=BUDGET)
    of_it = on_swapd(place.models / "deep", daemon.folder, {"resident": "auto"})
    (engine,) = place.start(of_it)
    with pytest.raises(EngineFailed, match="leave out resident on an instance"):
        engine.call("save_sharded_state", str(tmp_path))
    engine.call("reload_weights")
    check(engine, expected_deep)


def test_two_servers_larger_than_the_arena_answer_and_copy_what_the_plan_says(
    models: Path, nursery: Nursery
) -> None:
    section = larger.measure(models, nursery, requests=3)
    assert all(row.holds for row in section.rows), section.rows


#: Of the weights of each server, 54 and 51 MiB, two thirds.
TIGHT = 38 * MIB


def test_ranks_stream_each_with_its_own_daemon(scene: Scene) -> None:
    ranks = {"tensor_parallel_size": 2}
    (without,) = scene.start(plain(scene.models / "thinker", **ranks))
    plainly = [without.generate(prompts, TOKENS) for prompts in REQUESTS]
    without.close()
    daemons = [scene.daemon(budget=TIGHT) for _ in range(2)]
    pattern = daemons[0].folder.with_name("d{gpu}")
    halves = {"offload_group_size": 2, "finish_within_s": 0}
    both = scene.start(
        *(on_swapd(scene.models / name, pattern, halves, **ranks) for name in larger.NAMES)
    )
    for prompts in REQUESTS:
        for engine in both:
            engine.begin("generate", prompts, TOKENS)
        said = {engine.label: engine.result() for engine in both}
        assert said["thinker"] == plainly.pop(0)
    for rank, daemon in enumerate(daemons):
        assert passing(daemon, f"thinker.tp{rank}") == 4
        assert daemon.status().bytes_out == 0
