"""Code that was compiled for a module without hooks never runs for one that is attached.

torch finds compiled code again by the code object and by guards, and these look at no hooks
(`torch._dynamo.config.skip_nnmodule_hook_guards`). Run without a lease it reads weights that are
out: a fault. So each case runs in a process of its own.
"""

import copy
import inspect
import pickle
from collections.abc import Iterator
from textwrap import dedent, indent

import pytest
import torch

from swapd_client import Client
from tests.guarantees.harness import Daemon
from tests.offload.modules import TOKENS, Encoder, seeded
from tests.offload.nursery import Nursery

PREPARE = """
    import torch
    from swapd_client import connect
    from tests.offload.modules import TOKENS, Encoder, evict, seeded

    torch.set_grad_enabled(False)
    client = connect({folder!r}, label="child")
    compilations = []


    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward


    def compiled(what):
        return torch.compile(what, backend=backend)


    def swaps(model, expected, times=1):
        for _ in range(times):
            evict(client, *(c.name for c in client.status().components))
            assert torch.equal(model(TOKENS), expected)
        leases = [c.leases for c in client.status().components]
        assert not any(leases), leases


    def attach(model):
        return client.attach(**as_said(model))


    #: What is attached of an Encoder: all of it, its blocks one by one, parts of it.
    WAYS = (
        lambda model: dict(model={{"text": model}}),
        lambda model: dict(model={{"text": model}}, blocks=["layers"], resident=0),
        lambda model: dict(model=model, components=["norm", "layers.0", "embed"]),
    )
    for as_said in WAYS:
        torch._dynamo.reset()
        print("a way", flush=True)
"""

PROGRAMS = {
    "another one was compiled before": """
        first, second = seeded(Encoder), seeded(Encoder)
        expected = second(TOKENS)
        assert torch.equal(compiled(first)(TOKENS), expected)
        with attach(second):
            swaps(compiled(second), expected)
            assert torch.equal(compiled(first)(TOKENS), expected)
            swaps(compiled(second), expected)
    """,
    "another one is compiled in between": """
        first, second = seeded(Encoder), seeded(Encoder)
        expected = second(TOKENS)
        with attach(second):
            assert torch.equal(compiled(first)(TOKENS), expected)
            swaps(compiled(second), expected)
            assert torch.equal(compiled(first)(TOKENS), expected)
            swaps(compiled(second), expected)
    """,
    "it was compiled itself before": """
        model = seeded(Encoder)
        expected = model(TOKENS)
        call = compiled(model)
        assert torch.equal(call(TOKENS), expected)
        with attach(model):
            swaps(call, expected)
    """,
    "a function that calls it was compiled before": """
        first, second = seeded(Encoder), seeded(Encoder)
        expected = second(TOKENS)
        held = [first]


        def around(x):
            return held[0](x)


        call = compiled(around)
        assert torch.equal(call(TOKENS), expected)
        held[0] = second
        assert torch.equal(call(TOKENS), expected)
        with attach(second):
            swaps(call, expected)
            held[0] = first
            assert torch.equal(call(TOKENS), expected)
            held[0] = second
            swaps(call, expected)
    """,
    "both are attached": """
        first, second = seeded(Encoder), seeded(Encoder)
        expected = second(TOKENS)
        with client.attach({"other": first}), attach(second):
            for _ in range(2):
                swaps(compiled(first), expected)
                swaps(compiled(second), expected)
    """,
    "it was compiled while it was attached, and is detached": """
        model = seeded(Encoder)
        expected = model(TOKENS)
        with attach(model):
            call = compiled(model)
            swaps(call, expected)
        assert torch.equal(call(TOKENS), expected)
        with attach(model):
            swaps(call, expected)
            swaps(model, expected)
    """,
    "blocks were compiled in place": """
        first, second = seeded(Encoder), seeded(Encoder)
        expected = second(TOKENS)
        for model in (first, second):
            for layer in model.layers:
                layer.compile(backend=backend)
        assert torch.equal(first(TOKENS), expected)
        with attach(second):
            swaps(second, expected)
            assert torch.equal(first(TOKENS), expected)
            swaps(second, expected)
    """,
}


TWINS = """
    model = seeded(Encoder)
    expected = model(TOKENS)
    call = torch.compile(model, backend=backend, fullgraph=True)
    with client.attach({"text": call}):
        swaps(model, expected)  # not compiled
        assert not compilations
        swaps(call, expected)
        swaps(model, expected)
        swaps(torch.compile(model, backend=backend, fullgraph=True), expected)
        assert len(compilations) == 1


        def around(x):
            return model(x) + 1


        swaps(torch.compile(around, backend=backend), expected + 1)
    assert torch.equal(call(TOKENS), expected)
    assert torch.equal(model(TOKENS), expected)
    assert "_call_impl" not in vars(model)

    layer = torch.nn.Sequential(*seeded(Encoder).layers)
    x = torch.ones(2, 256)
    expected = layer(x)
    call = torch.compile(layer, backend=backend, fullgraph=True)  # torch takes its call apart
    with client.attach({"text": call}):
        evict(client, "text")
        assert torch.equal(call(x), expected)
    client.close()
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("tests.offload.compiled_once", "tests.offload.modules")
    yield nursery
    nursery.close()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_code_compiled_without_its_hooks_never_runs(
    nursery: Nursery, daemon: Daemon, program: str
) -> None:
    prepare = dedent(PREPARE.format(folder=str(daemon.folder)))
    status, said = nursery.run(prepare + indent(dedent(program), "    ") + "client.close()\n")
    assert status == 0, said
    assert said.count("a way") == 3


def test_a_module_whose_compiled_twin_is_attached_can_be_called_itself(
    nursery: Nursery, daemon: Daemon
) -> None:
    prepare = dedent(PREPARE.format(folder=str(daemon.folder)))
    prepare = prepare[: prepare.index("#: What is attached")]
    status, said = nursery.run(prepare + dedent(TWINS))
    assert status == 0, said


def test_its_forward_is_that_of_the_class_whatever_becomes_of_that(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patched(Encoder):
        def forward(self, tokens: torch.Tensor, scale: int = 1) -> torch.Tensor:
            """The documentation of forward."""
            return super().forward(tokens) * scale

    model = seeded(Patched)
    expected = model(TOKENS)
    with client.attach({"text_encoder": model}):
        assert list(inspect.signature(model.forward).parameters) == ["tokens", "scale"]
        assert model.forward.__doc__ == "The documentation of forward."
        assert model.forward.__self__ is model
        monkeypatch.setattr(Patched, "forward", lambda self, x: Encoder.forward(self, x) + 1)
        assert torch.equal(model(TOKENS), expected + 1)
        assert "forward" not in vars(copy.deepcopy(model))
        assert "forward" not in vars(pickle.loads(pickle.dumps(model.norm)))
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_a_forward_that_somebody_gave_it_stays(client: Client) -> None:
    model = seeded(Encoder)

    def before(x: torch.Tensor) -> torch.Tensor:
        return x

    def after(x: torch.Tensor) -> torch.Tensor:
        return x

    model.norm.forward = before
    with client.attach({"text_encoder": model}):
        assert model.norm.forward is before
        model.embed.forward = after
    assert model.norm.forward is before
    assert model.embed.forward is after
