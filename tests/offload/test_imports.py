"""`torch._dynamo` takes seconds of CPU to import: only who compiles pays for it."""

from collections.abc import Callable, Iterator

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery

Run = Callable[[str], None]

PREPARE = """
import sys
import torch
from torch import nn
from swapd_client import connect

torch.set_grad_enabled(False)
client = connect({folder!r}, label="child")


def heavy():
    return [n for n in ("torch._dynamo", "torch._inductor", "sympy") if n in sys.modules]


assert heavy() == [], "before"
from tests.offload.modules import TOKENS, Decoder, Encoder, evict, seeded

compilations = []


def backend(graph, inputs):
    compilations.append(graph)
    return graph.forward


def swaps(model, x, expected, times=1):
    for _ in range(times):
        evict(client, *(c.name for c in client.status().components))
        assert torch.equal(model(x), expected)
    assert not any(c.leases for c in client.status().components)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def run(nursery: Nursery, daemon: Daemon) -> Run:
    def run(program: str) -> None:
        status, said = nursery.run(PREPARE.format(folder=str(daemon.folder)) + program)
        assert status == 0, said

    return run


def test_an_attached_model_imports_nothing_that_only_a_compiler_needs(
    run: Run,
) -> None:
    run(
        """
vae, text = seeded(Decoder), seeded(Encoder)
x = torch.ones(2, 256)
decoded, encoded = vae(x), text(TOKENS)
parts = {"vae": vae, "text_encoder": text}
with client.attach(parts, blocks={"text_encoder": ["layers"]}) as attachment:
    for resident in (None, 0):
        client.resize("text_encoder", resident)
        swaps(text, TOKENS, encoded)
    swaps(vae, x, decoded)
    swaps(vae.decode, x, decoded)
    with attachment.use("text_encoder"):
        text.layers[0](torch.ones(1, 256))
    text.layers.append(nn.Linear(4, 4))
    del text.layers[-1]
    attachment.refresh()
    text.load_state_dict(text.state_dict())
    swaps(text, TOKENS, encoded)
assert torch.equal(text(TOKENS), encoded)
client.close()
assert heavy() == [], heavy()
"""
    )


def test_what_is_compiled_afterwards_is_compiled_as_if_it_had_been_there(
    run: Run,
) -> None:
    run(
        """
vae, text = seeded(Decoder), seeded(Encoder)
x = torch.ones(2, 256)
decoded, encoded = vae(x), text(TOKENS)
parts = {"vae": vae, "text_encoder": text}
with client.attach(parts, blocks={"text_encoder": ["layers"]}) as attachment:
    swaps(text, TOKENS, encoded)
    assert heavy() == [], heavy()
    for model, argument, expected in ((text, TOKENS, encoded), (vae.decode, x, decoded)):
        call = torch.compile(model, backend=backend)
        for resident in (None, 0):
            client.resize("text_encoder", resident)
            swaps(call, argument, expected)
        compiled = len(compilations)
        swaps(call, argument, expected)
        assert len(compilations) == compiled > 0
    torch.compiler.reset()
    try:
        torch.compile(text, backend=backend, fullgraph=True)(TOKENS)
    except Exception as exc:
        assert "detach()" in str(exc), exc
    else:
        raise AssertionError("as one graph")
client.close()
"""
    )


def test_blocks_first_compiled_in_a_pass_that_holds_all_of_it_are_streamed_later(
    run: Run,
) -> None:
    """Then `torch._dynamo` is imported while the blocks' hooks are put aside."""
    run(
        """
class Lazy(Encoder):
    call = staticmethod(lambda layer, x: layer(x))
    compiles = False

    def forward(self, x):
        x = self.embed(x)
        if self.compiles and not compilations:
            self.call = torch.compile(self.call, backend=backend)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.norm(x)


text, twin = seeded(Lazy), seeded(Encoder)
expected = twin(TOKENS)
with client.attach({"text_encoder": text}, blocks=["layers"], resident=None):
    swaps(text, TOKENS, expected)
    text.compiles = True
    assert torch.equal(text(TOKENS), expected)
    assert compilations
    client.resize("text_encoder", 0)
    swaps(text, TOKENS, expected)
client.close()
"""
    )
