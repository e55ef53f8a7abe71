"""Which options `additional_config.swapd` takes, and the error for each other one."""

from typing import Any

import pytest

from swapd_client.errors import InvalidArgument
from swapd_client.vllm.options import Options, options_of


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


def test_options_are_keys() -> None:
    with pytest.raises(InvalidArgument, match="must have keys"):
        options_of({"swapd": "thinker"}, "stage 'thinker'")


def test_components_without_a_switch_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="cpu_offload_enabled: true"):
        of(cpu_offload_components=["visual"])
    of(cpu_offload_components=["transformer"], enable_cpu_offload=True)
