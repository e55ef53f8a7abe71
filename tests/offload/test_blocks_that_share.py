"""Blocks of a streamed component that share weights with other modules, or are never called."""

from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from tests.offload.modules import assert_comes_back, seeded

WIDE = 1024  # 4 MiB: a chunk or more


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDE, 8)


class Layer(nn.Module):
    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDE, WIDE)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + self.bias.table.weight.mean()  # type: ignore[no-any-return]


class Around(nn.Module):
    """Adds up biases of its first block before any block runs, as UDOP's encoder does."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(Bias()) for _ in range(3))
        first: Any = self.blocks[0]
        self.biases = nn.ModuleList([Bias() if tied else first.bias])
        if tied:
            first.bias.table.weight = self.biases[0].table.weight  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for bias in self.biases:
            x = x + bias.table(torch.tensor([1])).sum()  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        return x


class Level(nn.Module):
    """As in a VQGAN: a module with children, and without a forward to call them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Linear(WIDE, WIDE)])
        self.after = nn.Linear(WIDE, WIDE)


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Level() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.down:
            x = level.after(level.convs[0](x))  # type: ignore[operator, index]
        return x


def _part_of(client: Client, tensor: torch.Tensor) -> str:
    (name,) = [
        name
        for name, part in client.session.components.items()
        if 0 <= tensor.data_ptr() - part.address < part.nbytes
    ]
    return name


def _check_it_runs(client: Client, module: Any, expected: torch.Tensor, x: torch.Tensor) -> None:
    for _ in range(2):
        assert_comes_back(client, module, x, expected)


@pytest.mark.parametrize("tied", [True, False], ids=["a weight", "a module"])
@torch.no_grad()
def test_what_is_used_beside_a_block_is_in_none_of_them(client: Client, tied: bool) -> None:
    module, x = seeded(lambda: Around(tied=tied)), torch.ones(1, WIDE)  # type: ignore[arg-type]
    expected = module(x)
    with client.attach({"dit": module}, resident=0):
        assert _part_of(client, module.biases[0].table.weight) == "dit/rest"
        assert _part_of(client, module.blocks[1].bias.table.weight) == "dit/blocks.1"
        _check_it_runs(client, module, expected, x)


@torch.no_grad()
def test_a_module_without_a_forward_is_entered_by_what_is_in_it(client: Client) -> None:
    module, x = seeded(Levels), torch.ones(1, WIDE)
    expected = module(x)
    with client.attach({"dit": module}, resident=0) as attachment:
        blocks = attachment.streamed["dit"].blocks
        assert [len(modules) for modules in blocks] == [2, 2]
        assert all(not isinstance(one, Level) for modules in blocks for one in modules)
        _check_it_runs(client, module, expected, x)
