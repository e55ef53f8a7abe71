"""Sizes come from headers of files, configurations, arguments and daemons; gaps are named."""

import json
import struct
from pathlib import Path

import pytest

from swapd.plan.sizes import NoSizes, named, of_daemon, of_path
from swapd.shared.protocol import ComponentKind, ComponentStatus
from swapd_client.weights.safetensors import ITEM_BYTES
from tests.files import file_with

MIB = 1 << 20


def save(path: Path, **sizes: int) -> Path:
    """A sparse safetensors file whose tensors have these many bytes."""
    return write(path, {name.replace("__", "."): ("U8", nbytes) for name, nbytes in sizes.items()})


def write(path: Path, tensors: dict[str, tuple[str, int]]) -> Path:
    """A sparse safetensors file of tensors, by their types and bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, nbytes) in tensors.items():
        shape = [nbytes // ITEM_BYTES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return path


def layers(count: int, nbytes: int, of: str = "layers") -> dict[str, int]:
    return {f"{of}__{i}__weight": nbytes for i in range(count)}


def index(folder: Path, files: dict[str, dict[str, int]]) -> Path:
    """A model in several files."""
    weight_map: dict[str, str] = {}
    for file, sizes in files.items():
        save(folder / file, **sizes)
        weight_map |= {name.replace("__", "."): file for name in sizes}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


# --- arguments ---------------------------------------------------------------------------


def test_a_name_and_a_size_are_a_component() -> None:
    found = named("dit=40GiB")
    assert found is not None
    assert (found.name, found.nbytes, found.blocks) == ("dit", 40 << 30, 0)
    assert named("dit.safetensors") is None
    with pytest.raises(NoSizes, match="dit=forty"):
        named("dit=forty")
    with pytest.raises(NoSizes, match="no bytes"):
        named("dit=0")


# --- safetensors -------------------------------------------------------------------------


def test_a_file_is_a_component_with_its_blocks(tmp_path: Path) -> None:
    (found,) = of_path(save(tmp_path / "dit.safetensors", **layers(4, 10 * MIB), head=MIB))
    assert (found.name, found.nbytes) == ("dit", 41 * MIB)
    assert (found.blocks, found.block_bytes, found.rest_bytes) == (4, 10 * MIB, MIB)


def test_blocks_are_counted_by_the_outermost_number(tmp_path: Path) -> None:
    nested = {f"blocks__{i}__experts__{e}__w": MIB for i in range(3) for e in range(4)}
    (found,) = of_path(save(tmp_path / "moe.safetensors", **nested))
    assert (found.blocks, found.block_bytes) == (3, 4 * MIB)


def test_what_is_mostly_in_no_block_has_none(tmp_path: Path) -> None:
    (found,) = of_path(save(tmp_path / "vae.safetensors", **layers(4, MIB), decoder=40 * MIB))
    assert found.blocks == 0


def test_a_model_of_several_stages_has_them_as_components(tmp_path: Path) -> None:
    sizes = {
        **layers(4, 10 * MIB, "thinker__model__layers"),
        **layers(2, 3 * MIB, "talker__model__layers"),
        "token2wav__w": MIB,
    }
    found = of_path(save(tmp_path / "omni.safetensors", **sizes))
    assert {c.name: c.nbytes // MIB for c in found} == {"thinker": 40, "talker": 6, "token2wav": 1}


def test_an_index_leads_to_all_its_files(tmp_path: Path) -> None:
    model = tmp_path / "olmo"
    path = index(model, {"1.safetensors": layers(2, MIB), "2.safetensors": {"head": MIB}})
    assert of_path(path) == of_path(model)
    (found,) = of_path(path)
    assert (found.name, found.nbytes) == ("olmo", 3 * MIB)


def test_a_variant_is_not_the_same_weights_once_more(tmp_path: Path) -> None:
    save(tmp_path / "vae" / "model.safetensors", w=4 * MIB)
    save(tmp_path / "vae" / "model.fp16.safetensors", w=2 * MIB)
    assert [c.nbytes for c in of_path(tmp_path / "vae")] == [4 * MIB]


def test_checkpoints_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path / "base.safetensors", **layers(4, MIB))
    save(tmp_path / "tuned.safetensors", **layers(4, MIB), extra__weight=MIB)
    save(tmp_path / "tuned.fp16.safetensors", **layers(4, MIB // 2))
    assert [(c.name, c.nbytes, c.blocks) for c in of_path(tmp_path)] == [
        ("base", 4 * MIB, 4),
        ("tuned", 5 * MIB, 4),
    ]


def test_files_with_no_tensor_in_common_are_one_model(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", **layers(2, MIB))
    save(tmp_path / "model-00002-of-00002.safetensors", head__weight=MIB)
    save(tmp_path / "extra.safetensors", more__weight=MIB)
    (c,) = of_path(tmp_path)
    assert (c.name, c.nbytes) == (tmp_path.name, 4 * MIB)


def test_a_component_of_a_pipeline_with_two_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"vae": ["diffusers", "AutoencoderKL"]}')
    save(tmp_path / "vae" / "a.safetensors", **layers(2, MIB))
    save(tmp_path / "vae" / "b.safetensors", **layers(2, MIB))
    with pytest.raises(NoSizes, match=r"vae has several checkpoints, a, b: give one file, such as"):
        of_path(tmp_path)


def test_a_pipeline_has_the_components_that_have_weights(tmp_path: Path) -> None:
    entries = {"_class_name": "FluxPipeline", "scheduler": ["diffusers", "X"]}
    for name, mib in (("transformer", 30), ("text_encoder", 12), ("vae", 1)):
        save(tmp_path / name / "model.safetensors", w=mib * MIB)
        entries[name] = ["diffusers", "Y"]
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(entries))
    expected = {"transformer": 30, "text_encoder": 12, "vae": 1}
    for path in (tmp_path, tmp_path / "model_index.json"):
        assert {c.name: c.nbytes // MIB for c in of_path(path)} == expected


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("short.safetensors", b"abc", "no safetensors file"),
        ("long.safetensors", struct.pack("<Q", 1 << 40), "its header would end at"),
        ("odd.safetensors", struct.pack("<Q", 9) + b'{"a": []}', "no safetensors file"),
        ("list.safetensors", struct.pack("<Q", 2) + b"[]", "no safetensors file"),
        ("x.safetensors.index.json", b'{"weight_map": {}}', "lists no tensors"),
        ("y.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safet"),
        ("config.json", b"{}", "names no architecture"),
        ("config.json", b"[]", "describes no model"),
        ("config.json", b"{", "config.json: "),
        ("model.bin", b"", "neither safetensors nor a config"),
    ],
)
def test_a_file_of_no_use_says_why(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(NoSizes, match=says):
        of_path(path)


def test_what_is_not_there_says_what_could_be_given(tmp_path: Path) -> None:
    with pytest.raises(NoSizes, match=r"does not exist; give .* NAME=SIZE"):
        of_path(tmp_path / "nothing")
    with pytest.raises(NoSizes, match="has neither"):
        of_path(tmp_path)
    (tmp_path / "model_index.json").write_text('{"vae": ["a", "b"]}')
    with pytest.raises(NoSizes, match="no folder of it has safetensors"):
        of_path(tmp_path)


# --- configs -----------------------------------------------------------------------------

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 2), ("float32", 4), (None, 2)])
def test_a_config_is_built_without_memory_and_weighed(
    tmp_path: Path, dtype: str | None, nbytes: int
) -> None:
    file_with(tmp_path / "config.json", json.dumps({**CONFIG, "dtype": dtype}))
    (found,) = of_path(tmp_path)
    assert found.blocks == 6
    block = 2 * 64 * 64 + 64 + 2 * (64 * 32 + 32) + 3 * 64 * 128 + 2 * 64
    assert found.block_bytes == nbytes * block
    assert found.nbytes == nbytes * (6 * block + 2 * 100 * 64 + 64)


def test_a_config_of_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path / "config.json", '{"architectures": ["NobodysModel"]}')
    with pytest.raises(NoSizes, match="no NobodysModel; give NAME=SIZE"):
        of_path(path)
    path.write_text(json.dumps({**CONFIG, "num_attention_heads": 0}))
    with pytest.raises(NoSizes, match="cannot be built"):
        of_path(path)


# --- daemons -----------------------------------------------------------------------------


def status(
    name: str, nbytes: int, part_of: str = "", kind: ComponentKind = "component"
) -> ComponentStatus:
    none = (0, (), None, 0, 0, 0, None)
    return ComponentStatus(name, 1, nbytes, "idle", "lru", None, False, *none, part_of, kind=kind)


def test_what_a_daemon_has_is_planned_with_and_parts_are_blocks() -> None:
    parts = [status(f"dit/blocks.{i}", 10, "dit") for i in range(4)]
    found = of_daemon(
        [
            *parts,
            status("dit/rest", 3, "dit"),
            status("vae", 5),
            status("workspace 1.2", 9, kind="workspace"),
        ]
    )
    by_name = {c.name: c for c in found}
    assert list(by_name) == ["dit", "vae"]
    dit = by_name["dit"]
    assert (dit.nbytes, dit.blocks, dit.block_bytes, dit.rest_bytes) == (43, 4, 10, 3)
    assert by_name["vae"].blocks == 0


def test_a_file_with_a_sign_in_its_name_is_a_file(tmp_path: Path) -> None:
    path = save(tmp_path / "epoch=3.safetensors", w=8)
    assert named(str(path)) is None
