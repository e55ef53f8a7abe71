"""Which options `additional_config.swapd` takes, and the error for each other one; and what a
diffusion stage's own offloading flags become. Without vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swapd_client.errors import InvalidArgument
from swapd_client.offload.settings import SettingsWarning
from swapd_client.vllm.options import Options, name_of_model, options_of, take_over


def of(**given: Any) -> Options:
    return options_of({"swapd": given}, "stage 'thinker'")


@pytest.mark.parametrize("config", [None, {}, {"swapd": {}}, {"another": 1}])
def test_a_stage_that_says_nothing_has_the_defaults(config: dict[str, Any] | None) -> None:
    assert options_of(config, "stage 'thinker'") == Options()


def test_all_that_can_be_said() -> None:
    options = of(
        component="thinker",
        endpoint="/run/swapd/gpu{gpu}",
        finish_within_s=3,
        load_workspace="9GiB",
        cpu_offload_enabled=True,
        cpu_offload_components=["visual", "audio_tower"],
        cpu_offload_strategy="sequential",
    )
    assert options.component == "thinker"
    assert options.endpoint == "/run/swapd/gpu{gpu}"
    assert options.finish_within_s == 3.0
    assert options.load_workspace == 9 << 30
    assert options.offload.cpu_offload_components == ("visual", "audio_tower")
    assert options.offload.cpu_offload_strategy == "sequential"


@pytest.mark.parametrize(("given", "nbytes"), [(0, 0), ("0", 0), (4096, 4096), ("1MiB", 1 << 20)])
def test_a_workspace_is_a_size_or_none_at_all(given: int | str, nbytes: int) -> None:
    assert of(load_workspace=given).load_workspace == nbytes


def test_a_stage_is_called_like_its_model_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thinker").mkdir()
    monkeypatch.chdir(tmp_path / "thinker")
    for model in (".", "./", "../thinker", "/models/thinker/", "Qwen/thinker", "thinker"):
        assert name_of_model(model) == "thinker"
    assert name_of_model("") == ""


def test_false_is_another_thing_than_nothing() -> None:
    assert of(cpu_offload_enabled=False).offload_said
    assert of(cpu_offload_enabled=True).offload_said
    assert not of(component="thinker").offload_said
    assert not of(cpu_offload_enabled=None).offload_said


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cpu_offload_component", "did you mean cpu_offload_components?"),
        ("cpu_ofload_enabled", "did you mean cpu_offload_enabled?"),
        ("componant", "did you mean component?"),
        ("xyzzy", "there are: component, endpoint, "),
        (7, "there are: "),
    ],
)
def test_a_misspelt_key_is_told_the_right_name(key: Any, hint: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        options_of({"swapd": {key: "x"}}, "stage 'thinker'")
    said = str(refused.value)
    assert said.startswith(f"stage 'thinker': additional_config.swapd.{key} is no option of swapd")
    assert hint in said


@pytest.mark.parametrize(
    "config",
    [{"kv": "auto"}, {"swapd": {}, "cpu_offload_enabled": True}, {"Swapd": {}}, {"swap": {}}],
)
def test_options_that_are_not_under_swapds_key_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"thinker.* in additional_config: {swapd: {\.\.\.}}"):
        options_of(config, "stage 'thinker'")
    assert options_of({"kda_prefill_backend": "auto", "swa": 1}, "stage 'thinker'") == Options()


@pytest.mark.parametrize(("key", "value"), [("kv", "Auto"), ("kv", False), ("faults", "off")])
def test_a_value_that_is_none_of_its_choices_is_told_them(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"one of (private, drop, auto|explain, silent)"):
        of(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("component", 3),
        ("endpoint", ["x"]),
        ("finish_within_s", "soon"),
        ("finish_within_s", -1),
        ("finish_within_s", float("inf")),
        ("finish_within_s", float("nan")),
        ("slice_s", "short"),
        ("slice_s", 0),
        ("slice_s", -1),
        ("slice_s", float("inf")),
        ("slice_s", float("nan")),
        ("slice_s", True),
        ("faults", "off"),
        ("load_workspace", "much"),
        ("load_workspace", -1),
        ("load_workspace", True),
        ("cpu_offload_strategy", "sometimes"),
        ("cpu_offload_enabled", "perhaps"),
    ],
)
def test_a_value_of_the_wrong_kind_is_said_with_its_key(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        of(**{key: value})
    assert f"stage 'thinker': additional_config.swapd.{key}" in str(refused.value)
    assert repr(value) in str(refused.value)


def test_turns_are_slices_or_finish_requests() -> None:
    assert of(slice_s=2).slice_s == 2.0
    assert of(kv="auto", slice_s=0.5) == Options(kv="auto", slice_s=0.5)
    assert of(slice_s=None, finish_within_s=3).slice_s is None
    with pytest.raises(InvalidArgument, match=r"slice_s .* one of the two"):
        of(slice_s=2, finish_within_s=3)
    with pytest.raises(InvalidArgument, match=r"slice_s .* kv: auto"):
        of(slice_s=2, kv="drop")


def test_components_without_a_switch_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="cpu_offload_enabled: true"):
        of(cpu_offload_components=["visual"])
    of(cpu_offload_components=["transformer"], enable_cpu_offload=True)


# --- the flags of a diffusion stage --------------------------------------------------------

CPU, LAYERWISE = "enable_cpu_offload", "enable_layerwise_offload"
OFF = {CPU: False, LAYERWISE: False, "diffusion_offload_config": None}
MODULES = {"mode": "module", "components": ["dit", "text_encoder"]}
LAYERS = {"mode": "layer", "components": ["dit"], "pin_memory": True}


def stage(swapd: object = None, **own: object) -> Any:
    """vllm-omni's configuration of a stage, with what vllm-omni remembers of it."""
    additional = {"another": 1} | ({} if swapd is None else {"swapd": swapd})
    given: dict[str, Any] = {**OFF, "additional_config": additional, **own}
    return SimpleNamespace(**given, _resolved_diffusion_offload="what they meant")


@pytest.mark.parametrize(
    ("own", "option"),
    [
        ({CPU: True}, CPU),
        ({LAYERWISE: True}, LAYERWISE),
        ({"diffusion_offload_config": MODULES}, CPU),
        ({"diffusion_offload_config": LAYERS}, LAYERWISE),
        ({"diffusion_offload_config": LAYERS, LAYERWISE: True}, LAYERWISE),
    ],
)
def test_a_flag_of_the_stage_is_the_option_of_that_name(
    own: dict[str, object], option: str
) -> None:
    config = stage({"component": "dit"}, **own)
    options = take_over(config, "stage 0")
    assert options == options_of({"swapd": {"component": "dit", option: True}}, "")
    left = dict(vars(config))
    additional = left.pop("additional_config")
    assert left == OFF, "vllm-omni finds none of it"
    assert additional == {"another": 1, "swapd": {"component": "dit", option: True}}
    assert take_over(config, "stage 0") == options, "also if the stage is loaded again"


def test_a_stage_without_flags_stays_as_it_is() -> None:
    config = stage({LAYERWISE: True})
    before = dict(vars(config))
    assert take_over(config, "stage 0") == options_of(before["additional_config"], "")
    assert vars(config) == before
    take_over(stage(additional_config=None), "stage 0")


@pytest.mark.parametrize(
    ("swapd", "own"),
    [(None, {CPU: True, LAYERWISE: True}), ({LAYERWISE: True}, {CPU: True})],
    ids=["two flags", "a flag and an option"],
)
def test_of_both_layerwise_wins_with_a_warning(swapd: object, own: dict[str, object]) -> None:
    with pytest.warns(SettingsWarning, match=f"{LAYERWISE} is set too, so {CPU} is ignored"):
        options = take_over(stage(swapd, **own), "stage 0")
    assert options.offload.mode == "layerwise"


def test_an_option_that_a_diffusion_stage_does_nothing_with_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    take_over(stage({"component": "dit", "order": None}), "stage 0")
    assert caplog.messages == []
    take_over(stage({"order": [], "chunks_per_turn": 8}), "stage 0")
    without = "has no effect on a diffusion stage: leave it out"
    assert caplog.messages == [f"stage 0: {n} {without}" for n in ("order", "chunks_per_turn")]


def test_an_option_narrows_a_flag_as_it_narrows_an_option() -> None:
    options = take_over(stage({"cpu_offload_components": ["transformer"]}, **{CPU: True}), "")
    assert options.offload.cpu_offload_components == ("transformer",)


@pytest.mark.parametrize(
    ("swapd", "flag", "contradicts"),
    [
        ({CPU: False}, CPU, f"swapd.{CPU}: false"),
        ({LAYERWISE: False}, LAYERWISE, f"swapd.{LAYERWISE}: false"),
        ({"cpu_offload_enabled": False}, LAYERWISE, "swapd.cpu_offload_enabled: false"),
        ({"cpu_offload_enabled": True}, CPU, "swapd.cpu_offload_enabled and"),
        ({"cpu_offload_strategy": "sequential"}, CPU, "cpu_offload_strategy"),
    ],
)
def test_a_flag_that_contradicts_an_option_is_refused_and_both_are_named(
    swapd: dict[str, object], flag: str, contradicts: str
) -> None:
    config = stage(swapd, **{flag: True})
    before = dict(vars(config))
    with pytest.raises(InvalidArgument) as refused:
        take_over(config, "stage 0")
    said = str(refused.value)
    assert said.startswith("stage 0: additional_config.swapd")
    assert contradicts in said
    assert f"{flag} is the stage's own flag" in said
    assert vars(config) == before


def test_an_option_that_is_wrong_without_the_flag_too_is_said_alone() -> None:
    with pytest.raises(InvalidArgument) as refused:
        take_over(stage({"componant": "dit"}, **{CPU: True}), "stage 0")
    assert "did you mean component?" in str(refused.value)
    assert "own flag" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="must have keys"):
        take_over(stage("dit", **{CPU: True}), "stage 0")


@pytest.mark.parametrize(
    "chosen",
    [
        {"mode": "layer", "components": ["dit", "text_encoder"]},
        {"mode": "layer", "components": ["text_encoder"]},
        {"mode": "module", "components": ["dit"]},
        {**LAYERS, "layer_options": {"dit": {"resident_layers": 2}}},
        {"mode": "layer"},
        {"mode": "module", "components": 5},
        "layer",
    ],
)
def test_what_no_flag_means_is_refused_with_the_flags_there_are(chosen: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{LAYERWISE} or {CPU} instead"):
        take_over(stage(diffusion_offload_config=chosen), "stage 0")
