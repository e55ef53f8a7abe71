"""Modules compiled without hooks, with hooks, and in every order.

`python stale_graphs.py CASE FOLDER` runs the function CASE with the daemon in FOLDER, once for each
way to attach; "twins" on its own.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from swapd_client import Client, connect
from swapd_client.offload.attachment import Attachment
from tests.offload.modules import TOKENS, Encoder, computed, evict, seeded

Attach = Callable[[Any], Attachment]

compilations: list[Any] = []

#: Called by a function that is compiled once.
called: list[Any] = []


def backend(graph: Any, inputs: Any) -> Any:
    compilations.append(graph)
    return graph.forward


def compiled(what: Any, *, fullgraph: bool = False) -> Any:
    return torch.compile(what, backend=backend, fullgraph=fullgraph)


def swaps(client: Client, model: Any, expected: torch.Tensor, times: int = 1) -> None:
    for _ in range(times):
        evict(client, *(c.name for c in client.status().components))
        assert torch.equal(model(TOKENS), expected)
    leases = [c.leases for c in client.status().components]
    assert not any(leases), leases


#: The ways to attach an Encoder: whole, block by block, in parts.
WAYS: tuple[Callable[[Any], dict[str, Any]], ...] = (
    lambda model: {"model": {"text": model}},
    lambda model: {"model": {"text": model}, "blocks": ["layers"], "resident": 0},
    lambda model: {"model": model, "components": ["norm", "layers.0", "embed"]},
)


def another_one_was_compiled_before(client: Client, attach: Attach) -> None:
    first, second = seeded(Encoder), seeded(Encoder)
    expected = second(TOKENS)
    assert torch.equal(compiled(first)(TOKENS), expected)
    with attach(second):
        swaps(client, compiled(second), expected)
        assert torch.equal(compiled(first)(TOKENS), expected)
        swaps(client, compiled(second), expected)


def it_was_compiled_itself_before(client: Client, attach: Attach) -> None:
    model, expected = computed(TOKENS, Encoder)
    call = compiled(model)
    assert torch.equal(call(TOKENS), expected)
    with attach(model):
        swaps(client, call, expected)


def around(x: torch.Tensor) -> Any:
    return called[0](x)


def a_function_that_calls_it_was_compiled_before(client: Client, attach: Attach) -> None:
    first, second = seeded(Encoder), seeded(Encoder)
    expected = second(TOKENS)
    called[:] = [first]
    call = compiled(around)
    assert torch.equal(call(TOKENS), expected)
    called[0] = second
    assert torch.equal(call(TOKENS), expected)
    with attach(second):
        swaps(client, call, expected)
        called[0] = first
        assert torch.equal(call(TOKENS), expected)
        called[0] = second
        swaps(client, call, expected)


def both_are_attached(client: Client, attach: Attach) -> None:
    first, second = seeded(Encoder), seeded(Encoder)
    expected = second(TOKENS)
    with client.attach({"other": first}), attach(second):
        for _ in range(2):
            swaps(client, compiled(first), expected)
            swaps(client, compiled(second), expected)


def it_was_compiled_while_it_was_attached_and_is_detached(client: Client, attach: Attach) -> None:
    model, expected = computed(TOKENS, Encoder)
    with attach(model):
        call = compiled(model)
        swaps(client, call, expected)
    assert torch.equal(call(TOKENS), expected)
    with attach(model):
        swaps(client, call, expected)
        swaps(client, model, expected)


def blocks_were_compiled_in_place(client: Client, attach: Attach) -> None:
    first, second = seeded(Encoder), seeded(Encoder)
    expected = second(TOKENS)
    for model in (first, second):
        for layer in model.layers:
            layer.compile(backend=backend)
    assert torch.equal(first(TOKENS), expected)
    with attach(second):
        swaps(client, second, expected)
        assert torch.equal(first(TOKENS), expected)
        swaps(client, second, expected)


def twins(client: Client) -> None:
    model, expected = computed(TOKENS, Encoder)
    call = compiled(model, fullgraph=True)
    with client.attach({"text": call}):
        swaps(client, model, expected)  # not compiled
        assert not compilations
        swaps(client, call, expected)
        swaps(client, model, expected)
        swaps(client, compiled(model, fullgraph=True), expected)
        assert len(compilations) == 1

        def one_more(x: torch.Tensor) -> Any:
            return model(x) + 1

        swaps(client, compiled(one_more), expected + 1)
    assert torch.equal(call(TOKENS), expected)
    assert torch.equal(model(TOKENS), expected)
    assert "_call_impl" not in vars(model)
    whose_call_torch_takes_apart(client)


def whose_call_torch_takes_apart(client: Client) -> None:
    layer = torch.nn.Sequential(*seeded(Encoder).layers)
    x = torch.ones(2, 256)
    expected = layer(x)
    call = compiled(layer, fullgraph=True)
    with client.attach({"text": call}):
        evict(client, "text")
        assert torch.equal(call(x), expected)


def main(case: str, folder: str) -> None:
    torch.set_grad_enabled(False)
    client = connect(folder, label="child")
    if case == "twins":
        twins(client)
    else:
        for arguments in WAYS:
            torch._dynamo.reset()
            print("a way", flush=True)  # noqa: T201
            globals()[case](client, partial(attached, client, arguments))
    client.close()


def attached(
    client: Client, arguments: Callable[[Any], dict[str, Any]], model: object
) -> Attachment:
    return client.attach(**arguments(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
