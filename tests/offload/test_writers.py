"""Code that writes to weights works on attached models, or gets an error that says why not."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, NotWhileAttached
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.scope import here
from swapd_client.offload.weights import edits
from tests.guarantees.harness import Daemon
from tests.offload.modules import WIDTH, Encoder, evict, seeded
from tests.offload.twins import same
from tests.processes import output_of

X = torch.arange(6).reshape(2, 3)


def built(make: Callable[[], Any]) -> Any:
    """A module from the same seed each time."""
    torch.manual_seed(0)
    return make().requires_grad_(False)


def rwkv() -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=6, context_length=32, rescale_every=2
    )
    return RwkvForCausalLM(config)


@pytest.mark.parametrize("resident", [None, 0], ids=["whole", "streamed"])
def test_a_forward_that_rescales_its_weights(client: Client, resident: int | None) -> None:
    """RWKV: in place, in its first forward in each mode."""
    module, twin = built(rwkv), built(rwkv)
    blocks = None if resident is None else ["rwkv.blocks"]
    with client.attach({"text": module}, resident=resident, blocks=blocks) as attachment:
        for training in (False, True, False, False):
            module.train(training)
            twin.train(training)
            with torch.no_grad():
                evict(client, *attachment.registered)
                mine, its = module(X, use_cache=False), twin(X, use_cache=False)
                assert torch.equal(mine.logits, its.logits)
        evict(client, *attachment.registered)
        assert same(dict(module.state_dict()), dict(twin.state_dict()))
    with torch.no_grad():
        assert torch.equal(module(X, use_cache=False).logits, its.logits)


class Bakes(nn.Module):
    """Reads and writes weights in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Encoder()
        self.tied = nn.Linear(WIDTH, 100, bias=False)
        self.tied.weight = self.inner.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.inner(x))  # type: ignore[no-any-return]


def write(module: Bakes) -> None:
    first, second = module.inner.layers[0], module.inner.layers[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    with torch.no_grad():
        first.weight.mul_(2)
        first.bias.data = first.bias.data + 1
        second.weight.data[0] = float("nan")
        second.bias.numpy()[:] = 3
        module.tied.weight.add_(1)
        module.inner.norm.weight.copy_(torch.arange(WIDTH))


@pytest.fixture
def twins(client: Client) -> Iterator[tuple[Bakes, Bakes, Attachment]]:
    module, twin = seeded(Bakes), seeded(Bakes)
    with client.attach({"dit": module}, ".") as attachment:
        evict(client, "dit")
        yield module, twin, attachment
        evict(client, "dit")
        assert same(dict(module.state_dict()), dict(twin.state_dict()))


def test_in_edit_weights_are_written_to_in_any_way(
    client: Client, twins: tuple[Bakes, Bakes, Attachment]
) -> None:
    module, twin, attachment = twins
    addresses = [p.data_ptr() for p in module.parameters()]
    with attachment.edit():
        write(module)
        with torch.inference_mode():
            mine = module(X)
    write(twin)
    with torch.inference_mode():
        its = twin(X)
        assert same(mine, its), "in the block it computes with what is written by then"
        evict(client, "dit")
        assert same(module(X), its)
    assert [p.data_ptr() for p in module.parameters()] == addresses


def test_who_holds_it_has_the_new_values_after_edit(
    twins: tuple[Bakes, Bakes, Attachment],
) -> None:
    module, twin, attachment = twins
    write(twin)
    with attachment.use("dit"), torch.inference_mode():
        with attachment.edit(module.inner, module.tied):
            write(module)
        assert same(module(X), twin(X))
        assert same(module.tied.weight, twin.tied.weight)


def test_what_was_written_before_it_raises_is_there(
    twins: tuple[Bakes, Bakes, Attachment],
) -> None:
    module, twin, attachment = twins
    write(twin)

    def breaks() -> None:
        write(module)
        raise KeyError

    with attachment.use("dit"), torch.inference_mode():
        with pytest.raises(KeyError), attachment.edit("dit"):
            breaks()
        assert same(module(X), twin(X)), "also for who holds it"


def test_what_changes_shapes_is_refused_by_name(twins: tuple[Bakes, Bakes, Attachment]) -> None:
    module, twin, attachment = twins
    message = r"'inner\.norm\.weight' became \(3,\) of torch\.float32.*part of 'dit'.*detach"

    def resize() -> None:
        write(module)
        module.inner.norm.weight.data = torch.ones(3)

    with pytest.raises(NotWhileAttached, match=message), attachment.edit():
        resize()
    kept = twin.inner.norm.weight.clone()
    write(twin)
    with torch.no_grad():
        twin.inner.norm.weight.copy_(kept)


def test_edits_one_after_the_other_go_on_from_each_other(
    twins: tuple[Bakes, Bakes, Attachment],
) -> None:
    """As for layers merged into one weight: it changes at the end of the outermost edit."""
    module, twin, attachment = twins
    weights = list(vars(module)["_swapd_guard"].weights)
    with edits(weights), torch.no_grad():
        for one in (module.tied, module.inner.embed):
            with attachment.edit(one):
                one.weight.add_(1)
    with torch.no_grad():
        twin.tied.weight.add_(1).add_(1)


def test_nothing_written_is_no_update(client: Client, twins: tuple[Any, Any, Attachment]) -> None:
    updates: list[Any] = []
    client._update_together = updates.append  # type: ignore[method-assign, assignment]
    with twins[2].edit():
        twins[0].tied.weight.sum()
    assert not updates


def test_calls_of_other_threads_wait_for_the_end_of_it(
    twins: tuple[Bakes, Bakes, Attachment],
) -> None:
    module, twin, attachment = twins
    began = threading.Event()

    def call() -> torch.Tensor:
        with torch.inference_mode():
            began.set()
            output: torch.Tensor = module(X)
            return output

    write(twin)
    with ThreadPoolExecutor(1) as pool:
        with attachment.edit():
            write(module)
            output = pool.submit(call)
            began.wait()
        assert same(output.result(), twin(X).detach())


class Layered(nn.Module):
    """6 blocks of 4 MiB; each doubles its weight on demand."""

    class Block(nn.Linear):
        edit: Callable[[], AbstractContextManager[None]] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.edit is not None:
                with self.edit(), torch.no_grad():
                    self.weight.mul_(2)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(1024, 1024, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_in_the_midst_of_what_is_streamed(client: Client) -> None:
    """In a block, called by the model or directly, the block goes on with the new values."""
    module, twin = seeded(Layered), seeded(Layered)
    x = torch.ones(1, 1024)
    with (
        client.attach({"dit": module}, resident=0, blocks=["blocks"]) as attachment,
        torch.inference_mode(),
    ):
        for path in ("blocks.2", ""):
            module.blocks[2].edit = lambda: attachment.edit(module.blocks[2])
            twin.blocks[2].edit = nullcontext
            mine, its = module.get_submodule(path)(x), twin.get_submodule(path)(x)
            assert same(mine, its)
            module.blocks[2].edit = twin.blocks[2].edit = None
            assert same(module(x), twin(x))
        assert not here().counts


# --- adapters ----------------------------------------------------------------------------


def adapted(make: Callable[[], nn.Module]) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(make(), config).eval().requires_grad_(False)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False), nn.ReLU())


Y = torch.ones(2, 64)


def test_adapters_are_merged_and_unmerged_as_they_are_elsewhere(client: Client) -> None:
    module, twin = adapted(layers), adapted(layers)
    with client.attach({"dit": module}, "."), torch.inference_mode():
        for methods in (["merge_adapter"], ["unmerge_adapter", "merge_and_unload"]):
            evict(client, "dit")
            left = [[getattr(one, name)() for name in methods][-1] for one in (module, twin)]
            evict(client, "dit")
            assert same(module(Y), twin(Y))
        assert same(dict(left[0].state_dict()), dict(left[1].state_dict()))


def test_one_adapted_layer_is_merged_by_itself(client: Client) -> None:
    module, twin = adapted(layers), adapted(layers)
    with client.attach({"dit": module}, "."), torch.inference_mode():
        evict(client, "dit")
        for one in (module, twin):
            one.base_model.model[0].merge(safe_merge=True)
        assert same(module(Y), twin(Y))


def dit() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    ).eval()


PICTURE = {
    "hidden_states": torch.ones(1, 4, 8, 8),
    "encoder_hidden_states": torch.ones(1, 3, 16),
    "pooled_projections": torch.ones(1, 16),
    "timestep": torch.tensor([3]),
}


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def test_projections_are_fused(client: Client) -> None:
    """The new fused weights are private until `refresh`."""
    module, twin = built(flux), built(flux)
    inputs = {
        "hidden_states": torch.ones(1, 4, 4),
        "encoder_hidden_states": torch.ones(1, 3, 16),
        "pooled_projections": torch.ones(1, 16),
        "timestep": torch.tensor([3]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    with client.attach({"transformer": module}) as attachment:
        evict(client, *attachment.registered)
        for one in (module, twin):
            one.fuse_qkv_projections()
            one.requires_grad_(False)
        assert module.transformer_blocks[0].attn.to_qkv.weight.numel()
        evict(client, *attachment.registered)
        assert same(module(**inputs).sample, twin(**inputs).sample)


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_lora_is_fused_and_unfused(client: Client, later: bool) -> None:
    """A LoRA of diffusers, added before the model is attached, and after."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    module, twin = built(dit), built(dit)

    def add_adapter() -> None:
        for one in (module, twin):
            torch.manual_seed(1)
            one.add_adapter(config)
            one.requires_grad_(False)

    if not later:
        add_adapter()
    with client.attach({"transformer": module}) as attachment, torch.inference_mode():
        if later:
            with torch.inference_mode(False):
                add_adapter()
        for method in ("fuse_lora", "unfuse_lora", "fuse_lora"):
            evict(client, *attachment.registered)
            for one in (module, twin):
                getattr(one, method)()
            evict(client, *attachment.registered)
            assert same(module(**PICTURE).sample, twin(**PICTURE).sample)


# --- refused -----------------------------------------------------------------------------


def test_embeddings_of_another_size_are_refused_before_anything_is_changed(client: Client) -> None:
    module, twin = built(rwkv), built(rwkv)
    with client.attach({"text": module}, ".", prefix="m"):
        evict(client, "m.text")
        with pytest.raises(NotWhileAttached, match=r"resize_token_embeddings\(70\) on a Rwkv"):
            module.resize_token_embeddings(70)
        assert module.resize_token_embeddings(64).num_embeddings == 64
        assert module.get_input_embeddings().num_embeddings == 64
        assert same(dict(module.state_dict()), dict(twin.state_dict()))
    assert module.resize_token_embeddings(70).num_embeddings == 70


def test_what_nobody_can_foresee_is_explained_before_the_process_dies(daemon: Daemon) -> None:
    said = output_of(Path(__file__).parent / "programs" / "tools_outside.py", daemon.folder)
    *each, _ = said.split(f"status {-signal.SIGSEGV}\n")
    assert len(each) == 3, said
    for one in each:
        assert "a fault in component 'child'" in one
        assert "attachment.edit" in one
        assert "before attach()" in one
