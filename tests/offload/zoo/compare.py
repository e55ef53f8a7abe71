"""Compares two runs: any nest of tensors, bit for bit."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from swapd_client.memory.movable import inner_names, is_wrapper
from tests.offload.twins import bits


def tensors_in(value: Any, path: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest of mappings, sequences, dataclasses and arrays."""
    if isinstance(value, torch.Tensor):
        yield from _unwrapped(path, value)
    elif isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors_in(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{number}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from tensors_in(getattr(value, one.name), f"{path}.{one.name}")


def _unwrapped(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if not is_wrapper(tensor):
        yield path, tensor
        return
    for name in inner_names(tensor):
        yield from _unwrapped(f"{path}.{name}", getattr(tensor, name))


def difference(seen: Any, expected: Mapping[str, torch.Tensor]) -> str:
    """The first difference; "" if they are equal."""
    mine = dict(tensors_in(seen))
    if mine.keys() != expected.keys():
        return ", ".join(sorted(mine.keys() ^ expected.keys()))
    return next((name for name, its in expected.items() if not _same(mine[name], its)), "")


def kept(value: Any) -> dict[str, torch.Tensor]:
    """Copies for a later comparison, independent of the model."""
    return {name: tensor.detach().clone() for name, tensor in tensors_in(value)}


def _same(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Values alone: an expanded tensor may be dense in a copy."""
    return (
        mine.dtype == its.dtype and mine.shape == its.shape and torch.equal(bits(mine), bits(its))
    )
