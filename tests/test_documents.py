"""Files from any author, read within bounds."""

import os
from pathlib import Path

import pytest

from swapd.shared import documents
from swapd.shared.documents import DEPTH_MAX, VALUES_MAX, BadDocument, read, read_json, read_yaml
from swapd_client.errors import InvalidArgument, InvalidSource
from swapd_client.offload.settings import from_yaml
from swapd_client.weights.safetensors import open_all
from tests.files import file_with


def write(folder: Path, text: str) -> Path:
    return file_with(folder / "file", text)


def test_a_file_of_the_most_bytes_is_read_and_one_more_is_too_many(tmp_path: Path) -> None:
    path = write(tmp_path, "x" * 100)
    assert read(path, 100) == "x" * 100
    with pytest.raises(BadDocument, match="it has more than 99 B"):
        read(path, 99)


@pytest.mark.parametrize("reading", [read, read_json, read_yaml])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, reading: object) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(BadDocument, match="it is no regular file"):
            reading(path)  # type: ignore[operator]
    with pytest.raises(FileNotFoundError):
        reading(tmp_path / "gone")  # type: ignore[operator]
    with pytest.raises(BadDocument):
        reading(Path("a\0b"))  # type: ignore[operator]


def test_no_descriptor_is_left_of_what_was_refused(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BadDocument):
            read(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_aliases_and_merges_mean_what_they_do(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}\n"
    whole = {"x": 1, "y": [1, 2]}
    found = read_yaml(write(tmp_path, text))
    assert found == {"a": whole, "b": whole, "c": {**whole, "x": 2}}
    assert read_yaml(write(tmp_path, "# nothing\n")) is None


def test_the_bounds_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    deep = "[" * (DEPTH_MAX - 1) + "1" + "]" * (DEPTH_MAX - 1)
    for reading in (read_json, read_yaml):
        assert reading(write(tmp_path, deep))
        with pytest.raises(BadDocument, match=f"nested deeper than {DEPTH_MAX}"):
            reading(write(tmp_path, f"[{deep}]"))
    assert read_yaml(write(tmp_path, f"[{'1,' * (VALUES_MAX - 1)}]"))
    with pytest.raises(BadDocument, match=f"more than {VALUES_MAX} values"):
        read_yaml(write(tmp_path, f"[{'1,' * VALUES_MAX}]"))


def test_numbers_that_json_has_not_are_refused() -> None:
    for text in ("NaN", "[Infinity]", "-Infinity"):
        with pytest.raises(BadDocument, match="is no number"):
            documents.parsed_json(text)


def test_the_client_reads_stage_files_and_indices_within_the_same_bounds(tmp_path: Path) -> None:
    bomb = "x0: &x0 ha\n" + "".join(
        f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 40)
    )
    with pytest.raises(InvalidArgument, match="values, with its aliases written out"):
        from_yaml(write(tmp_path, bomb))
    os.mkfifo(tmp_path / "m.safetensors.index.json")
    with (
        pytest.raises(InvalidSource, match="it is no regular file"),
        open_all(tmp_path / "m.safetensors.index.json"),
    ):
        pass
