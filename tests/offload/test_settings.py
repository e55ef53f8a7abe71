"""The settings users know: documented names, meanings and defaults, from every source.

The stage files are those of vLLM-Omni's documents, as written there.
"""

import argparse
import sys
from pathlib import Path

import msgspec
import pytest

from swapd_client.errors import InvalidArgument
from swapd_client.offload import settings as module
from swapd_client.offload.settings import (
    OffloadSettings,
    SettingsWarning,
    add_arguments,
    from_arguments,
    from_keywords,
    from_yaml,
)
from tests.files import file_with

PAGE_SELECTIVE = """
stage_args:
  - stage_id: 0
    engine_args:
      model_stage: thinker
      cpu_offload_enabled: false  # Keep thinker on GPU (used frequently)
  - stage_id: 1
    engine_args:
      model_stage: talker
      cpu_offload_enabled: true
      cpu_offload_components: ["visual"]  # Offload visual encoder only
      cpu_offload_strategy: "alternating"
  - stage_id: 2
    engine_args:
      model_stage: code2wav
      cpu_offload_enabled: true  # Offload code2wav when not in use
"""

#: The other contents of a whole stage file: lists and keys that are no settings.
WITH_OTHER_KEYS = """
async_chunk: false
stage_args:
  - stage_id: 0
    runtime: {process: true, devices: "0", max_batch_size: 1}
    engine_args:
      model_stage: thinker
      worker_cls: vllm_omni.worker.gpu_ar_worker.GPUARWorker
      gpu_memory_utilization: 0.8
      enforce_eager: true
      enable_prefix_caching: false
      enable_sleep_mode: false
      pin_cpu_memory: true
      offload_backend: auto
      cpu_offload_gb: 2
    engine_input_source: []
    final_output: true
runtime:
  enabled: true
"""

#: The newer layout: the settings are in the stage itself.
FLAT = """
base_config: qwen2_5_omni.yaml
stages:
  - stage_id: 0
    devices: "0"
    env: {SWAPD_ENDPOINT: /run/swapd/cuda0}
  - stage_id: 1
    devices: "0"
    model_stage: dit
    enable_layerwise_offload: true
"""


def write(folder: Path, text: str) -> Path:
    return file_with(folder / "stages.yaml", text)


def parse(*line: str) -> OffloadSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model")
    parser.add_argument("--omni", action="store_true")
    add_arguments(parser)
    return from_arguments(parser.parse_args(line))


# --- the documented settings ---------------------------------------------------------------


def test_the_defaults_are_those_documented() -> None:
    assert msgspec.structs.asdict(from_keywords()) == {
        "cpu_offload_enabled": False,
        "cpu_offload_components": None,
        "cpu_offload_strategy": "alternating",
        "cpu_offload_pin_memory": True,
        "enable_cpu_offload": False,
        "enable_layerwise_offload": False,
        "cpu_offload_gb": 0.0,
    }
    assert from_keywords() == parse() == OffloadSettings()
    assert from_keywords(cpu_offload_components=None, cpu_offload_enabled=None) == OffloadSettings()


def test_each_switch_is_a_mode_of_its_own() -> None:
    others = from_keywords(cpu_offload_components=["visual"], cpu_offload_strategy="sequential")
    assert others.mode == "off"
    assert from_keywords(cpu_offload_enabled=True).mode == "alternating"
    sequential = from_keywords(cpu_offload_enabled=True, cpu_offload_strategy="sequential")
    assert sequential.mode == "sequential"
    assert from_keywords(enable_cpu_offload=True).mode == "model"
    assert from_keywords(enable_layerwise_offload=True).mode == "layerwise"
    assert from_keywords(cpu_offload_gb=8).mode == "partial"


def test_gigabytes_that_stay_on_the_host_go_with_every_switch() -> None:
    assert from_keywords(cpu_offload_gb=8).offloaded_bytes == 8 << 30
    both = from_keywords(enable_layerwise_offload=True, cpu_offload_gb=1.5)
    assert (both.mode, both.offloaded_bytes) == ("layerwise", 3 << 29)


def test_components_may_be_a_list_or_one_string_with_commas() -> None:
    listed = from_keywords(cpu_offload_enabled=True, cpu_offload_components=["thinker", "visual.*"])
    assert listed.cpu_offload_components == ("thinker", "visual.*")
    assert listed == from_keywords(
        cpu_offload_enabled=True, cpu_offload_components="thinker, visual.*"
    )
    assert listed == from_keywords(
        cpu_offload_enabled=True, cpu_offload_components=(n for n in ("thinker", "visual.*"))
    )


# --- contradictions -----------------------------------------------------------------------


def test_layerwise_wins_over_model_level_and_says_so() -> None:
    with pytest.warns(SettingsWarning, match="enable_cpu_offload is ignored"):
        both = from_keywords(enable_cpu_offload=True, enable_layerwise_offload=True)
    assert both.mode == "layerwise"


@pytest.mark.parametrize("other", ["enable_cpu_offload", "enable_layerwise_offload"])
def test_two_kinds_of_switches_are_refused_by_name(other: str) -> None:
    with pytest.raises(InvalidArgument, match=f"cpu_offload_enabled and {other}.*set one"):
        from_keywords(cpu_offload_enabled=True, **{other: True})
    with pytest.raises(InvalidArgument, match=f"cpu_offload_strategy.*{other} has its own"):
        from_keywords(cpu_offload_strategy="sequential", **{other: True})


def test_masters_are_pinned_by_the_daemon_whatever_is_asked_and_that_is_said() -> None:
    with pytest.warns(SettingsWarning, match="--pin-limit"):
        assert not from_keywords(cpu_offload_pin_memory=False).cpu_offload_pin_memory


def test_settings_made_directly_are_checked_too() -> None:
    with pytest.raises(InvalidArgument, match="is empty"):
        OffloadSettings(cpu_offload_components=())


# --- keyword arguments --------------------------------------------------------------------


def test_a_misspelt_keyword_is_told_the_right_one() -> None:
    with pytest.raises(InvalidArgument, match="did you mean cpu_offload_components"):
        from_keywords(cpu_offload_component=["visual"])
    with pytest.raises(InvalidArgument, match="settings are: cpu_offload_enabled, "):
        from_keywords(zzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_offload_enabled", "yes"),
        ("cpu_offload_components", 3),
        ("cpu_offload_components", [1]),
        ("cpu_offload_components", {"visual": True}),
        ("cpu_offload_components", []),
        ("cpu_offload_components", " , "),
        ("cpu_offload_strategy", "alternate"),
        ("cpu_offload_gb", -1),
        ("cpu_offload_gb", float("inf")),
        ("cpu_offload_gb", 1e300),
        ("cpu_offload_gb", float("nan")),
        ("cpu_offload_gb", "8"),
        ("enable_cpu_offload", 1),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    choices = "alternating, sequential; it is 'alternate'" if value == "alternate" else ""
    with pytest.raises(InvalidArgument, match=f"{name}.*{choices}"):
        from_keywords(**{name: value})


# --- stage files --------------------------------------------------------------------------


def test_a_stage_is_chosen_by_its_id_or_by_its_model_stage(tmp_path: Path) -> None:
    path = write(tmp_path, PAGE_SELECTIVE)
    talker = OffloadSettings(cpu_offload_enabled=True, cpu_offload_components=("visual",))
    assert from_yaml(path, 0) == from_yaml(path, "thinker") == OffloadSettings()
    assert from_yaml(path, 1) == from_yaml(path, "1") == from_yaml(path, "talker") == talker


def test_other_keys_are_left_alone(tmp_path: Path) -> None:
    assert from_yaml(write(tmp_path, WITH_OTHER_KEYS)) == OffloadSettings(cpu_offload_gb=2.0)


def test_settings_may_stand_in_the_stage_itself(tmp_path: Path) -> None:
    path = write(tmp_path, FLAT)
    assert from_yaml(path, 0) == OffloadSettings()
    assert from_yaml(path, "dit").mode == "layerwise"


def test_an_unknown_stage_is_told_which_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, PAGE_SELECTIVE)
    with pytest.raises(InvalidArgument, match=r"'vocoder'.* 0 .thinker., 1 .tal"):
        from_yaml(path, "vocoder")
    with pytest.raises(InvalidArgument, match="several stages; say which"):
        from_yaml(path)


def test_two_stages_of_one_name_are_no_choice(tmp_path: Path) -> None:
    path = write(tmp_path, PAGE_SELECTIVE.replace("talker", "thinker"))
    with pytest.raises(InvalidArgument, match="several stages 'thinker'"):
        from_yaml(path, "thinker")
    assert from_yaml(path, 1).cpu_offload_enabled


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("cpu_offload_enable", "cpu_offload_enabled"),
        ("cpu_offload_stragety", "cpu_offload_strategy"),
        ("enable_layer_offload", "enable_layerwise_offload"),
        ("dit_cpu_offload", "enable_cpu_offload"),
    ],
)
def test_a_misspelt_key_is_refused_in_whichever_stage_it_is(
    tmp_path: Path, wrong: str, right: str
) -> None:
    text = PAGE_SELECTIVE.replace("model_stage: talker", f"model_stage: talker\n      {wrong}: x")
    with pytest.raises(InvalidArgument, match=rf"1 \(talker\): {wrong} is not.*mean {right}\?"):
        from_yaml(write(tmp_path, text), "thinker")


def test_a_wrong_value_names_file_stage_and_key(tmp_path: Path) -> None:
    path = write(tmp_path, PAGE_SELECTIVE.replace("enabled: true", "enabled: maybe"))
    with pytest.raises(InvalidArgument) as caught:
        from_yaml(path, 1)
    for part in (str(path), "stage 1", "talker", "cpu_offload_enabled", "maybe"):
        assert part in str(caught.value)


def test_a_contradiction_in_a_file_names_the_stage(tmp_path: Path) -> None:
    text = FLAT.replace(
        "_layerwise_offload: true", "_cpu_offload: true\n    cpu_offload_enabled: 1"
    )
    path = write(tmp_path, text.replace("enabled: 1", "enabled: true"))
    with pytest.raises(InvalidArgument, match=r"stage 1 \(dit\): cpu_offload_enabled"):
        from_yaml(path, "dit")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no stages"),
        ("[1, 2]", "no stages"),
        ("stage_args: []", "no stages"),
        ("stage_args: [3]", "stage number 1 of the list"),
        ("stage_args: [{stage_id: 4, engine_args: [1]}]", "stage 4: engine_args"),
        ("stage_args: [{", "stages.yaml: while parsing"),
    ],
)
def test_a_file_that_is_no_stage_file_says_what_is_missing(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        from_yaml(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.yaml: No such file"):
        from_yaml(tmp_path / "nowhere.yaml")


def test_without_pyyaml_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidArgument, match="needs PyYAML; pip install"):
        from_yaml(write(tmp_path, FLAT), 0)


# --- the command line ---------------------------------------------------------------------


def test_the_command_line_of_the_documents() -> None:
    line = ["--model", "qwen2.5-omni", "--omni", "--cpu-offload-enabled"]
    line += ["--cpu-offload-components", "thinker,talker", "--cpu-offload-strategy", "alternating"]
    assert parse(*line) == OffloadSettings(
        cpu_offload_enabled=True, cpu_offload_components=("thinker", "talker")
    )
    assert parse("--omni", "--enable-cpu-offload").mode == "model"
    assert parse("--omni", "--enable-layerwise-offload").mode == "layerwise"
    assert parse("--cpu-offload-gb", "8").cpu_offload_gb == 8.0


def test_every_setting_has_an_option() -> None:
    with pytest.warns(SettingsWarning):
        assert not parse("--no-cpu-offload-pin-memory").cpu_offload_pin_memory
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.format_help()
    for name in module.NAMES:
        assert name.replace("_", "-") in options


def test_a_wrong_value_on_the_command_line_names_the_option() -> None:
    with pytest.raises(argparse.ArgumentError, match="--cpu-offload-strategy"):
        parse("--cpu-offload-strategy", "alternate")
    with pytest.raises(InvalidArgument, match="--cpu-offload-gb"):
        parse("--cpu-offload-gb", "-1")


def test_an_option_that_the_parser_has_is_left_to_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu-offload-gb", type=float, default=4.0)
    add_arguments(parser)
    assert from_arguments(parser.parse_args([])).cpu_offload_gb == 4.0
