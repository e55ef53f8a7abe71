"""The first call of a streamed model finds what it reads of its blocks outside of their calls."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

from swapd_client import Client, TooLarge
from swapd_client.offload.copies import Method
from swapd_client.offload.scope import here
from tests.offload.modules import assert_comes_back, computed, evict, leases, seeded
from tests.threads import run_together

WIDE = 1024  # a block is 4 MiB: 2 chunks of the 8 that the device has
X = torch.ones(2, WIDE)


pytestmark = pytest.mark.usefixtures("inference_mode")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDE, WIDE)
        self.scale = nn.Sequential(nn.Linear(WIDE, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + self.scale(x).sum()  # type: ignore[no-any-return]

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


Reads = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Runs its blocks, and then reads from them in another way.

    Parts of the first block have hooks, since caches between steps call them.
    """

    def __init__(self, reads: Reads, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.out = nn.Linear(WIDE, 8)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.reads(self, x))  # type: ignore[no-any-return]


def part_of_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.blocks[0].scale[0](x).sum()  # type: ignore[no-any-return]


def forward_past_the_hooks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[1:]:
        x = block.forward(x)
    return x


def method_of_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[1].again(x)  # type: ignore[no-any-return]


def weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, model.blocks[2].proj.weight)


def operation_with_keywords(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.add(model.blocks[2].proj.bias, alpha=3)


def weights_of_all(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = nn.functional.linear(x, block.proj.weight)
    return x


def only_if_unwatched(model: Any, x: torch.Tensor) -> torch.Tensor:
    assert _python_dispatch._get_current_dispatch_mode() is None
    return x


def held(module: nn.Module) -> list[str]:
    """The methods that hold something, of the modules in a model."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, one in module.named_modules()
        for name, value in vars(one).items()
        if type(value) is Method
    ]


def check(client: Client, model: Any, expected: torch.Tensor) -> None:
    assert_comes_back(client, model, X, expected)
    assert not any(leases(client).values())
    assert not here().counts
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("reads", "gates"),
    [
        (part_of_a_block, ["blocks.0.scale.0.forward"]),
        (forward_past_the_hooks, [f"blocks.{n}.forward" for n in range(1, 5)]),
        (method_of_a_block, ["blocks.1.again"]),
        (weights, ["forward"]),
        (operation_with_keywords, ["forward"]),
    ],
)
def test_what_the_first_call_reads_outside_of_blocks_is_loaded_for_it_from_then_on(
    client: Client, reads: Reads, gates: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = computed(X, Model, reads)
    before = {path: list(vars(one)) for path, one in model.named_modules()}
    with caplog.at_level("INFO", "swapd_client"), client.attach({"dit": model}, resident=0):
        for _ in range(3):
            check(client, model, expected)
            assert held(model) == gates
        (said,) = [r.getMessage() for r in caplog.records if "outside of" in r.getMessage()]
        assert all(gate in said for gate in gates)
        assert "dit/blocks." in said
    assert {path: list(vars(one)) for path, one in model.named_modules()} == before
    assert torch.equal(model(X), expected)


def test_a_block_that_a_call_holds_throughout_does_not_end_reading_ahead(client: Client) -> None:
    model, expected = computed(X, Model, weights, 4)
    with client.attach({"dit": model}, resident=0) as attachment:
        for _ in range(2):
            check(client, model, expected)
        stream, asked = attachment.streamed["dit"].stream, []
        ask = client.leasing.ask
        client.leasing.ask = lambda number, name: (asked.append(name), ask(number, name))[1]  # type: ignore
        check(client, model, expected)
        assert set(asked) >= {stream.parts[n] for n in (1, 3)}


def test_reads_of_more_blocks_than_fit_are_refused_with_words(client: Client) -> None:
    model, expected = computed(X, Model, weights_of_all)
    with client.attach({"dit": model}, resident=0):
        for said in ("reads dit/blocks.*: attach with other blocks", "dit/blocks"):
            with pytest.raises(TooLarge, match=said):
                model(X)
            assert not any(leases(client).values())
        evict(client)
        model.reads = part_of_a_block
        twin = seeded(Model, part_of_a_block)
        assert torch.equal(model.blocks[3](X), twin.blocks[3](X))
    model.reads = weights_of_all
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_first_call_that_fails_leaves_nothing_and_the_next_is_watched(
    client: Client, error: type[BaseException]
) -> None:
    def fails(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.blocks[2].again(x)
        raise error

    model = seeded(Model, fails)
    with client.attach({"dit": model}, resident=0):
        with pytest.raises(error):
            model(X)
        assert _python_dispatch._get_current_dispatch_mode() is None
        model.reads = method_of_a_block
        twin = seeded(Model, method_of_a_block)
        assert torch.equal(model(X), twin(X))  # after an interrupt, it releases what was held
        check(client, model, twin(X))
        assert held(model) == ["blocks.1.again", "blocks.2.again"]
        model.reads = only_if_unwatched
        model(X)


def test_first_calls_of_several_threads_are_each_watched(client: Client) -> None:
    model, expected = computed(X, Model, part_of_a_block, 2)
    start, seen = threading.Barrier(3), []

    def run() -> None:
        with torch.inference_mode():
            start.wait()
            seen.append(torch.equal(model(X), expected))

    with client.attach({"dit": model}, resident=0):
        threads = [threading.Thread(target=run) for _ in range(3)]
        run_together(*threads)
        assert seen == [True] * 3
        check(client, model, expected)


def test_a_copy_made_before_or_after_the_first_call_is_watched_no_more(client: Client) -> None:
    model, expected = computed(X, Model, part_of_a_block, 2)
    with client.attach({"dit": model}, resident=0):
        copies = [copy.deepcopy(model)]
        check(client, model, expected)
        copies.append(copy.deepcopy(model))
        evict(client)
        for one in copies:
            assert torch.equal(one(X), expected)
            assert "forward" not in vars(one)


class Outer(nn.Module):
    """Reads, calls and returns weights of its components by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.vae = Model(part_of_a_block, 1), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = nn.functional.linear(x, self.vae.proj.weight)
        return self.text_encoder.blocks[0].forward(x), self.vae.proj.bias.expand(2, -1)


class Grows(Outer):
    """Changes its own attachment between two components."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = Model(part_of_a_block)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.vae(x)
        self.between()
        return self.text_encoder(x)


@pytest.mark.parametrize("how", ["refresh", "detach", "attach"])
def test_a_call_that_changes_the_attachment_has_the_new_hooks_alone(
    client: Client, how: str
) -> None:
    model, expected = computed(X, Grows)
    attachment = client.attach(model)

    def between() -> None:
        if how == "refresh":
            model.text_encoder.more = seeded(Block)
            attachment.refresh()
        else:
            attachment.detach()
        if how == "attach":
            client.attach(model)

    model.between = between
    assert torch.equal(model(X), expected)
    model.between = lambda: None
    evict(client)
    assert torch.equal(model(X), expected)


def test_a_model_around_components_may_read_them_by_itself(client: Client) -> None:
    model, expected = computed(X, Outer)
    with client.attach(model):
        for _ in range(3):
            evict(client, "text_encoder", "vae")
            outputs = model(X)
            evict(client, "text_encoder", "vae")
            assert all(map(torch.equal, outputs, expected))
        assert held(model)[:2] == ["forward", "text_encoder.blocks.0.forward"]
    assert "forward" not in vars(model)
