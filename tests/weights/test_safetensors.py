"""The header of a file is checked before any other read of the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from swapd_client import InvalidSource
from swapd_client.weights.safetensors import HEADER_MAX_BYTES, ITEM_BYTES, File, header, open_all


def written(path: Path, head: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header, as JSON or as raw bytes."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    file = File(path)
    try:
        return {one.name: (one.dtype, one.shape, *one[4:]) for one in header(file)}
    finally:
        file.close()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.bool),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
        "d": torch.tensor(7, dtype=torch.int64),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    found = read(path)
    raw = path.read_bytes()
    assert {n: f[:2] for n, f in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BOOL", (5,)),
        "c": ("BF16", (0, 4)),
        "d": ("I64", ()),
    }
    _, _, offset, nbytes = found["a"]
    assert raw[offset : offset + nbytes] == tensors["a"].numpy().tobytes()


def one(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4), **more: Any) -> Any:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


@pytest.mark.parametrize(
    ("head", "data", "said"),
    [
        (b"", b"", "truncated|Input data"),
        (b"{", b"", "truncated"),
        (b"\xff\xfe", b"", "malformed|invalid"),
        (b"[" * 100_000, b"", ""),
        ([], b"", "Expected `object`"),
        ({"a": 1}, b"", "Expected `object`"),
        ({"a": {}}, b"", "dtype"),
        (one("F7"), bytes(4), "cannot be loaded: 'a' is of dtype 'F7'; known are BOOL, "),
        (one(shape=[-4]), bytes(4), ">= 0"),
        (one(shape=[2.5]), bytes(4), "int"),
        (one(shape=[2] * 100), bytes(4), "100 dimensions"),
        (one(shape=[1 << 62] * 40), bytes(4), "has .* bytes"),
        (one(shape=[0, 1 << 63], offsets=[0, 0]), b"", "has the shape"),
        (one(shape=[0] + [1 << 40] * 63, offsets=[0, 0]), b"", "has the shape"),
        (one(shape=[5]), bytes(4), r"has 5 bytes, and its place is 0 to 4"),
        (one(offsets=[4, 0]), bytes(4), "its place is 4 to 0"),
        (one(offsets=[0]), bytes(4), "length 2"),
        (one(offsets=[4, 8]), bytes(8), "comes after a gap"),
        (one(b=one()["a"]), bytes(4), "overlaps another"),
        (one(), bytes(3), "tensors end at"),
        (one(), bytes(5), "tensors end at"),
        (one(__metadata__={"x": 1}), bytes(4), "Expected `str`"),
    ],
)
def test_a_bad_header_is_an_error_that_names_the_file(
    tmp_path: Path, head: object, data: bytes, said: str
) -> None:
    path = written(tmp_path / "bad.safetensors", head, data)
    with pytest.raises(InvalidSource, match=rf"(?s)bad\.safetensors.*({said})"):
        read(path)


@pytest.mark.parametrize("length", [1, 1000, HEADER_MAX_BYTES + 1, (1 << 64) - 1])
def test_a_header_that_claims_to_be_longer_than_the_file(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "bad.safetensors", b"", length=length)
    with pytest.raises(InvalidSource, match="its header would end at"):
        read(path)


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(InvalidSource):
        read(path)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    cut=st.integers(0, 200),
    flip=st.none() | st.tuples(st.integers(0, 300), st.integers(0, 255)),
)
def test_a_damaged_file_is_refused_or_means_what_it_says(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[str, list[int]]],
    cut: int,
    flip: tuple[int, int] | None,
) -> None:
    head, end = {}, 0
    for i, (dtype, shape) in enumerate(shapes):
        nbytes = ITEM_BYTES[dtype]
        for n in shape:
            nbytes *= n
        head[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    path = written(tmp_path_factory.mktemp("f") / "x.safetensors", head, bytes(end))
    assert len(read(path)) == len(shapes)
    raw = bytearray(path.read_bytes())
    if flip is not None and flip[0] < len(raw):
        raw[flip[0]] = flip[1]
    damaged = bytes(raw[: max(len(raw) - cut, 0)])
    path.write_bytes(damaged)
    try:
        found = read(path)
    except InvalidSource:
        return
    spans = sorted(f[2:] for f in found.values())
    assert sum(n for _, n in spans) + 8 + int.from_bytes(damaged[:8], "little") == len(damaged)
    for _, _, offset, nbytes in found.values():
        assert 8 <= offset <= offset + nbytes <= len(damaged)


# --- which files -------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A checkpoint of two files and their index."""
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "m-1.safetensors")
    save_file({"c": torch.zeros(4)}, tmp_path / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "c": "m-2.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def names(files: Any) -> set[str]:
    with open_all(files) as tensors:
        return set(tensors)


def test_a_file_a_list_an_index_and_a_folder(two: Path) -> None:
    assert names(two / "m-1.safetensors") == {"a", "b"}
    assert names([two / "m-1.safetensors", str(two / "m-2.safetensors")]) == {"a", "b", "c"}
    assert names(two / "m.safetensors.index.json") == {"a", "c"}
    assert names(two) == {"a", "c"}, "as the index says"
    (two / "m.safetensors.index.json").unlink()
    assert names(two) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: (p / "m-2.safetensors").unlink(), r"m-2\.safetensors cannot be read"),
        (lambda p: (p / "m.safetensors.index.json").write_text("{}"), "weight_map"),
        (
            lambda p: (p / "m.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../m-1.safetensors"}}'
            ),
            "no file beside it",
        ),
        *(
            (
                lambda p, file=file: (p / "m.safetensors.index.json").write_text(
                    json.dumps({"weight_map": {"a": file}})
                ),
                said,
            )
            for file, said in (("", "no file beside it"), ("..", "no file"), ("\0", "null byte"))
        ),
        (
            lambda p: (p / "m.safetensors.index.json").write_text(
                '{"weight_map": {"z": "m-1.safetensors"}}'
            ),
            "has no tensor 'z'",
        ),
        (
            lambda p: (p / "n.safetensors.index.json").write_text('{"weight_map": {}}'),
            "several indices",
        ),
    ],
)
def test_a_bad_checkpoint_is_an_error_that_says_why(
    two: Path, change: Callable[[Path], None], said: str
) -> None:
    change(two)
    with pytest.raises(InvalidSource, match=said):
        names(two)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.safetensors")
    with pytest.raises(InvalidSource, match="no regular file"):
        names(tmp_path)


def test_an_empty_folder_and_a_name_twice(tmp_path: Path, two: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidSource, match="there is nothing"):
        names(tmp_path / "empty")
    with pytest.raises(InvalidSource, match=r"'a' is in .* and in"):
        names([two / "m-1.safetensors", two / "m-1.safetensors"])
