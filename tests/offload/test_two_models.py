"""Two attached models that share weights: either may go, and the other goes on."""

import gc
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, InUse, finalizers
from swapd_client.offload import hooks
from tests import threads
from tests.offload.modules import WIDTH, assert_comes_back, evict, seeded
from tests.offload.test_attach import names

X = torch.arange(2.0 * WIDTH).reshape(2, WIDTH) / WIDTH


def shared() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Around(nn.Module):
    """The shared module, and a layer of its own. No hook is as deep as the shared one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[0](x))  # type: ignore[no-any-return]


class Near(nn.Module):
    """The shared module where hooks are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight of the shared module in a layer of its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.head, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = inner[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(x))  # type: ignore[no-any-return]


def itself(inner: nn.Module) -> nn.Module:
    return inner


PAIRS = [(Around, Around), (Around, Near), (Around, itself), (Tied, Tied), (itself, Tied)]
pairs = pytest.mark.parametrize("kinds", PAIRS, ids=lambda p: "-".join(k.__name__ for k in p))


class Pair:
    """Two models with a module in common, both attached, and what they compute."""

    def __init__(self, client: Client, kinds: tuple[Callable[..., Any], ...], **how: Any) -> None:
        inner = seeded(shared)  # type: ignore[arg-type]
        self.client = client
        self.models = [kind(inner).requires_grad_(False) for kind in kinds]
        self.expected = [model(X) for model in self.models]
        self.attachments = [
            client.attach({name: model}, **how)
            for name, model in zip("ab", self.models, strict=True)
        ]

    def check(self) -> None:
        for model, expected in zip(self.models, self.expected, strict=True):
            evict(self.client)
            assert torch.equal(model(X), expected)


@pytest.mark.parametrize("first", [0, 1])
@pairs
def test_either_is_detached_and_both_go_on(client: Client, kinds: Any, first: int) -> None:
    pair = Pair(client, kinds)
    pair.check()
    pair.attachments[first].detach()
    pair.check()
    pair.attachments[1 - first].detach()
    pair.check()
    assert not names(client)
    assert not any(hooks.is_attached(m) for model in pair.models for m in model.modules())


@pytest.mark.parametrize("first", [0, 1])
def test_when_either_is_detached_the_other_tells_of_what_the_shared_module_gains(
    client: Client, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    pair = Pair(client, (Around, Around))
    pair.attachments[first].detach()
    pair.models[0].blocks[0][0].register_parameter("extra", nn.Parameter(torch.ones(1)))
    pair.check()
    assert re.search(
        f"'{'ba'[first]}' has parameters that stay in private memory.*extra", caplog.text
    )


@pairs
def test_shared_weights_are_registered_again_by_a_refresh_of_the_other(
    client: Client, kinds: Any
) -> None:
    pair = Pair(client, kinds)
    pair.attachments[0].detach()
    pair.attachments[1].refresh()
    evict(client, *names(client))
    assert torch.equal(pair.models[1](X), pair.expected[1])
    assert sum(c.nbytes for c in client.session.components.values()) >= sum(
        p.nbytes for p in pair.models[1].parameters()
    )
    pair.attachments[1].detach()
    pair.check()


@pytest.mark.parametrize("first", [0, 1])
def test_either_is_garbage_and_the_other_goes_on(client: Client, first: int) -> None:
    pair = Pair(client, (Around, Tied))
    del pair.models[first], pair.expected[first], pair.attachments[first]
    gc.collect()
    finalizers.settle()
    pair.check()
    if first == 0:
        while names(client) != {"b"}:  # a thread may have been quicker than this one
            pass
        pair.check()


def test_the_first_is_a_family_and_the_second_streams_it(client: Client) -> None:
    inner = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)]).requires_grad_(False)
    around, x = nn.Sequential(nn.Sequential(nn.Sequential(inner))), torch.ones(1, 1024)
    expected = inner(x)
    client.register_family("f", {str(n): layer for n, layer in enumerate(inner)})
    with client.attach({"b": around}) as second:
        assert second.streamed
        assert_comes_back(client, around, x, expected)
        client.unregister("f")
        assert torch.equal(around(x), expected)
        assert torch.equal(inner[1](x), inner[1].forward(x))


def test_one_is_not_detached_in_the_middle_of_a_call_of_the_other(client: Client) -> None:
    pair = Pair(client, (Around, Tied))
    begun, end = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        end.wait()

    handle = pair.models[1].out.register_forward_pre_hook(wait)
    thread = threads.started(pair.models[1], X)
    begun.wait()
    with pytest.raises(InUse, match="'a' is leased"):
        pair.attachments[0].detach()
    end.set()
    thread.join()
    handle.remove()
    pair.check()
    pair.attachments[0].detach()
    pair.check()


def test_calls_of_the_other_that_begin_meanwhile_have_their_weights(client: Client) -> None:
    pair = Pair(client, (Around, Tied))
    seen: list[bool] = []
    problems: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            with torch.inference_mode():
                while not stop.is_set():
                    seen.append(torch.equal(pair.models[1](X), pair.expected[1]))
        except BaseException as exc:  # noqa: BLE001
            problems.append(exc)

    thread = threads.started(run)
    while not seen:
        pass
    while pair.attachments[0].registered:
        with suppress(InUse):
            pair.attachments[0].detach()
    more = len(seen)
    while len(seen) < more + 3 and not problems:
        pass
    stop.set()
    thread.join()
    assert not problems
    assert all(seen)
    pair.check()


def test_a_model_whose_hooks_stayed_is_attached_again(client: Client) -> None:
    pair = Pair(client, (Around, Tied))
    pair.attachments[1].detach()
    again = client.attach({"b": pair.models[1]})
    pair.check()
    pair.attachments[0].detach()
    pair.check()
    again.detach()
    assert not names(client)
    pair.check()
