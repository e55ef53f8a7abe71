"""torch.compile, export, trace and script: supported around hooks, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, InvalidSource, NotWhileAttached
from swapd_client.offload import hooks
from swapd_client.offload.scope import here
from tests.offload.modules import (
    TOKENS,
    WIDTH,
    Decoder,
    Encoder,
    Model,
    computed,
    evict,
    leases,
    seeded,
)

X = torch.ones(2, WIDTH)


class Counting:
    """A backend that runs its graph unchanged, and counts."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compilations += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _from_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch flushes the processor's caches for this metric, which is unused here
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


pytestmark = pytest.mark.usefixtures("inference_mode")


def swaps(client: Client, model: Any, x: torch.Tensor, times: int = 3) -> list[torch.Tensor]:
    outputs = []
    for _ in range(times):
        evict(client, *(c.name for c in client.status().components))
        outputs.append(model(x))
    assert not sum(leases(client).values())
    return outputs


def assert_swaps(
    client: Client, model: Any, x: torch.Tensor, expected: Any, times: int = 3
) -> None:
    for output in swaps(client, model, x, times):
        assert torch.equal(output, expected)


def compiled(model: nn.Module, in_place: bool) -> Any:
    if not in_place:
        return torch.compile(model, backend=Counting())
    model.compile(backend=Counting())
    return model


@pytest.mark.parametrize(
    ("made", "x", "is_hooked"),
    [
        ([Encoder], TOKENS, True),
        ([nn.Linear, WIDTH, WIDTH], X, False),  # of torch's own classes it compiles the call, too
    ],
)
def test_a_compiled_model_is_hooked_outside_and_compiled_once(
    client: Client, made: list[Any], x: torch.Tensor, is_hooked: bool
) -> None:
    backend = Counting()
    inner, expected = computed(x, *made)
    model: Any = torch.compile(inner, backend=backend, fullgraph=True)
    with client.attach({"text": model}):
        hooked = [m for m in inner.modules() if "_call_impl" in vars(m)]
        assert hooked == [inner] * is_hooked  # fullgraph: a hook inside would be an error
        assert_swaps(client, model, x, expected)
        assert backend.compilations == 1
    assert torch.equal(model(x), expected)
    assert backend.compilations == 1


def test_what_is_compiled_in_place_before_is_compiled_again_once_for_the_hooks(
    client: Client,
) -> None:
    backend = Counting()
    model, expected = computed(TOKENS, Encoder)
    model.compile(backend=backend)
    model(TOKENS)
    with client.attach({"text": model}):
        swaps(client, model, TOKENS, 1)
        before = backend.compilations
        assert_swaps(client, model, TOKENS, expected)
        assert backend.compilations == before


@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_of_what_is_compiled_as_one_are_not_streamed(client: Client, in_place: bool) -> None:
    """Compiled code does not see the hooks that would load them."""
    model = compiled(seeded(Encoder), in_place)
    expected = model(TOKENS)
    with pytest.raises(InvalidSource, match=r"'text' cannot be streamed: .* Encoder"):
        client.attach({"text": model}, resident=0)
    assert client.status().components == ()
    assert torch.equal(model(TOKENS), expected)


def test_a_compiled_model_is_one_where_only_configs_say_that_it_has_parts(client: Client) -> None:
    model: Any = nn.Module()
    model.text_model, model.vision_model = seeded(Encoder), seeded(Encoder)
    model.forward = lambda x: model.text_model(x)
    model.compile(backend=Counting())
    with client.attach(model) as attachment, torch.inference_mode():
        assert list(attachment.components) == ["Module"]
        model(TOKENS)


@pytest.mark.parametrize("in_place", [False, True])
def test_components_of_what_is_compiled_as_one_are_refused(client: Client, in_place: bool) -> None:
    model = compiled(seeded(Model), in_place)
    expected = model(TOKENS)
    with pytest.raises(InvalidSource, match=r"in a Model .*compiled"):
        client.attach(model)
    with client.attach(model, "."):
        assert_swaps(client, model, TOKENS, expected)


def test_an_attached_model_can_be_compiled_with_graph_breaks(client: Client) -> None:
    backend = Counting()
    inner, expected = computed(TOKENS, Encoder)
    with client.attach({"text": inner}):
        model: Any = torch.compile(inner, backend=backend)
        assert torch.equal(model(TOKENS), expected)
        compiled = backend.compilations
        assert compiled > 0
        assert_swaps(client, model, TOKENS, expected)
        assert backend.compilations == compiled


@pytest.mark.parametrize("what", ["function", "model", "model in place", "blocks in place"])
def test_what_is_compiled_while_all_of_it_was_held_is_streamed_later(
    client: Client, what: str
) -> None:
    """Passes that hold all of a component remove its blocks' hooks; compiled code keeps them."""
    backend = Counting()
    inner, expected = computed(TOKENS, Encoder)
    with client.attach({"text": inner}, blocks=["layers"], resident=None):
        assert torch.equal(inner(TOKENS), expected)
        call: Any = inner
        if what == "function":

            def around(x: torch.Tensor) -> Any:
                return inner(x)

            call = torch.compile(around, backend=backend)
        elif what == "model":
            call = torch.compile(inner, backend=backend)
        for module in {"model in place": [inner], "blocks in place": inner.layers}.get(what, []):
            module.compile(backend=backend)
        compiled = None
        for _ in range(2):
            for resident in (None, 0):
                client.resize("text", resident)
                assert_swaps(client, call, TOKENS, expected, 2)
            compiled = compiled or backend.compilations
        assert backend.compilations == compiled


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(seeded(Decoder) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks]


def test_members_of_a_list_share_compiled_code_without_graph_breaks(client: Client) -> None:
    backend = Counting()
    model, expected = computed(X, Blocks)
    with client.attach({"dit": model}):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        for outputs in swaps(client, model, X):
            assert all(map(torch.equal, outputs, expected))
        assert backend.compilations == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_compiled_while_its_component_is_held_is_left_when_called_alone(
    client: Client, in_place: bool
) -> None:
    inner = seeded(Encoder)
    expected = inner.embed(TOKENS)

    def around(x: torch.Tensor) -> Any:
        return inner.embed(x)

    with client.attach({"text": inner}) as attachment:
        torch.compiler.reset()
        call: Any = inner.embed if in_place else torch.compile(around, backend=Counting())
        if in_place:
            inner.embed.compile(backend=Counting())
        with attachment.use("text"):
            assert torch.equal(call(TOKENS), expected)
        assert_swaps(client, call, TOKENS, expected)
        assert not here().counts


def test_a_function_that_ran_compiled_before_sees_the_hooks_after_a_reset(client: Client) -> None:
    inner = seeded(Encoder)

    def around(x: torch.Tensor) -> Any:
        return inner(x)

    call: Any = torch.compile(around, backend=Counting())
    expected = call(TOKENS)
    with client.attach({"text": inner}):
        torch.compiler.reset()
        assert_swaps(client, call, TOKENS, expected)


def test_a_model_around_attached_components_can_be_compiled(client: Client) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = seeded(Decoder)
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.vae.decode(x))  # type: ignore[no-any-return]

    backend = Counting()
    inner = Around()
    expected = inner(X)
    with client.attach(inner):
        model: Any = torch.compile(inner, backend=backend)
        assert_swaps(client, model, X, expected)
        compiled = backend.compilations
        swaps(client, model, X)
        assert backend.compilations == compiled


def test_an_error_in_compiled_code_leaves_nothing_held(client: Client) -> None:
    model = seeded(Decoder)
    with client.attach({"vae": model}):
        compiled: Any = torch.compile(model, backend=Counting())
        compiled(X)
        with pytest.raises(RuntimeError):
            compiled(torch.ones(2, 3))
        compiled(X)
        assert not sum(leases(client).values())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("kind", "x"), [(Decoder, X), (Model, TOKENS)], ids=["alone", "around"])
def test_export_is_refused_until_it_is_detached(
    client: Client, kind: type[nn.Module], x: torch.Tensor, strict: bool
) -> None:
    model = seeded(kind)
    with client.attach({"m": model}) as attachment:
        with pytest.raises(Exception, match=r"detach\(\)"):
            torch.export.export(model, (x,), strict=strict)
        attachment.detach()
        torch.export.export(model, (x,), strict=strict)


jit: Any = torch.jit
deprecated = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@deprecated
def test_trace_is_refused_until_it_is_detached(client: Client) -> None:
    model = seeded(Decoder)
    with client.attach({"vae": model}) as attachment:
        with pytest.raises(NotWhileAttached, match=r"'vae' is attached to swapd.*detach\(\)"):
            jit.trace(model, X)
        attachment.detach()
        assert torch.equal(jit.trace(model, X)(X), model(X))


@deprecated
def test_script_is_refused_until_it_is_detached(client: Client) -> None:
    model = seeded(nn.Sequential, nn.Linear(4, 4))
    with client.attach({"dit": model}) as attachment:
        with pytest.raises(NotWhileAttached, match=r"detach\(\)"):
            jit.script(model)
        with pytest.raises(NotWhileAttached, match=r"detach\(\)"):
            jit.script(nn.Sequential(model))
        attachment.detach()
        jit.script(model)
    assert "__prepare_scriptable__" not in vars(model)
    assert hooks.methods_of(model) == []


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return 2 * made


@deprecated
def test_a_traced_module_is_refused_by_name(client: Client) -> None:
    traced = jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(InvalidSource, match=r"'m.0' is scripted or traced"):
        client.attach({"m": nn.Sequential(traced)})


@deprecated
def test_the_original_of_a_compiled_model_is_not_scripted_either(client: Client) -> None:
    model = seeded(Doubling)
    with (
        client.attach({"dit": torch.compile(model, backend=Counting())}),
        pytest.raises(NotWhileAttached, match=r"detach\(\)"),
    ):
        jit.script(model)
    assert "__prepare_scriptable__" not in vars(model)
