"""The modules of torch's compiler that an attached model imports.

`python imports.py CASE FOLDER` runs the function CASE with the daemon in FOLDER.
"""

import sys
from typing import Any

import torch
from torch import nn

from swapd_client import Client, connect
from tests.offload.modules import TOKENS, Decoder, Encoder, evict, seeded

X = torch.ones(2, 256)
compilations: list[Any] = []


def heavy() -> list[str]:
    return [n for n in ("torch._dynamo", "torch._inductor", "sympy") if n in sys.modules]


def backend(graph: Any, inputs: Any) -> Any:
    compilations.append(graph)
    return graph.forward


def swaps(client: Client, model: Any, x: torch.Tensor, expected: torch.Tensor) -> None:
    evict(client, *(c.name for c in client.status().components))
    assert torch.equal(model(x), expected)
    assert not any(c.leases for c in client.status().components)


def refused(call: Any) -> str:
    try:
        call(TOKENS)
    except Exception as exc:  # noqa: BLE001 - whatever torch makes of it
        return str(exc)
    raise AssertionError("as one graph")


def only_attached(client: Client) -> None:
    vae, text = seeded(Decoder), seeded(Encoder)
    decoded, encoded = vae(X), text(TOKENS)
    parts = {"vae": vae, "text_encoder": text}
    with client.attach(parts, blocks={"text_encoder": ["layers"]}) as attachment:
        for resident in (None, 0):
            client.resize("text_encoder", resident)
            swaps(client, text, TOKENS, encoded)
        swaps(client, vae, X, decoded)
        swaps(client, vae.decode, X, decoded)
        with attachment.use("text_encoder"):
            text.layers[0](torch.ones(1, 256))
        text.layers.append(nn.Linear(4, 4))
        del text.layers[-1]
        attachment.refresh()
        text.load_state_dict(text.state_dict())
        swaps(client, text, TOKENS, encoded)
    assert torch.equal(text(TOKENS), encoded)
    client.close()
    assert heavy() == [], heavy()


def compiled_afterwards(client: Client) -> None:
    vae, text = seeded(Decoder), seeded(Encoder)
    decoded, encoded = vae(X), text(TOKENS)
    parts = {"vae": vae, "text_encoder": text}
    with client.attach(parts, blocks={"text_encoder": ["layers"]}):
        swaps(client, text, TOKENS, encoded)
        assert heavy() == [], heavy()
        for model, argument, expected in ((text, TOKENS, encoded), (vae.decode, X, decoded)):
            call = torch.compile(model, backend=backend)
            for resident in (None, 0):
                client.resize("text_encoder", resident)
                swaps(client, call, argument, expected)
            assert "forward" in vars(text), "code compiled for other modules is not for it"
            compiled = len(compilations)
            swaps(client, call, argument, expected)
            assert len(compilations) == compiled > 0
        torch.compiler.reset()
        said = refused(torch.compile(text, backend=backend, fullgraph=True))
        assert "detach()" in said, said
    client.close()


class Lazy(Encoder):
    """Compiles the callers of its layers in the first pass after it is told to."""

    call: Any = staticmethod(lambda layer, x: layer(x))
    compiles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.compiles and not compilations:
            self.call = torch.compile(self.call, backend=backend)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.norm(x)  # type: ignore[no-any-return]


def first_compiled_while_all_is_held(client: Client) -> None:
    text, twin = seeded(Lazy), seeded(Encoder)
    expected = twin(TOKENS)
    with client.attach({"text_encoder": text}, blocks=["layers"], resident=None):
        swaps(client, text, TOKENS, expected)
        text.compiles = True
        assert torch.equal(text(TOKENS), expected)
        assert compilations
        client.resize("text_encoder", 0)
        swaps(client, text, TOKENS, expected)
    client.close()


def main(case: str, folder: str) -> None:
    torch.set_grad_enabled(False)
    client = connect(folder, label="child")
    assert heavy() == [], "before"
    globals()[case](client)


if __name__ == "__main__":
    main(*sys.argv[1:])
