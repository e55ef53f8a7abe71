"""The configuration decides which weights of a stage are which component."""

from typing import Any

import pytest
from torch import nn

from swapd_client.errors import InvalidArgument
from swapd_client.vllm.options import options_of
from swapd_client.vllm.parts import StagePart, parts_of


class Thinker(nn.Module):
    """As Qwen2.5-Omni's: two encoders, and a language model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.audio_tower = nn.Linear(3, 3)
        self.language_model = nn.Module()
        self.language_model.embed = nn.Embedding(4, 2)
        self.language_model.norm = nn.LayerNorm(2, bias=False)
        self.lm_head = nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.language_model.embed.weight


class Stage(nn.Module):
    """The thinker under two names, as in vllm-omni."""

    def __init__(self) -> None:
        super().__init__()
        self.thinker = Thinker()
        self.model = self.thinker
        self.talker: nn.Module | None = None


MAIN = {"thinker.language_model.embed.weight", "thinker.language_model.norm.weight"}
VISUAL = {f"thinker.visual.{n}.{which}" for n in (0, 1) for which in ("weight", "bias")}
AUDIO = {"thinker.audio_tower.weight", "thinker.audio_tower.bias"}


def parts(model: nn.Module | None = None, name: str = "thinker", **given: Any) -> list[StagePart]:
    options = options_of({"swapd": given}, "stage")
    return parts_of({"": model or Stage()}, options, name)


ON: dict[str, Any] = {"cpu_offload_enabled": True}
SEQUENTIAL: dict[str, Any] = {**ON, "cpu_offload_strategy": "sequential"}
NORM = {"thinker.language_model.norm.weight"}


def only(*names: str) -> dict[str, Any]:
    return {"cpu_offload_components": names}


#: The settings; and the parts: name, policy, whether it is an encoder's, weights.
DIVIDED: dict[str, tuple[dict[str, Any], list[tuple[str, str, bool, set[str]]]]] = {
    "nothing said": ({}, [("thinker", "lru", False, MAIN | VISUAL | AUDIO)]),
    "off": (
        {"cpu_offload_enabled": False},
        [("thinker", "permanent", False, MAIN | VISUAL | AUDIO)],
    ),
    "on": (
        ON,
        [
            ("thinker", "lru", False, MAIN),
            ("thinker.visual", "lru", True, VISUAL),
            ("thinker.audio_tower", "lru", True, AUDIO),
        ],
    ),
    "sequential": (
        SEQUENTIAL,
        [
            ("thinker", "sequential", False, MAIN),
            ("thinker.visual", "sequential", True, VISUAL),
            ("thinker.audio_tower", "sequential", True, AUDIO),
        ],
    ),
    "an encoder": (
        SEQUENTIAL | only("visual"),
        [
            ("thinker", "permanent", False, MAIN | AUDIO),
            ("thinker.visual", "sequential", True, VISUAL),
        ],
    ),
    "the stage itself": (
        ON | only("thinker", "audio_tower"),
        [
            ("thinker", "lru", False, MAIN | VISUAL),
            ("thinker.audio_tower", "lru", True, AUDIO),
        ],
    ),
    "no encoder, and the head is tied": (
        ON | only("language_model"),
        [
            ("thinker", "permanent", False, {"thinker.lm_head.weight"} | VISUAL | AUDIO),
            ("thinker.language_model", "lru", False, NORM),
        ],
    ),
}


@pytest.mark.parametrize(("given", "wanted"), DIVIDED.values(), ids=DIVIDED)
def test_settings_divide_a_stage_into_components(
    given: dict[str, Any], wanted: list[tuple[str, str, bool, set[str]]]
) -> None:
    found = [(one.name, one.policy, one.encoder, {*one.tensors}) for one in parts(**given)]
    assert found == wanted


def test_a_rank_is_named_as_its_stage_and_a_stage_without_encoders_is_one_component() -> None:
    (talker,) = parts(nn.Linear(2, 2), name="talker", **ON)
    assert talker.policy == "lru"
    for stage in ("thinker", "Qwen2.5-VL", "Qwen3.tpu"):
        (rank,) = parts(name=f"{stage}.tp1", **ON, **only(stage))
        assert (rank.name, rank.policy) == (f"{stage}.tp1", "lru")


def test_a_tied_weight_is_in_one_component_only() -> None:
    model = Stage()
    model.thinker.visual[1].weight = nn.Parameter(model.thinker.lm_head.weight.data[:2])
    main, visual, audio = parts(model, cpu_offload_enabled=True)
    assert "thinker.visual.1.weight" in main.tensors
    assert "thinker.visual.1.weight" not in visual.tensors
    assert audio.tensors.keys() == AUDIO


def test_a_drafter_is_with_the_stage_it_drafts_for() -> None:
    options = options_of(None, "stage")
    (part,) = parts_of({"": nn.Linear(2, 2), "drafter": nn.Linear(2, 1)}, options, "thinker")
    assert part.tensors.keys() == {"weight", "bias", "drafter.weight", "drafter.bias"}


def test_a_component_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidArgument) as refused:
        parts(cpu_offload_enabled=True, cpu_offload_components=["visuals"])
    said = str(refused.value)
    assert "cpu_offload_components names 'visuals'" in said
    assert "there are: thinker itself, " in said
    assert "thinker.visual" in said


def test_what_is_for_diffusion_stages_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"enable_cpu_offload .*diffusion"):
        parts(enable_cpu_offload=True)
