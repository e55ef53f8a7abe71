"""Small models for the tests, and queries that many tests make."""

from typing import Any

import torch
from torch import nn

from swapd_client import Client

WIDTH = 256


class Encoder(nn.Module):
    """An embedding, a list of layers, a norm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Two methods beside forward, one of which leads to private ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """The documentation of decode."""
        return self._decode(x)

    def _decode(self, x: torch.Tensor) -> torch.Tensor:
        weight = nn.functional.linear(x, self.conv.weight, self.conv.bias)  # without a call
        return self.out(weight)  # type: ignore[no-any-return]

    def enable_tiling(self) -> None:
        self.tiling = True


class Model(nn.Module):
    """An encoder, a DiT, a VAE, and a head in no component."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = Encoder()
        self.transformer = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.vae = Decoder()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.transformer(self.text_encoder(x))
        return self.head(self.vae.decode(x))  # type: ignore[no-any-return]


class Pipeline:
    """Like a pipeline of diffusers: no module, but with components, some of which are modules."""

    def __init__(self, **components: Any) -> None:
        self.components = components


def seeded(kind: type[nn.Module], *args: Any) -> Any:
    """A module from the same seed each time."""
    torch.manual_seed(0)
    return kind(*args).requires_grad_(False)


def computed(x: torch.Tensor, kind: type[nn.Module], *args: Any) -> tuple[Any, Any]:
    """A module from the same seed each time, and what it makes of `x`."""
    module = seeded(kind, *args)
    return module, module(x)


TOKENS = torch.arange(6).reshape(2, 3)


def evict(client: Client, *names: str) -> None:
    """Evict components, as if others had needed the memory."""
    budget = client.status().budget_bytes
    filler = client.register("filler", {"x": bytes(budget)})
    client.acquire("filler").release()
    client.unregister("filler")
    assert filler.nbytes == budget
    states = {c.name: c.state for c in client.status().components}
    assert all(states[name] == "absent" for name in names), states


def assert_comes_back(client: Client, call: Any, x: Any, expected: Any, *names: str) -> None:
    """Evicted, these components are loaded again, and the call gives what it gave."""
    evict(client, *names)
    assert torch.equal(call(x), expected)


def leases(client: Client) -> dict[str, int]:
    """The leases on each component, by the daemon's count."""
    return {c.name: c.leases for c in client.status().components}


def await_none_leased(client: Client) -> None:
    """Releases of threads that ended may still be on their way to the daemon."""
    while any(leases(client).values()):
        pass
