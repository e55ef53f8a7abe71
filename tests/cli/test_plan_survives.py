"""`swapd plan` answers any input with a plan or one clear line, and never hangs."""

import copy
import itertools
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from swapd.cli.app import app_of
from swapd.shared.documents import PEOPLE_MAX_BYTES
from tests.files import file_with
from tests.plan.test_sizes import MIB, layers, save

from .conftest import swapd

AR = "swapd_client.vllm.omni.ARWorker"
CARD = ("--device-memory", "80GiB", "--bandwidth", "25GB/s")

#: Values that make no sense anywhere.
ODD: list[Any] = [
    *([], {}, {1: 2}, ["a"], [{}], {"a": {"b": []}}),
    *(None, True, "", "x" * 5000, "a\n\x1b[2J\u202e"),
    *(-1, 0, 1.5, 10**24, float("nan"), float("-inf"), 1e308),
]


#: Made once, as in each process: making it takes as long as most plans.
SWAPD = typer.main.get_command(app_of())


def run(*words: object, fine: bool = True) -> str:
    """The error output: empty if there is an answer (which `fine` allows), else one line."""
    with CliRunner().isolation() as (stdout, stderr, _):
        try:
            SWAPD.main(["plan", *map(str, words)], "swapd")
            raise AssertionError("it says no status")
        except SystemExit as exc:
            status = exc.code
        out, err = stdout.getvalue().decode(), stderr.getvalue().decode()
    assert status in ((0, 1, 2) if fine else (1, 2)), out + err
    if status == 1:
        assert out == ""
        assert err.startswith("swapd: ")
        assert len(err.splitlines()) == 1, err
        assert len(err) < 20_000
    assert all(line.isprintable() for line in [*out.splitlines(), *err.splitlines()]), out + err
    return err


def deploy_of(folder: Path, text: str) -> Path:
    return file_with(folder / "deploy.yaml", text)


def refused(folder: Path, text: str) -> str:
    return run("--vllm", deploy_of(folder, text), "thinker=1GiB", *CARD, fine=False)


# --- deploy files ------------------------------------------------------------------------


def laughs(item: str, levels: int = 40) -> str:
    lines = [f"x0: &x0 {item}"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merging(levels: int = 40) -> str:
    lines = ["x0: &x0 {a: 1}"]
    lines += [f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


BOMBS = {
    "laughs": (laughs("ha"), "values, with its aliases written out"),
    "laughs where it is shown": (
        laughs("ha") + "\nstages: [{stage_id: 0, devices: *x39}]",
        "values, with its aliases",
    ),
    "merges": (merging(), "values, with its aliases written out"),
    "a chain of aliases": (
        "x0: &x0 []\n" + "\n".join(f"x{n}: &x{n} [*x{n - 1}]" for n in range(1, 5000)),
        "values, with its aliases written out",
    ),
    "itself": ("a: &a [*a]", "nested deeper than 64"),
    "itself, merged": ("a: &a {<<: *a, b: 1}", "nested deeper than 64"),
    "deep lists": ("[" * 100_000, "nested deeper"),
    "deep maps": ("{a: " * 10_000, "nested deeper"),
    "deep blocks": ("\n".join(" " * n + "a:" for n in range(600)), "nested deeper"),
    "deep, but not for the parser": ("a: " + "[" * 70 + "]" * 70, "nested deeper than 64"),
    "large": ("a: 1\n" + "#" * PEOPLE_MAX_BYTES, "it has more than 256 KiB"),
    "no text": ("a: \x00", "special characters are not allowed"),
    "a long number": (f"a: 0x{'f' * 50_000}", "digits"),
    "a longer one": (f"a: {'9' * 50_000}", "digits"),
    "in sixties": (f"a: {':'.join(['59'] * 5_000)}", "digits"),
    "a bad number": ("a: !!int ''", "does not match its tag"),
    "a bad float": ("a: !!float ''", "does not match its tag"),
    "a bad truth": ("a: !!bool perhaps", "does not match its tag"),
    "a bad time": ("a: !!timestamp never", "does not match its tag"),
    "a bad date": ("a: 2026-99-99", "does not match its tag"),
    "an object": ("a: !!python/object/apply:os.system [id]", "could not determine"),
    "several": ("a: 1\n---\nb: 2", "expected a single document"),
    "a key that is a list": ("? [a]\n: 1", "unhashable"),
    "nothing": ("", "no keys"),
    "a list": ("- 1", "no keys"),
    "a key that is no text": ("1: 2", "is not a key"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_deploy_file_that_is_a_trap_is_refused_in_one_line(tmp_path: Path, bomb: str) -> None:
    text, says = BOMBS[bomb]
    said = refused(tmp_path, text)
    assert str(tmp_path) in said
    assert says in said


WHOLE: dict[str, Any] = {
    "base_config": "base.yaml",
    "pipeline": "omni",
    "async_chunk": True,
    "gpu_memory_utilization": 0.5,
    "stages": [
        {
            "stage_id": 0,
            "worker_cls": AR,
            "devices": "0",
            "tensor_parallel_size": 1,
            "num_replicas": 1,
            "pipeline_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "dtype": "bfloat16",
            "kv_cache_dtype": "auto",
            "speculative_config": {"method": "ngram"},
            "enforce_eager": True,
            "compilation_config": {"cudagraph_mode": "NONE"},
            "engine_extras": {"a": 1},
            "engine_args": {"devices": "0"},
            "runtime": {"devices": "0"},
            "default_sampling_params": {"n": 1},
            "additional_config": {
                "swapd": {
                    "component": "thinker",
                    "endpoint": "/run/x",
                    "finish_within_s": 1,
                    "load_workspace": "1GiB",
                    "cpu_offload_enabled": True,
                    "cpu_offload_components": ["thinker", "visual"],
                    "cpu_offload_gb": 1.0,
                }
            },
        },
        {
            "stage_id": 1,
            "worker_extension_cls": "swapd_client.vllm.diffusion.DiffusionExtension",
            "devices": "0",
            "additional_config": {"swapd": {"component": "dit", "cpu_offload_gb": 2}},
        },
    ],
    "platforms": {"cuda": {"stages": [{"stage_id": 0, "gpu_memory_utilization": 0.4}]}},
}


#: PyYAML's own in C, where they are: five times as fast. swapd does not use that loader, which
#: would not notice how deep a document is, as these are not.
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in a document."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))


def with_odd(whole: Any, at: tuple[Any, ...], odd: Any) -> Any:
    if not at:
        return odd
    changed = copy.copy(whole)
    changed[at[0]] = with_odd(whole[at[0]], at[1:], odd) if at[1:] else odd
    return changed


@pytest.mark.parametrize("at", list(places(WHOLE)), ids=lambda at: ".".join(map(str, at)))
def test_an_odd_value_anywhere_in_a_deploy_file_gives_a_plan_or_one_line(
    tmp_path: Path, at: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml, "SafeLoader", LOADER)
    (tmp_path / "base.yaml").write_text("stages: [{stage_id: 0}]")
    for odd, more in zip(ODD, itertools.cycle(([], ["--overlay"], ["--json"])), strict=False):
        text = yaml.dump(with_odd(WHOLE, at, odd), Dumper=DUMPER)
        run("--vllm", deploy_of(tmp_path, text), "thinker=1GiB", "dit=2GiB", *CARD, *more)


def test_files_based_on_each_other_end(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"{n}.yaml").write_text(f"base_config: {n + 1}.yaml\nstages: []")
    said = run("--vllm", tmp_path / "0.yaml", "thinker=1GiB", *CARD, fine=False)
    assert "files are based on each other" in said


# --- not a file --------------------------------------------------------------------------


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize(
    "name",
    ["x.yaml", "config.json", "model_index.json", "m.safetensors", "m.safetensors.index.json"],
)
@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/dev/stdin", "folder", "gone"])
def test_what_is_no_file_hangs_nobody(fifo: Path, name: str, target: str) -> None:
    folder = fifo.parent
    (folder / "folder").mkdir()
    path = folder / name
    path.symlink_to(target)
    run(*(("--vllm", path) if name == "x.yaml" else (path,)), *CARD, fine=False)
    if name != "x.yaml":
        run(folder, *CARD, fine=False)


def test_a_settings_file_that_is_a_fifo_hangs_nobody(fifo: Path) -> None:
    assert "it is no regular file" in swapd("serve", "--config", fifo, status=1).stderr


# --- models ------------------------------------------------------------------------------

DEEP = "[" * 100_000


def header(path: Path, text: str) -> Path:
    raw = text.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    return path


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "[]",
        '{"a": 1}',
        '{"a": {"data_offsets": [NaN, 1]}}',
        *(
            f'{{"a": {{"data_offsets": {offsets}}}}}'
            for offsets in (
                *("[5, 1]", "[-5, 1]", "[0, 1e400]", "[0, 1.5]", "[0]", "[0, 1, 2]", "{}", '"ab"'),
                *("[[], []]", f"[0, {10**30}]", f"[0, {'9' * 5000}]", "[false, true]", "5", "null"),
            )
        ),
    ],
    ids=lambda text: text[:40],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    said = run(header(tmp_path / "m.safetensors", text), *CARD, fine=False)
    assert "is no safetensors file" in said


@pytest.mark.parametrize(
    "file", ["../m.safetensors", "/etc/passwd", "", "..", "a/b", "\x1b", 5, None, [], {}, "\x00"]
)
def test_an_index_names_files_beside_it_only(tmp_path: Path, file: object) -> None:
    save(tmp_path / "m.safetensors", **layers(2, MIB))
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "m.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"layers.0.weight": file}}))
    said = run(path, *CARD, fine=False)
    assert any(why in said for why in ("no file beside it", "no index of", "cannot be read"))


@pytest.mark.parametrize("name", ["..", "../out", "/", "", "a\nb", "\x00"])
def test_a_pipeline_names_folders_beside_it_only(tmp_path: Path, name: str) -> None:
    save(tmp_path / "out" / "m.safetensors", **layers(2, MIB))
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model_index.json"
    path.write_text(json.dumps({"_class_name": "P", name: ["diffusers", "T"]}))
    assert "which is not a file beside it" in run(path, *CARD, fine=False)


@pytest.mark.parametrize("name", ["config.json", "model_index.json", "m.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 5000, "[]", "5", "NaN", "\x00", '"\ud800"'])
def test_json_that_makes_no_sense_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert str(path) in run(path, *CARD, fine=False)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "dtype": "float16",
    "rope_scaling": None,
}


@pytest.mark.parametrize("at", CONFIG)
def test_an_odd_value_anywhere_in_a_config_gives_a_plan_or_one_line(
    tmp_path: Path, at: str
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    for odd in ODD:
        path.write_text(json.dumps(CONFIG | {at: odd}, default=str))
        run(path, *CARD)


DECODER: dict[str, Any] = {
    **CONFIG,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OTHERS = ("kv_lora_rank", "qk_rope_head_dim", "mamba_d_state", "model_max_length", "n_head_kv")


@pytest.mark.parametrize(
    "at", [*places({"thinker_config": {"text_config": DECODER}}), *((key,) for key in OTHERS)]
)
def test_an_odd_value_anywhere_in_a_decoders_config_gives_a_plan_or_one_line(
    tmp_path: Path, at: tuple[Any, ...]
) -> None:
    named = {"swapd": {"component": "thinker"}}
    stage = {"stage_id": 0, "worker_cls": AR, "additional_config": named}
    whole = DECODER if at[0] in OTHERS else {"thinker_config": {"text_config": DECODER}}
    path = tmp_path / "config.json"
    deploy = deploy_of(tmp_path, yaml.safe_dump({"stages": [stage]}))
    for odd in ODD:
        path.write_text(json.dumps(with_odd(whole, at, odd), default=str))
        run("--vllm", deploy, "thinker=1GiB", "--config", path, *CARD)


# --- words -------------------------------------------------------------------------------

SIZES = ["", "0", "-1", "nan", "inf", "1e400", "9" * 5000, "9" * 20 + "TiB", "GiB", "0.1B", "1_0"]


@pytest.mark.parametrize("text", SIZES)
def test_an_odd_size_gives_a_plan_or_one_line(text: str) -> None:
    run(f"a={text}", *CARD)
    for more in ([], ["--json"], ["--json", "--passes", "a=1000000", "--blocks", "a=10"]):
        run(f"a={text}", "--device-memory", text, "--bandwidth", "1GB/s", *more)
        run(f"a={text}", "--device-memory", "1GiB", "--bandwidth", "1GB/s", *more)
    run("a=1GiB", "--device-memory", "9GiB", "--bandwidth", text)
    for option in ("--kv-cache", "--activations", "--overhead"):
        run("a=1GiB", *CARD, option, text)


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "-inf", "1e400", "9" * 5000, "9" * 30])
def test_an_odd_number_gives_a_plan_or_one_line(text: str) -> None:
    for option in ("--passes", "--blocks", "--compute"):
        run("a=1GiB", "--device-memory", "1GiB", "--bandwidth", "1GB/s", option, f"a={text}")
        run("a=1GiB", "--device-memory", "1GiB", "--bandwidth", "1GB/s", option, text)
