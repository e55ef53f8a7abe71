"""Lent modules, and the same modules without swapd."""

from collections.abc import Callable
from typing import Any

import torch

from swapd_client import Client, Component
from swapd_client.offload.guards import guard
from swapd_client.offload.weights import ComponentWeights
from tests.offload.modules import evict

Make = Callable[[], torch.nn.Module]


class Lent:
    """A module registered and guarded by hand, and its twin."""

    def __init__(self, client: Client, make: Make, name: str = "m", **options: Any) -> None:
        self.client = client
        torch.manual_seed(0)
        self.module = make()
        torch.manual_seed(0)
        self.twin = make()
        self.name = name
        self.component: Component = client.register(name, self.module, **options)
        self.weights = ComponentWeights(client, name, [client.session.own(name)])
        undo: list[Callable[[], None]] = []
        guard(self.module, self.weights, undo.append)
        (self.undo,) = undo
        evict(client, name)

    def end(self) -> None:
        self.undo()
        self.client.unregister(self.name)

    def run(self, *args: Any) -> Any:
        """The module's output, under a lease, after an eviction."""
        evict(self.client, self.name)
        with self.client.acquire(self.name):
            return self.module(*args)

    def is_out(self) -> bool:
        (found,) = [c for c in self.client.status().components if c.name == self.name]
        return found.state == "absent"


def same(mine: Any, its: Any) -> bool:
    """Whether state dicts, or tensors, are equal in names, types, shapes and bits."""
    if isinstance(mine, dict):
        return list(mine) == list(its) and all(same(mine[k], its[k]) for k in mine)
    return (
        mine.dtype == its.dtype
        and mine.shape == its.shape
        and mine.stride() == its.stride()
        and torch.equal(bits(mine), bits(its))
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal NaNs are equal, and -0.0 is not 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
