"""A stage in parts, by layers: the weights of each part, and the parts that are copied."""

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client.vllm import layers
from swapd_client.vllm.layers import by_layers, divide, nbytes_of
from swapd_client.vllm.options import options_of
from swapd_client.vllm.parts import StagePart, parts_of
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.kv_cache import KvTerms, Layer
from tests.guarantees.harness import MIB
from tests.offload.test_wrappers import Scaled
from tests.plugin import test_rejoining
from tests.plugin.test_rejoining import Lives
from tests.plugin.test_stage import PATIENCE_S, Scene, await_leases, draw, leases, resident

lives = test_rejoining.lives
refusals = test_rejoining.refusals

LAYERS = [f"layers.{number}" for number in range(5)]


def kib(count: int = 1) -> torch.Tensor:
    return torch.zeros(256 * count)


def weights(*sizes: int) -> dict[str, torch.Tensor]:
    """A head of 1 KiB, and layers of `sizes` KiB."""
    made = {f"{layer}.w": kib(n) for layer, n in zip(LAYERS, sizes, strict=False)}
    return {**made, "head.w": kib()}


def shape(tensors: dict[str, torch.Tensor], least: int) -> dict[str, set[str]]:
    return {name: set(part) for name, part in by_layers(tensors, [LAYERS], least << 10).items()}


def test_layers_of_another_rank_of_a_pipeline_do_not_keep_those_here_together() -> None:
    """vLLM has a placeholder for each of the others'."""
    model = nn.Module()
    here = [nn.Linear(64, 64, bias=False) for _ in range(2)]  # 16 KiB
    model.layers = nn.ModuleList([nn.Identity(), *here])
    parts = parts_of({"": model}, options_of({}, "thinker"), "thinker")
    divide(parts, {"": model}, 1024, 64 << 10)
    assert [part.layers.keys() for part in parts] == [{"layers.1", "layers.2"}]


# --- the weights of each part ------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "least", "parts"),
    [
        (weights(2, 3, 2), 2, ["rest", "layers.0", "layers.1", "layers.2"]),
        (weights(1, 1, 2, 1, 1), 2, ["rest", "layers.0-1", "layers.2", "layers.3-4"]),
        (weights(1, 1, 2, 2, 1), 2, ["rest", "layers.0-1", "layers.2", "layers.3-4"]),
        (weights(2, 1), 2, []),
        (weights(1, 1, 1), 4, []),
        ({"head.w": kib()}, 1, []),
        ({f"{layer}.w": kib(2) for layer in LAYERS[:2]}, 2, ["layers.0", "layers.1"]),
    ],
)
def test_neighbours_are_one_part_until_it_is_large_enough_and_the_last_go_with_those_before(
    tensors: dict[str, torch.Tensor], least: int, parts: list[str]
) -> None:
    found = shape(tensors, least)
    assert list(found) == parts
    assert not parts or set().union(*found.values()) == set(tensors)
    assert found.get("rest", {"head.w"}) == {"head.w"}


def test_lists_that_are_too_small_are_in_the_rest() -> None:
    tensors = {**weights(3, 3), "eyes.0.w": kib(), "eyes.1.w": kib()}
    found = by_layers(tensors, [["eyes.0", "eyes.1"], LAYERS], 3 << 10)
    assert set(found["rest"]) == {"head.w", "eyes.0.w", "eyes.1.w"}


def test_what_layers_share_is_in_the_rest_alone() -> None:
    tensors = weights(2, 2, 2)
    store = kib(2)
    tensors |= {"layers.0.view": store[:128], "layers.2.view": store[128:]}
    tensors["layers.1.head"] = tensors["head.w"]
    tensors["layers.1.own"] = tensors["layers.1.w"][:3]
    found = shape(tensors, 2)
    assert found["rest"] == {"head.w", "layers.0.view", "layers.2.view", "layers.1.head"}
    assert found["layers.1"] == {"layers.1.w", "layers.1.own"}
    assert sum(map(len, found.values())) == len(tensors)


def test_of_what_wraps_others_all_goes_where_one_of_them_is_shared() -> None:
    tensors = weights(2, 2, 2)
    scale, values = kib(), kib()
    tensors |= {"layers.0.wrapper": Scaled(values, scale), "layers.1.scale": scale}
    tensors |= {"layers.0.values": values}
    found = shape(tensors, 2)
    assert found["rest"] == {"head.w", "layers.0.wrapper", "layers.1.scale", "layers.0.values"}


def test_each_storage_counts_once() -> None:
    one = kib(4)
    assert nbytes_of({"a": one, "b": one, "c": one[:7], "d": torch.zeros(0)}) == 4 << 10


class Layered(nn.Module):
    """Four layers of 2 MiB (one chunk), and a head of 1/2 MiB."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.model = nn.Module()
        self.layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(4))
        self.model.layers = self.layers
        self.head = nn.Linear(512, 256, bias=False)
        draw(self, seed, 1 / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[..., :512]
        out: torch.Tensor = self.head(x)
        return out


X = torch.ones(1, 512)
PARTS = ["rest", *(f"model.layers.{number}" for number in range(4))]
CHUNK = 2 * MIB


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is enough for a part."""
    monkeypatch.setattr(layers, "PART_CHUNKS", 1)


small = pytest.mark.usefixtures("_small")


def divided(room: int = 1 << 40, **given: Any) -> list[StagePart]:
    model = nn.Module()
    model.talker, model.visual = Layered(), Layered()
    parts = parts_of({"": model}, options_of({"swapd": given}, "stage"), "stage")
    divide(parts, {"": model}, CHUNK, room)
    return parts


@small
def test_what_takes_turns_leaves_by_layers() -> None:
    (part,) = divided()
    assert len(part.layers) == 9
    assert list(part.sources)[:2] == ["stage/rest", "stage/talker.model.layers.0"]
    assert set(part.layers["rest"]) == {"talker.head.weight", "visual.head.weight"}


@small
def test_encoders_that_come_apart_and_what_stays_or_leaves_at_once_are_whole() -> None:
    apart = {"cpu_offload_enabled": True}
    main, visual = divided(**apart)
    assert len(main.layers) == 5
    assert not visual.layers
    assert list(visual.sources) == ["stage.visual"]
    assert not divided(cpu_offload_enabled=False)[0].layers
    assert not divided(**apart, cpu_offload_strategy="sequential")[0].layers
    inner = divided(**apart, cpu_offload_components=["talker"])
    assert [(part.policy, len(part.layers)) for part in inner] == [("permanent", 0), ("lru", 5)]


@small
def test_a_stage_that_fits_whole_and_not_in_parts_stays_whole() -> None:
    """17 MiB take nine chunks, in parts as well: eight for layers, one for the rest."""
    assert divided(room=9 * CHUNK)[0].layers
    assert not divided(room=9 * CHUNK - 1)[0].layers


def test_a_drafters_layers_are_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PART_CHUNKS", 2)
    models = {"": Layered(), "drafter": Layered()}
    outside = {"drafter.model.layers.3.packed": kib()}
    parts = parts_of(models, options_of(None, "stage"), "stage", outside)
    divide(parts, models, CHUNK, 1 << 40)
    assert list(parts[0].layers) == [
        "rest",
        "model.layers.0-1",
        "model.layers.2-3",
        "drafter.model.layers.0-1",
        "drafter.model.layers.2-3",
    ]
    assert "drafter.model.layers.3.packed" in parts[0].layers["drafter.model.layers.2-3"]


# --- with a daemon of eight chunks, of which each stage takes five -------------------------


def stage_of(scene: Scene, name: str, seed: int = 0, **given: Any) -> tuple[Stage, Layered]:
    stage, model = scene.connect(name, **given), Layered(seed)
    assert stage.memory.take({"": model}) == 8 * MIB + MIB // 2
    return stage, model


def step(stage: Stage, model: Layered, seed: int = 0, times: int = 1) -> None:
    """Make one step, and check its result."""
    stage.begin()
    with torch.inference_mode():
        assert torch.equal(model(X), Layered(seed)(X) * times)
    stage.end()


def addresses(model: Layered) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@small
def test_with_its_cache_beside_it_a_stage_that_fits_only_whole_stays_whole(scene: Scene) -> None:
    for name, beside in (("parts", 3 * CHUNK), ("whole", 3 * CHUNK + 1)):
        scene.connect(name).memory.take({"": Layered()}, beside=beside)
    families = [c.part_of for c in scene.daemon.status().components]
    assert families == ["parts"] * len(PARTS) + [""]


@small
def test_all_parts_are_held_and_given_back_together(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "swapd_client")
    stage, model = stage_of(scene, "thinker")
    assert "thinker (8.5 MiB) takes turns by layers, in 5 parts" in caplog.messages[-1]
    names = {f"thinker/{part}" for part in PARTS}
    stage.note(["a"], ())
    step(stage, model)
    assert "thinker is loaded, after " in caplog.messages[-1]
    assert leases(scene.daemon) == dict.fromkeys(names, 1)
    stage.note((), ["a"])
    stage.rest()
    await_leases(scene.daemon, {})
    assert resident(scene.daemon) == names
    policies = {(c.policy, c.part_of) for c in scene.daemon.status().components}
    assert policies == {("lru", "thinker")}


@small
def test_a_stage_that_comes_back_leaves_by_layers_again(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "swapd_client")
    first, model = stage_of(lives, "first")
    second, other = stage_of(lives, "second", 1)
    before = addresses(model), addresses(other)
    for _ in range(2):
        step(first, model)
        step(second, other, 1)
        caplog.clear()
        daemon = lives.bring_back(first, second)
        assert (addresses(model), addresses(other)) == before
        assert {c.part_of for c in daemon.status().components} == {"first", "second"}
        for _ in range(2):
            step(first, model)
            step(second, other, 1)
        assert daemon.status().bytes_in == 10 * CHUNK - 3 * MIB + 4 * CHUNK
        said = f"first is back in swapd at {daemon.folder}: first (8.5 MiB)"
        assert caplog.messages.count(said) == 1


@small
@pytest.mark.parametrize("cache", [0, CHUNK])
def test_it_does_not_come_back_where_its_parts_fit_one_by_one_only(
    lives: Lives,
    refusals: SimpleQueue[Exception],
    caplog: pytest.LogCaptureFixture,
    cache: int,
) -> None:
    stage, model = stage_of(lives, "thinker")
    if cache:
        stage.memory.lend_cache(cache, KvTerms("drop", prefixes=False, layers=[Layer(0, cache)]))
    before = addresses(model)
    daemon = lives.restart(budget=4 * CHUNK + cache)
    refusals.get(timeout=PATIENCE_S)
    step(stage, model)
    assert stage.alone
    assert not daemon.status().components
    assert "thinker cannot come back to swapd" in caplog.text
    assert f"it needs {10 + cache // MIB} MiB at once" in caplog.text
    assert f"can lend {8 + cache // MIB} MiB: start it with a larger --budget" in caplog.text
    lives.bring_back(stage)
    step(stage, model)
    assert addresses(model) == before
