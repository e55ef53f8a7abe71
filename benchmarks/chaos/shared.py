"""A file of tensors that all workers load."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.chaos.book import pattern
from benchmarks.processes import MIB


def tensors() -> dict[str, torch.Tensor]:
    data = bytearray(pattern("shared", 0, 2 * MIB))
    return {"x": torch.frombuffer(data, dtype=torch.uint8)}


def file(folder: Path) -> Path:
    return folder / "shared.safetensors"


def write(folder: Path) -> None:
    save_file(tensors(), file(folder))


def is_right(found: Mapping[str, torch.Tensor]) -> bool:
    expected = tensors()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
