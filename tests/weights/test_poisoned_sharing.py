"""A process that shares a file's bytes trusts the file, and not the other process."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd import spawn
from swapd_client import Client
from swapd_client.memory.layout import Layout
from swapd_client.weights import load
from swapd_client.weights.safetensors import File
from tests.weights.test_update import same

N = 100_000


@pytest.fixture
def liar(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client:
        yield client


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(N).to(torch.bfloat16) for name in ("a", "b", "c")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file(values(), path)
    return path


PARTS = {"0": ["a"], "1": ["b"], "rest": ["c"]}


def lie(
    client: Client,
    file: Path,
    *,
    at: int,
    parts: Mapping[str, list[str]] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Register the components of a load of `file`, with one wrong byte in each part."""
    with load.planned(
        file,
        None,
        parts,
        prefix="",
        rename=None,
        dtype=dtype,
        segments=(),
        gpu=None,
        progress=None,
        share=True,
    ) as layouts:
        for part, layout in layouts.items():
            honest = layout.fill_file

            def fill_file(fd: int, layout: Layout = layout, honest: object = honest) -> None:
                assert callable(honest)
                honest(fd)
                place = at % layout.nbytes
                os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)

            layout.fill_file = fill_file  # type: ignore[method-assign]
            client.register(f"lie {part}", layout)


def bits(client: Client, name: str, part: swapd_client.Component) -> dict[str, torch.Tensor]:
    with client.acquire(name):
        return {n: t.clone() for n, t in part.tensors.items()}


@pytest.mark.parametrize("at", [0, N + 1, -1], ids=["first byte", "middle", "last byte"])
def test_a_lie_about_the_bytes_of_a_file_is_not_believed(
    client: Client, liar: Client, file: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    lie(liar, file, at=at)
    with caplog.at_level(logging.WARNING, "swapd_client"):
        part = client.load("mine", file)
    assert "differ from the files" in caplog.text
    assert same(bits(client, "mine", part), values())
    honest = client.load("next", file)
    assert same(bits(client, "next", honest), values())


def test_a_lie_about_what_is_cast_is_not_believed(client: Client, liar: Client, file: Path) -> None:
    lie(liar, file, at=4 * N - 1, dtype=torch.float32)
    part = client.load("mine", file, dtype=torch.float32)
    assert same(bits(client, "mine", part), {n: v.float() for n, v in values().items()})


def test_a_lie_about_one_part_leaves_a_family_whole_and_in_order(
    client: Client, liar: Client, file: Path
) -> None:
    lie(liar, file, at=1, parts=PARTS)
    made = client.load_family("mine", file, PARTS)
    assert [part.name for part in made] == ["mine/0", "mine/1", "mine/rest"]
    there = [c.name for c in client.status().components if c.name.startswith("mine")]
    assert there == ["mine/0", "mine/1", "mine/rest"]
    with client.acquire("mine"):
        found = {n: t.clone() for part in made for n, t in part.tensors.items()}
    assert same(found, values())


def test_the_truth_is_shared(client: Client, liar: Client, file: Path) -> None:
    first = liar.load("honest", file)
    part = client.load("mine", file)
    assert client.status().host_copy_bytes == part.nbytes == first.nbytes
    assert same(bits(client, "mine", part), values())
    family = liar.load_family("f", file, PARTS, dtype=torch.float32)
    client.load_family("g", file, PARTS, dtype=torch.float32)
    assert client.status().host_copy_bytes == part.nbytes + sum(p.nbytes for p in family)


def test_a_file_rewritten_in_place_with_its_time_kept_gives_the_new_bytes(
    client: Client, liar: Client, file: Path
) -> None:
    liar.load("old", file)
    before = file.stat()
    save_file(values(1), file.with_name("other"))
    new = file.with_name("other").read_bytes()
    with closing(File(file)) as opened:
        identity = opened.identity
        file.write_bytes(new)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
        with pytest.raises(swapd_client.InvalidSource, match="changed while it was read"):
            opened.check_unchanged()
    with closing(File(file)) as opened:
        assert opened.identity != identity
    part = client.load("new", file)
    assert same(bits(client, "new", part), values(1))
