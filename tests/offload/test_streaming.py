"""`attach` streams a component block by block: around the blocks' own calls, and between them."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swapd_client import Client, Lease, NotWhileAttached, TooLarge, connect
from swapd_client.offload.scope import here
from tests.guarantees.harness import World
from tests.offload.modules import (
    Decoder,
    Encoder,
    assert_comes_back,
    computed,
    evict,
    leases,
    seeded,
)

#: A block of 4 MiB, that is 2 chunks.
WIDE = 1024
X = torch.ones(2, WIDE)
NAMES = {"dit/rest", *(f"dit/blocks.{i}" for i in range(6))}


class Dit(nn.Module):
    """28 MiB, of which a quarter fits at a time."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.proj_in = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(blocks))
        self.proj_out = nn.Linear(WIDE, 4)
        self.skipped: set[int] = set()
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = block(x)
            if self.error is not None and i == 3:
                raise self.error
        return self.proj_out(x)  # type: ignore[no-any-return]

    def later(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            yield self(x)


pytestmark = pytest.mark.usefixtures("inference_mode")


def held_now(client: Client) -> dict[str, int]:
    return {name: count for name, count in leases(client).items() if count}


def test_a_dit_that_does_not_fit_is_streamed_by_its_blocks(client: Client) -> None:
    model, expected = computed(X, Dit)
    with client.attach({"dit": model}, enable_layerwise_offload=True) as attachment:
        assert leases(client).keys() == NAMES
        assert "dit (28.02 MiB, streamed in 6 blocks)" in str(attachment)
        for _ in range(3):
            assert torch.equal(model(X), expected)
            assert not held_now(client)
        assert client.status().bytes_out == 0
    assert torch.equal(model(X), expected)


def test_peak_of_a_streamed_component_is_its_rest_and_its_slots(client: Client) -> None:
    model = seeded(Dit)
    seen: list[int] = []
    with client.attach({"dit": model}, resident=0):
        for block in model.blocks:
            block.register_forward_hook(lambda *_: seen.append(client.status().used_bytes))
        model(X)
    assert max(seen) <= (6 + 2 * 4) << 20


def test_one_that_fits_is_held_as_one_and_moves_nothing(client: Client) -> None:
    model, expected = computed(X, Dit, 2)
    with client.attach({"dit": model}, enable_layerwise_offload=True):
        model(X)
        before = client.status()
        counts = []
        for block in model.blocks:
            block.register_forward_hook(lambda *_: counts.append(len(client.session.leases)))
        for _ in range(3):
            assert torch.equal(model(X), expected)
        assert client.status().bytes_in == before.bytes_in
        assert counts == [1] * 6


def test_what_is_to_stay_is_set_when_attaching_and_while_it_runs(client: Client) -> None:
    model, expected = computed(X, Dit)

    def kept() -> set[str]:
        return {c.name for c in client.status().components if c.policy != "sequential"}

    with client.attach({"dit": model}, resident="9MiB"):
        assert kept() == {"dit/rest", "dit/blocks.0"} or len(kept()) == 2
        assert torch.equal(model(X), expected)
        client.resize("dit", "5MiB")
        assert kept() == {"dit/rest"}
        assert torch.equal(model(X), expected)
    with client.attach({"dit": model}, cpu_offload_gb=19 / 1024):
        assert len(kept()) == 2
        assert torch.equal(model(X), expected)


def test_skipped_blocks_and_errors_in_a_pass(client: Client) -> None:
    model, twin = seeded(Dit), seeded(Dit)
    with client.attach({"dit": model}, resident=0):
        for skipped in (set(), {1, 4}, {0}, set()):
            model.skipped = twin.skipped = skipped
            assert torch.equal(model(X), twin(X))
        for error in (ValueError(), KeyboardInterrupt(), asyncio.CancelledError()):
            model.error = error
            with pytest.raises(type(error)):
                model(X)
            model.error = None
            assert torch.equal(model(X), twin(X))
            assert not held_now(client)
        assert not here().counts


def test_blocks_may_be_called_alone_and_so_may_the_rest(client: Client) -> None:
    model, twin = seeded(Dit), seeded(Dit)
    with client.attach({"dit": model}, resident=0) as attachment:
        assert torch.equal(model.blocks[4](X), twin.blocks[4](X))
        assert torch.equal(model.proj_in(X), twin.proj_in(X))
        with attachment.use(model.blocks[2]):
            assert torch.equal(model.blocks[2].weight, twin.blocks[2].weight)
        with attachment.use(model.proj_out):
            assert torch.equal(model.proj_out.weight, twin.proj_out.weight)
        assert not held_now(client)


class Cached(Dit):
    """Calls a part of its first block to decide whether to run blocks, as TeaCache does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.ReLU()) for block in self.blocks)
        self.same = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said = self.first(self.proj_in(x))
        return self.proj_out(said) if self.same else super().forward(x)

    def first(self, x: torch.Tensor) -> Any:
        return next(self.blocks[0].children())(x)


def test_a_cache_may_look_at_the_first_block_before_it_runs_any(client: Client) -> None:
    model, twin = seeded(Cached), seeded(Cached)
    with client.attach({"dit": model}, resident=0):
        for same in (False, True, True, False):
            model.same = twin.same = same
            assert torch.equal(model(X), twin(X))
            assert not held_now(client)


def test_a_block_that_is_called_alone_after_passes_that_held_all_is_left(client: Client) -> None:
    """Those removed its hooks; its own call needs them."""
    model, twin = seeded(Dit, 2), seeded(Dit, 2)
    with client.attach({"dit": model}, enable_layerwise_offload=True):
        for _ in range(3):
            assert torch.equal(model(X), twin(X))
            assert torch.equal(model.blocks[1](X), twin.blocks[1](X))
            assert torch.equal(model.proj_in(X), twin.proj_in(X))
            assert not here().counts
            assert not held_now(client)


def test_layers_beside_the_blocks_are_out_of_the_way_of_what_is_all_in(client: Client) -> None:
    model, twin = seeded(Dit, 2), seeded(Dit, 2)
    seen: list[bool] = []
    for layer in (model.proj_in, model.blocks[0]):
        layer.register_forward_hook(lambda m, a, o: seen.append("_call_impl" in vars(m)))
    with client.attach({"dit": model}, blocks=["blocks"], resident=None):
        for _ in range(2):  # the first loads it
            assert torch.equal(model(X), twin(X))
        assert seen == [True, True, False, False]
        client.resize("dit", 0)
        assert torch.equal(model(X), twin(X))
        assert seen[4:] == [True, True]


def test_use_of_a_streamed_component_is_all_of_it_or_refused(client: Client) -> None:
    small, large = seeded(Dit, 2), seeded(Dit)
    expected = small(X)
    with client.attach({"dit": small}, resident=0) as attachment:
        with attachment.use("dit"):
            assert len(held_now(client)) == 3
            assert torch.equal(small(X), expected)
            assert torch.equal(
                small.blocks[1](small.blocks[0].weight[:2]),
                small.blocks[1](small.blocks[0].weight[:2]),
            )
        assert not held_now(client)
    with client.attach({"dit": large}, resident=0) as attachment:
        with pytest.raises(TooLarge), attachment.use("dit"):
            pass
        assert not held_now(client)


def test_gradients_of_a_streamed_component_are_refused(client: Client) -> None:
    model = seeded(Dit).requires_grad_(True)
    with (
        client.attach({"dit": model}, resident=0),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for call in (model, model.blocks[0], model.proj_in):
            with pytest.raises(NotWhileAttached, match="require grad"):
                call(torch.ones(2, WIDE))
        assert not held_now(client)


def test_generators_of_a_streamed_component_hold_it_step_by_step(client: Client) -> None:
    model, expected = computed(X, Dit)
    with client.attach({"dit": model}, resident=0):
        first, second = model.later(X), model.later(X)
        for _ in range(2):
            assert torch.equal(next(first), expected)
            assert torch.equal(next(second), expected)
            assert not held_now(client)
        first.close()
        del second


class Reads(Dit):
    """Reads weights when it is closed."""

    def later(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            yield self(x)
        finally:
            self.sum = self.proj_out.weight.sum()

    async def awaited(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        try:
            yield self(x)
        finally:
            self.sum = self.proj_out.weight.sum()


async def test_generators_of_a_streamed_component_hold_it_while_they_are_closed(
    client: Client,
) -> None:
    model = seeded(Reads)
    expected = model.proj_out.weight.sum()
    with client.attach({"dit": model}, resident=0), torch.inference_mode():
        steps, later = model.later(X), model.awaited(X)
        next(steps)
        await anext(later)
        evict(client, *NAMES)
        steps.close()
        assert torch.equal(model.sum, expected)
        evict(client, *NAMES)
        await later.aclose()
        assert torch.equal(model.sum, expected)
        assert not held_now(client)


def test_dit_streamed_encoders_and_vae_beside_it(client: Client) -> None:
    parts = {"text_encoder": seeded(Encoder), "transformer": seeded(Dit), "vae": seeded(Decoder)}
    with client.attach(parts, enable_layerwise_offload=True):
        policies = {c.name: c.policy for c in client.status().components}
        assert policies["text_encoder"] == "lru"
        assert policies["vae"] == "permanent"
        assert policies["transformer/rest"] in ("lru", "permanent")
        parts["transformer"](X)


def test_alternating_with_a_streamed_dit(client: Client) -> None:
    parts = {"text_encoder": seeded(Encoder), "transformer": seeded(Dit)}
    expected = parts["transformer"](X)
    with client.attach(parts, cpu_offload_enabled=True, cpu_offload_gb=20 / 1024):
        for _ in range(2):
            parts["text_encoder"](torch.zeros(1, 1, dtype=torch.int64))
            assert torch.equal(parts["transformer"](X), expected)
            states = {c.name: c.state for c in client.status().components}
            assert states["text_encoder"] == "absent"
            assert states["transformer/rest"] != "absent"


def test_blocks_are_named_by_the_class_or_by_the_caller(client: Client) -> None:
    model, expected = computed(
        X, nn.Sequential, *[nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)]
    )
    with client.attach({"dit": model}, blocks=["1", "2"]):
        assert leases(client).keys() == {"dit/rest", "dit/1", "dit/2"}
        assert_comes_back(client, model, X, expected, "dit/1", "dit/2")
    model._layerwise_offload_blocks_attrs = ["0"]
    with client.attach({"dit": model}, enable_layerwise_offload=True):
        assert leases(client).keys() == {"dit/rest", "dit/0"}
        assert torch.equal(model(X), expected)


def test_blocks_without_a_name_are_those_of_the_dit_alone(client: Client) -> None:
    parts = {"transformer": seeded(Decoder), "text_encoder": seeded(Encoder)}
    with client.attach(parts, blocks=["out"], resident={"text_encoder": 0}):
        assert leases(client).keys() >= {"transformer/out", "text_encoder/layers.0-1"}


def test_without_blocks_a_component_is_not_streamed_and_that_is_said(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Decoder)
    with client.attach({"dit": model}, enable_layerwise_offload=True):
        assert leases(client).keys() == {"dit"}
    assert "Name its blocks in blocks=" in caplog.text


def test_weights_that_blocks_share_are_with_the_rest(client: Client) -> None:
    model = seeded(Dit)
    model.blocks[3].weight = model.blocks[1].weight
    model.blocks[5] = model.blocks[0]
    expected = model(X)
    with client.attach({"dit": model}, resident=0):
        assert leases(client).keys() == NAMES - {"dit/blocks.1", "dit/blocks.3", "dit/blocks.5"}
        for _ in range(2):
            assert torch.equal(model(X), expected)
        assert model.blocks[3].weight is model.blocks[1].weight


def test_an_adapter_in_a_streamed_block_is_taken_in_beside_it(client: Client) -> None:
    model = seeded(Dit)
    with client.attach({"dit": model}, resident=0) as attachment:
        model.blocks[2].register_parameter("extra", nn.Parameter(torch.ones(4)))
        expected = model(X)
        attachment.refresh()
        assert leases(client).keys() == NAMES | {"dit~2"}
        assert_comes_back(client, model, X, expected, *leases(client))
        with attachment.use(model.blocks[2]):
            assert model.blocks[2].extra.sum() == 4


@pytest.mark.parametrize("resident", [0, "9MiB"])
def test_new_blocks_are_streamed_in_the_places_of_those_that_went(
    client: Client, resident: int | str
) -> None:
    model = seeded(Dit)
    with client.attach({"dit": model}, resident=resident) as attachment:
        lost, of_it = model.blocks[1], model.blocks[1](X)
        new = seeded(Dit, 10).blocks[6:]
        model.blocks[1], model.blocks[2], model.blocks[3] = new[:3]
        model.blocks.append(new[3])
        expected = model(X)
        for _ in range(2):
            attachment.refresh()
            again = {f"dit/blocks.{i}{'~2' * (i in (1, 2, 3))}" for i in range(7)}
            assert leases(client).keys() == again | {"dit/rest"}
            assert "32.02 MiB, streamed in 7 blocks" in str(attachment)
            for _ in range(2):
                assert torch.equal(model(X), expected)
        for kept in ("dit/blocks.1~2", "dit/blocks.2~2"):
            stays = [c.name for c in client.status().components if c.policy == "lru"]
            assert stays == ["dit/rest", kept][: 2 if resident else 1]
            del model.blocks[1]
            expected = model(X)
            attachment.refresh()
        model.blocks = seeded(Dit, 16).blocks[10:]
        expected = model(X)
        attachment.refresh()
        assert "28.02 MiB, streamed in 6 blocks" in str(attachment)
        assert torch.equal(model(X), expected)
        with pytest.raises(TooLarge), attachment.use("dit"):
            pass
        assert torch.equal(lost(X), of_it)
    assert torch.equal(model(X), expected)


def test_compiled_blocks_are_streamed_and_compiled_once(client: Client) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, expected = computed(X, Dit)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
    model(X)
    before = len(compiled)
    with client.attach({"dit": model}, resident=0):
        for _ in range(2):
            assert torch.equal(model(X), expected)
        assert len(compiled) == before
    torch._dynamo.reset()


def test_a_family_that_was_registered_or_loaded_before_is_streamed_as_it_is(
    client: Client, tmp_path: Path
) -> None:
    model, expected = computed(X, Dit)
    save_file(model.state_dict(), tmp_path / "dit.safetensors")
    with torch.device("meta"):
        empty = Dit().requires_grad_(False)
    parts = {f"blocks.{i}": [f"blocks.{i}"] for i in range(6)}
    client.load_family("dit", tmp_path / "dit.safetensors", {"rest": [], **parts}, empty)
    client.resize("dit", 0)
    with client.attach({"model": empty}, ["model"]) as attachment:
        assert "streamed in 6 blocks" in str(attachment)
        assert leases(client).keys() == NAMES
        for _ in range(2):
            assert torch.equal(empty(X), expected)
    assert leases(client).keys() == NAMES  # attach did not register it
    client.unregister("dit")
    assert torch.equal(empty(X), expected)


def test_a_family_whose_parts_are_no_modules_is_held_as_one(client: Client) -> None:
    model = seeded(nn.Linear, 8, 8)
    client.register_family("dit", {"w": {"weight": model.weight}, "b": {"bias": model.bias}})
    with client.attach({"model": model}, ["model"]) as attachment:
        assert "streamed" not in str(attachment)
        evict(client, "dit/w", "dit/b")
        model(torch.ones(1, 8))
    client.unregister("dit")


class Patient(Dit):
    """Calls a block again if an alarm interrupts it."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            try:
                x = block(x)
            except TimeoutError:
                self.alarms += 1
                x = block(x)
        return self.proj_out(x)  # type: ignore[no-any-return]


def test_a_block_whose_arrival_was_interrupted_is_waited_for_again(world: World) -> None:
    daemon = world.daemon(budget="16MiB", bandwidth="8MB/s")  # half a second for a block
    model, expected = computed(X, Patient)

    def arm(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    def raise_in_a_wait(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not Lease.wait.__code__:
            frame = frame.f_back
        if frame is not None:
            raise TimeoutError
        arm()

    former = signal.signal(signal.SIGALRM, raise_in_a_wait)
    try:
        with connect(daemon.folder) as client, client.attach({"dit": model}, resident=0):
            model.blocks[2].register_forward_hook(arm)
            assert torch.equal(model(X), expected)
            assert model.alarms == 1
            assert held_now(client) == {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
