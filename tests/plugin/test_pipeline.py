"""How settings divide the weights of a diffusion pipeline into components. Without vLLM."""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from swapd import spawn
from swapd_client import DuplicateName, SessionFenced, TooLarge
from swapd_client.errors import InvalidArgument
from swapd_client.offload.strategy import Kind
from swapd_client.vllm.options import Options, options_of
from swapd_client.vllm.pipeline import Components, as_whole
from swapd_client.vllm.stage import Stage
from tests.guarantees.harness import PATIENCE_S
from tests.offload.modules import TOKENS, Model, computed, seeded
from tests.plugin import test_rejoining
from tests.plugin.test_rejoining import Lives

lives, refusals = test_rejoining.lives, test_rejoining.refusals

KINDS: dict[str, Kind] = {"text_encoder": "encoder", "transformer": "dit", "vae": "vae"}
LARGE = torch.nn.Linear(2000, 2000)  # 15 MiB


def options(**swapd: object) -> Options:
    return options_of({"swapd": swapd}, "stage")


@pytest.fixture(scope="module")
def daemon() -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget=8 << 20, isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def stage(daemon: spawn.Spawned) -> Iterator[Stage]:
    stage = Stage.connect(options(endpoint=str(daemon.folder)), "dit", gpu=None)
    yield stage
    stage.close()


def status(stage: Stage) -> dict[str, Any]:
    return {c.name: c for c in stage.client.status().components}


def test_what_is_declared_twice_is_there_once(stage: Stage) -> None:
    model = seeded(Model)
    model.add_module("dit", model.transformer)
    Components(stage, options(), model, {"transformer": "dit", "dit": "dit"})
    assert list(status(stage)) == ["dit.transformer"]


def test_what_is_inside_another_goes_with_that(stage: Stage) -> None:
    model = seeded(Model)
    Components(stage, options(), model, {"text_encoder.embed": "dit", "text_encoder": "dit"})
    assert list(status(stage)) == ["dit.text_encoder"]


def test_a_vaes_private_methods_may_be_called_from_outside(stage: Stage) -> None:
    model = seeded(Model)
    hidden = torch.zeros(1, 256)
    wanted = model.vae._decode(hidden)
    Components(stage, options(), model, KINDS)
    assert torch.equal(model.vae._decode(hidden), wanted)


def test_what_a_request_had_computed_when_it_was_fenced_is_not_to_be_used(stage: Stage) -> None:
    model, wanted = computed(TOKENS, Model)
    pipeline = Components(stage, options(), model, KINDS)
    fenced = SessionFenced("fenced")

    def request() -> None:
        with pipeline.request():
            model.transformer(torch.zeros(1, 256))
            stage.client._daemon_gone(fenced)

    with pytest.raises(SessionFenced):
        request()
    with pipeline.request():
        assert torch.equal(model(TOKENS), wanted)


def test_components_come_back_to_the_next_daemon_where_other_stages_wait_for_it(
    lives: Lives, refusals: SimpleQueue[Exception]
) -> None:
    stage, model = lives.connect("dit"), seeded(Model)
    wanted = model(TOKENS)
    stage.connection.wait_s = PATIENCE_S  # as on a GPU
    weights = Components(stage, options(), model, KINDS)
    lives.restart()
    for _ in KINDS:
        lives.daemon.await_record("Commit")
    with weights.request():  # it waits until all of them are registered
        assert torch.equal(model(TOKENS), wanted)
        assert not stage.alone
    assert refusals.empty()


def test_a_pipeline_of_which_nothing_is_declared_is_one_component(stage: Stage) -> None:
    model, wanted = computed(TOKENS, Model)
    pipeline = Components(stage, options(), model, {})
    assert list(status(stage)) == ["dit"]
    with pipeline.request():
        assert torch.equal(model.forward(TOKENS), wanted)
    assert status(stage)["dit"].leases == 0


def test_what_cannot_be_leaves_the_pipeline_as_it_was(stage: Stage) -> None:
    model, wanted = computed(TOKENS, Model)
    model.add_module("unet", LARGE)
    with pytest.raises(TooLarge, match="list of blocks"):
        Components(stage, options(), model, {**KINDS, "unet": "dit"})
    stage.client.register("dit.vae", {"x": b"taken"})
    with pytest.raises(DuplicateName, match=r"swapd: {component: \.\.\.}"):
        Components(stage, options(), model, KINDS)
    named = options(cpu_offload_enabled=True, cpu_offload_components=["mllm"])
    with pytest.raises(InvalidArgument, match=r"'mllm'.* text_encoder, tr"):
        Components(stage, named, model, KINDS)
    assert list(status(stage)) == ["dit.vae"]
    assert torch.equal(model(TOKENS), wanted)


def test_a_stage_is_one_component_if_it_says_so_or_has_several_ranks() -> None:
    said = options(cpu_offload_enabled=True, cpu_offload_components=["."])
    whole = as_whole(said, "dit", 1)
    assert whole is not None
    assert whole.offload.cpu_offload_components == ("dit",)
    assert as_whole(options(), "dit", 1) is None
    assert as_whole(options(cpu_offload_enabled=True), "dit", 1) is None
    assert as_whole(options(), "dit", 2) is not None
    assert as_whole(options(cpu_offload_enabled=True), "dit", 2) is not None
    with pytest.raises(InvalidArgument, match="runs on 2 GPUs"):
        as_whole(options(enable_layerwise_offload=True), "dit", 2)
    with pytest.raises(InvalidArgument, match="runs on 2 GPUs"):
        as_whole(options(cpu_offload_enabled=True, cpu_offload_components=["vae"]), "dit", 2)
    with pytest.raises(InvalidArgument, match="cpu_offload_enabled: true"):
        as_whole(options(enable_cpu_offload=True, cpu_offload_components=["."]), "dit", 1)
