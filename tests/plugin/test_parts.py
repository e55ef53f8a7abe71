"""The configuration decides which weights of a stage are which component."""

from typing import Any

import pytest
from torch import nn

from swapd_client.errors import InvalidSettings
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


def described(found: list[StagePart]) -> list[tuple[str, str, bool]]:
    return [(part.name, part.policy, part.encoder) for part in found]


def test_a_stage_that_says_nothing_is_one_component_and_takes_turns() -> None:
    found = parts()
    assert described(found) == [("thinker", "lru", False)]
    assert found[0].tensors.keys() == MAIN | VISUAL | AUDIO


def test_one_that_says_it_is_not_to_be_offloaded_stays() -> None:
    assert described(parts(cpu_offload_enabled=False)) == [("thinker", "permanent", False)]


def test_its_encoders_are_components_of_their_own_if_it_is_to_be_offloaded() -> None:
    found = parts(cpu_offload_enabled=True)
    assert described(found) == [
        ("thinker", "lru", False),
        ("thinker.visual", "lru", True),
        ("thinker.audio_tower", "lru", True),
    ]
    assert [part.tensors.keys() for part in found] == [MAIN, VISUAL, AUDIO]


def test_what_is_not_named_stays() -> None:
    found = parts(cpu_offload_enabled=True, cpu_offload_components=["visual"])
    assert described(found) == [("thinker", "permanent", False), ("thinker.visual", "lru", True)]
    assert found[0].tensors.keys() == MAIN | AUDIO


def test_the_stage_itself_can_be_named() -> None:
    found = parts(cpu_offload_enabled=True, cpu_offload_components=["thinker", "audio_tower"])
    assert described(found) == [("thinker", "lru", False), ("thinker.audio_tower", "lru", True)]


def test_of_a_rank_the_stage_is_named_as_the_stage() -> None:
    found = parts(name="thinker.tp1", cpu_offload_enabled=True, cpu_offload_components=["thinker"])
    assert described(found) == [("thinker.tp1", "lru", False)]


def test_what_is_sequential_leaves_when_it_is_given_back() -> None:
    found = parts(cpu_offload_enabled=True, cpu_offload_strategy="sequential")
    assert {part.policy for part in found} == {"sequential"}
    found = parts(
        cpu_offload_enabled=True,
        cpu_offload_strategy="sequential",
        cpu_offload_components=["visual"],
    )
    assert described(found)[0] == ("thinker", "permanent", False)
    assert described(found)[1] == ("thinker.visual", "sequential", True)


def test_what_is_no_encoder_is_needed_in_every_step() -> None:
    found = parts(cpu_offload_enabled=True, cpu_offload_components=["language_model"])
    assert described(found)[1] == ("thinker.language_model", "lru", False)
    assert found[1].tensors.keys() == {"thinker.language_model.norm.weight"}, "the rest is tied"


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


def test_a_stage_without_encoders_is_one_component_all_the_same() -> None:
    found = parts(nn.Linear(2, 2), name="talker", cpu_offload_enabled=True)
    assert described(found) == [("talker", "lru", False)]


def test_a_component_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidSettings) as refused:
        parts(cpu_offload_enabled=True, cpu_offload_components=["visuals"])
    said = str(refused.value)
    assert "cpu_offload_components names 'visuals'" in said
    assert "there are: thinker itself, " in said
    assert "thinker.visual" in said


def test_what_is_for_diffusion_stages_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"enable_cpu_offload .*diffusion"):
        parts(enable_cpu_offload=True)
