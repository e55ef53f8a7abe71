"""An interrupt at any place of an attached model's code leaves no lease, and a model that runs."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from swapd_client import Client
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import hook_of
from swapd_client.offload.scope import here, kept_between_calls
from swapd_client.offload.update_barrier import _changing
from tests.interrupts import Place, interrupt, interrupts, places
from tests.offload.modules import (
    TOKENS,
    WIDTH,
    Encoder,
    await_none_leased,
    computed,
    seeded,
)

#: Places of one call.
MOST = 40
NAMES = ["text_encoder", "transformer"]


class Model(nn.Module):
    """Two components."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = Encoder(1)
        self.transformer = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.text_encoder(x))  # type: ignore[no-any-return]


#: The width of a layer of 4 MiB, a quarter of the daemon's memory.
WIDE = 1024
X = torch.ones(2, WIDE)


class Blocks(nn.Module):
    """Blocks, between layers that are in none."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(blocks))
        self.proj_out = nn.Linear(WIDE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # the wait for an answer that was read, and lost in the interrupt
    monkeypatch.setattr("swapd_client.session.channel.GRACE_S", 0.2)
    with interrupts(), torch.inference_mode():
        yield


def assert_good(client: Client, model: nn.Module) -> None:
    """It computes what it should, and holds nothing afterwards."""
    assert torch.equal(model(TOKENS), seeded(Model)(TOKENS))
    await_none_leased(client)
    scope = here()
    assert (scope.entries, scope.inner, scope.counts, scope.begins) == ([], [], {}, None)
    assert (_changing.by, _changing.now, _changing.one_at_a_time.locked()) == (0, None, False)


def assert_private(client: Client, model: nn.Module) -> None:
    assert client.status().components == ()
    assert not client.session.components
    assert not any(map(hook_of, model.modules()))


def test_an_interrupted_attach_has_attached_nothing(client: Client) -> None:
    def attach(model: nn.Module) -> Attachment:
        return client.attach(model, NAMES)

    attach(seeded(Model)).detach()
    first: list[Attachment] = []
    found = places(lambda: first.append(attach(seeded(Model))), 10**6)
    first.pop().detach()
    # each once where calls are kept away: there is no undoing in between
    at_doors = {p[:2]: p for p in found if p.code.co_filename.endswith(("barrier.py", "hooks.py"))}
    for place in {*found[:MOST], *at_doors.values()}:
        model = seeded(Model)
        attachment = interrupt(partial(attach, model), place)
        if attachment is None:
            assert_private(client, model)
            assert_good(client, model)
            attachment = attach(model)
        assert_good(client, model)
        attachment.detach()
        assert_good(client, model)


def call(attachment: Attachment, model: Model) -> None:
    model(TOKENS)


def use(attachment: Attachment, model: Model) -> None:
    with attachment.use(*NAMES):
        model.transformer[0](torch.ones(1, WIDTH))
    with attachment.use(model.transformer[1]):
        pass


def request(attachment: Attachment, model: Model) -> None:
    client = attachment.components["transformer"].all_of_it.client
    with kept_between_calls(client, within_s=60.0):
        model(TOKENS)
        model.transformer(torch.ones(1, WIDTH))


@pytest.mark.parametrize("do", [call, use, request])
def test_an_interrupted_call_or_use_holds_nothing(
    client: Client, do: Callable[[Attachment, Model], None]
) -> None:
    model = seeded(Model)
    with client.attach(model, NAMES) as attachment:
        for _ in range(2):
            do(attachment, model)
        for place in places(partial(do, attachment, model), 2 * MOST):
            interrupt(partial(do, attachment, model), place)
            await_none_leased(client)
            assert_good(client, model)


class Steps(nn.Module):
    """Its methods read its weights in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def generated(self) -> Iterator[torch.Tensor]:
        x = torch.ones(1, WIDTH)
        for _ in range(3):
            x = self.layer(x)
            yield x

    async def awaited(self) -> torch.Tensor:
        all_of_it = []
        async for one in self.asynchronously():  # a comprehension has a variable for the iterator
            all_of_it.append(one)  # noqa: PERF401
        return torch.cat(all_of_it)

    async def asynchronously(self) -> AsyncIterator[torch.Tensor]:
        x = torch.ones(1, WIDTH)
        for _ in range(3):
            x = self.layer(x)
            yield x


def generated(model: Steps) -> torch.Tensor:
    return torch.cat(list(model.generated()))


def awaited(model: Steps) -> torch.Tensor:
    try:
        model.awaited().send(None)
    except StopIteration as done:
        return cast("torch.Tensor", done.value)
    raise AssertionError("it waits for nothing")


@pytest.mark.parametrize("steps", [generated, awaited])
def test_interrupted_steps_hold_nothing(
    client: Client, steps: Callable[[Steps], torch.Tensor]
) -> None:
    model = seeded(Steps)
    expected = steps(model)
    with client.attach({"decoder": model}):
        for place in places(partial(steps, model), 4 * MOST):
            interrupt(partial(steps, model), place)
            await_none_leased(client)
            assert not here().counts
            assert torch.equal(steps(model), expected)


def test_an_interrupted_detach_leaves_a_model_that_runs_and_can_be_detached(
    client: Client,
) -> None:
    first = client.attach(seeded(Model), NAMES)
    for place in places(first.detach, MOST):
        model = seeded(Model)
        attachment = client.attach(model, NAMES)
        interrupt(attachment.detach, place)
        assert_good(client, model)
        attachment.detach()
        assert_private(client, model)
        assert_good(client, model)


def pass_through(attachment: Attachment, model: Blocks) -> None:
    model(X)
    model.blocks[0](X)
    with attachment.use(model.blocks[1]):
        model.blocks[1](X)


@pytest.mark.parametrize("blocks", [2, 5])
def test_an_interrupted_pass_through_blocks_holds_nothing_and_the_next_one_runs(
    client: Client, blocks: int
) -> None:
    """With two blocks all of them are there, with five they are streamed."""
    model, expected = computed(X, Blocks, blocks)
    of_one_block = model.blocks[0](X)
    with client.attach({"dit": model}, blocks=["blocks"]) as attachment:
        for _ in range(2):
            pass_through(attachment, model)
        for place in places(partial(pass_through, attachment, model), 2 * MOST):
            interrupt(partial(pass_through, attachment, model), place)
            await_none_leased(client)
            assert not here().counts
            assert torch.equal(model.blocks[0](X), of_one_block)  # no pass keeps its hook away
            assert torch.equal(model(X), expected)
            await_none_leased(client)
    assert_private(client, model)
    assert torch.equal(model(X), expected)


def test_an_interrupted_update_of_blocks_keeps_no_call_away(client: Client) -> None:
    model, _ = computed(X, Blocks, 2)
    new = {"proj_out.bias": torch.ones(4)}
    with client.attach({"dit": model}, blocks=["blocks"]):
        client.update("dit", new)
        for place in places(lambda: client.update("dit", new), MOST * 4):
            interrupt(lambda: client.update("dit", new), place)
            assert (_changing.by, _changing.now) == (0, None), place
            assert not _changing.one_at_a_time.locked()


class Reads(Blocks):
    """Reads a block once more, outside of its call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.blocks.get_parameter("0.weight")[0])


def test_an_interrupted_first_call_watches_nothing_and_holds_nothing(client: Client) -> None:
    model, expected = computed(X, Reads, 2)
    attach = partial(client.attach, {"dit": model}, blocks=["blocks"], resident=0)
    with attach():
        found = places(partial(model, X), 10**6)
    ours = {p[:2]: p for p in found if p.code.co_filename.endswith("first_call.py")}
    for place in ours.values():
        with attach():
            interrupt(partial(model, X), place)
            assert _get_current_dispatch_mode() is None
            assert not here().counts
            await_none_leased(client)
            assert torch.equal(model(X), expected)


def edit(attachment: Attachment, model: Model, value: float) -> None:
    with attachment.edit():
        for parameter in model.parameters():
            parameter.fill_(value)


def edit_within_edit(attachment: Attachment, model: Model, value: float) -> None:
    with attachment.edit("text_encoder"):
        edit(attachment, model, value)


def edit_within_use(attachment: Attachment, model: Model, value: float) -> None:
    with attachment.use(*NAMES):
        edit(attachment, model, value)
        assert {p.flatten()[-1].item() for p in model.parameters()} == {value}


def load(attachment: Attachment, model: Model, value: float) -> None:
    state = {name: torch.full_like(weight, value) for name, weight in model.state_dict().items()}
    model.load_state_dict(state)


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize("change", [edit, edit_within_edit, edit_within_use, load])
def test_after_interrupted_changes_no_tensor_is_over_a_copy(
    client: Client, change: Callable[[Attachment, Model, float], None], mutable: bool
) -> None:
    """All weights have the new values, or the old ones; only mutable ones may have some of both."""
    with torch.inference_mode(False), torch.no_grad():
        model = seeded(Model)
        for name in NAMES if mutable else ():
            client.register(name, getattr(model, name), mutable=True)
        attachment = client.attach(model, NAMES)
        there = {name: p.data_ptr() for name, p in model.named_parameters()}

        change(attachment, model, 0.0)
        found = places(partial(change, attachment, model, 0.5), 10**6)
        for value, place in enumerate(at_edits(found), 1):
            interrupt(partial(change, attachment, model, float(value)), place)
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == there
            with attachment.use(*NAMES):
                values = {p.flatten()[-1].item() for p in model.parameters()}
            assert mutable or len(values) == 1
            change(attachment, model, 0.5)
            with attachment.use(*NAMES):
                assert {p.flatten()[-1].item() for p in model.parameters()} == {0.5}
            await_none_leased(client)
            assert (_changing.by, _changing.one_at_a_time.locked()) == (0, False)
        attachment.detach()


_AT_EDITS = ("offload/weights.py", "barrier.py", "state_dict.py", "weights/update.py", "lib.py")


def at_edits(found: list[Place]) -> list[Place]:
    """One place for each instruction of the edit itself, and others."""
    once = {place[:2]: place for place in found}
    its = [p for p in once.values() if p.code.co_filename.endswith(_AT_EDITS)]
    released = [p for p in once.values() if p.code.co_name in ("give_back", "release_of")]
    return [*its, *released, *found[: MOST // 4]]


def test_an_interrupted_refresh_leaves_no_weights_without_hooks(client: Client) -> None:
    def grown() -> tuple[nn.Module, Attachment]:
        model = seeded(Model)
        attachment = client.attach(model, NAMES)
        model.transformer.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        return model, attachment

    model, attachment = grown()
    once = {place[:2]: place for place in places(attachment.refresh, 10**6)}
    attachment.detach()
    files = ("offload/attach.py", "offload/registering.py", "offload/attachment.py")
    for place in [p for p in once.values() if p.code.co_filename.endswith(files)][:MOST]:
        model, attachment = grown()
        interrupt(attachment.refresh, place)
        result = model(TOKENS)
        await_none_leased(client)
        attachment.refresh()
        assert torch.equal(model(TOKENS), result)
        assert len(client.session.components) == 3
        attachment.detach()
        assert_private(client, model)
        assert torch.equal(model(TOKENS), result)


def test_an_interrupted_refresh_of_a_closed_client_raises_the_interrupt(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Model)
    attachment = client.attach(model, NAMES)
    result = model(TOKENS)

    def interrupted() -> None:
        client.close()  # as another thread does meanwhile
        raise KeyboardInterrupt

    monkeypatch.setattr(attachment, "_again", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attachment.refresh()
    assert torch.equal(model(TOKENS), result)
