"""Functions of torch and PEFT that read or write weights do so on attached models, as elsewhere."""

import copy
import gc
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import peft
import peft.utils.hotswap
import pytest
import torch
from torch import nn
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel

from swapd_client import Client, NotWhileAttached, finalizers
from swapd_client.offload import tools
from tests.interrupts import interrupt, interrupts, places
from tests.offload.modules import evict
from tests.offload.twins import same
from tests.threads import started

#: torch deprecates functions that models still use.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")

X = torch.ones(2, 8, 4)


@pytest.fixture(autouse=True)
def _nothing_attached() -> None:
    """The models of other tests are gone, or the functions would be replaced already."""
    gc.collect()
    finalizers.settle()


class Layers(nn.Module):
    """One layer of each kind that the tools are for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.normed = nn.utils.weight_norm(nn.Conv1d(8, 8, 1))
        self.spectral = nn.utils.spectral_norm(nn.Conv1d(8, 8, 1))
        self.parametrized = parametrizations.weight_norm(nn.Conv1d(8, 8, 1))
        self.single = parametrizations.spectral_norm(nn.Conv1d(8, 8, 1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embed(x)))  # type: ignore[no-any-return]


def made(make: Callable[[], Any] = Layers) -> Any:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def pruned(model: Layers) -> None:
    prune.l1_unstructured(model.linear, "weight", 0.5)  # type: ignore[no-untyped-call]
    prune.random_structured(model.conv, "weight", 0.5, dim=0)  # type: ignore[no-untyped-call]
    prune.remove(model.conv, "weight")  # type: ignore[no-untyped-call]
    prune.global_unstructured(
        [(model.normed, "bias"), (model.single, "bias")], prune.L1Unstructured, amount=0.5
    )


def fused(model: Layers) -> None:
    model.conv = fusion.fuse_conv_bn_eval(model.conv, model.norm)
    model.norm = nn.Identity()  # type: ignore[assignment]


def initialised(model: Layers) -> None:
    nn.init.trunc_normal_(model.linear.bias)
    nn.init.kaiming_uniform_(tensor=model.conv.weight)
    model.linear.reset_parameters()


def unnormed(model: Layers) -> None:
    nn.utils.remove_weight_norm(model.normed)
    nn.utils.remove_spectral_norm(model.spectral)


def unparametrized(model: Layers) -> None:
    parametrize.remove_parametrizations(model.parametrized, "weight")
    parametrize.remove_parametrizations(model.single, "weight")


def newly_normed(model: Layers) -> None:
    nn.utils.weight_norm(model.conv)
    nn.utils.spectral_norm(model.linear)


def parametrized(model: Layers) -> None:
    parametrizations.weight_norm(model.conv)
    parametrizations.spectral_norm(model.linear)  # its original is the weight itself


@pytest.mark.parametrize(
    "tool", [pruned, fused, initialised, unnormed, unparametrized, newly_normed, parametrized]
)
@pytest.mark.parametrize("again", [False, True], ids=["at once", "refreshed"])
def test_a_tool_leaves_the_model_that_it_would_leave_elsewhere(
    client: Client, tool: Callable[[Layers], None], again: bool
) -> None:
    model, twin = made(), made()
    with client.attach({"dit": model}) as attachment, torch.no_grad():
        evict(client, "dit")
        for one in (model, twin):
            torch.manual_seed(1)
            tool(one)
        if again:
            attachment.refresh()
        evict(client, *attachment.registered)
        with torch.inference_mode():
            assert same(model(X), twin(X))
        assert same(dict(model.state_dict()), dict(twin.state_dict()))
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


def test_parametrizations_of_weights_that_require_gradients_are_removed(client: Client) -> None:
    """In grad mode torch calls a parametrization to see whether its result requires gradients."""
    torch.manual_seed(0)
    model, x = Layers().eval(), X
    with torch.no_grad():
        expected = model(x)
    with client.attach({"dit": model}):
        evict(client, "dit")
        unparametrized(model)
        evict(client, "dit")
        with torch.no_grad():
            assert torch.allclose(model(x), expected)
        assert model.parametrized.weight.requires_grad


def test_weights_are_averaged_and_copied_one_by_one(client: Client) -> None:
    model, twin = made(Plain), made(Plain)
    with client.attach({"dit": model}):
        evict(client, "dit")
        averaged, its = AveragedModel(model), AveragedModel(twin)
        for _ in range(2):
            averaged.update_parameters(model)
            its.update_parameters(twin)
        assert same(dict(averaged.state_dict()), dict(its.state_dict()))
        weight = model.first.weight
        copies: list[Any] = copy.deepcopy([weight, weight, weight[1:]])
        assert copies[0] is copies[1]
        assert type(copies[0]) is nn.Parameter
        assert same(copies[0], twin.first.weight)
        assert same(copies[2], twin.first.weight[1:])


def test_an_ensemble_is_stacked_of_attached_models(client: Client) -> None:
    models, twins = [made(Plain), made(Plain)], [made(Plain), made(Plain)]
    with client.attach({"a": models[0], "b": models[1]}):
        evict(client, "a", "b")
        stacked, _ = torch.func.stack_module_state(models)
    assert same(stacked, torch.func.stack_module_state(twins)[0])


def test_a_tool_that_changes_a_shape_is_refused_by_name(client: Client) -> None:
    model = made()

    class Shorter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[1:]

    with client.attach({"dit": model}):
        evict(client, "dit")
        parametrize.register_parametrization(model.linear, "weight", Shorter(), unsafe=True)
        with pytest.raises(NotWhileAttached, match=r"'parametrizations\.weight\.original'"):
            parametrize.remove_parametrizations(model.linear, "weight")
        with pytest.raises(NotWhileAttached, match=r"a view of weights of 'dit'.*edit"):
            nn.init.zeros_(model.conv.weight[0])


# --- adapters ----------------------------------------------------------------------------


TOKENS = torch.arange(8)


def config(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["first", "second"], **options)


@pytest.mark.parametrize(
    "options",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}, {}],
    ids=["pissa", "olora", "dora", "plain"],
)
def test_adapters_made_from_the_weights_are_added_and_merged(
    client: Client, options: dict[str, Any]
) -> None:
    model, twin = made(Plain), made(Plain)
    updates: list[Any] = []
    update = client._update_together
    client._update_together = lambda named: (updates.append(named), update(named))  # type: ignore[method-assign, func-returns-value, assignment]
    with client.attach({"dit": model}) as attachment, torch.no_grad():
        evict(client, "dit")
        adapted = []
        for one in (model, twin):
            torch.manual_seed(1)
            adapted.append(peft.get_peft_model(one, config(**options)).eval())
        evict(client, "dit")
        assert len(updates) == ("init_lora_weights" in options), "all layers in one update"
        with torch.inference_mode():
            assert same(adapted[0](TOKENS), adapted[1](TOKENS))
        attachment.refresh()
        for method in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
            evict(client, *attachment.registered)
            for one in adapted:
                getattr(one, method)()
            evict(client, *attachment.registered)
            with torch.inference_mode():
                assert same(model(TOKENS), twin(TOKENS))


def test_adapters_are_swapped_in_place(client: Client, tmp_path: Any) -> None:
    torch.manual_seed(2)
    other = peft.get_peft_model(Plain(), config(init_lora_weights=False))
    other.save_pretrained(tmp_path)
    adapted = []
    for _ in range(2):
        plain = made(Plain)
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(plain, config()).eval().requires_grad_(False))
    with client.attach({"dit": adapted[0]}), torch.no_grad():
        evict(client, "dit")
        for one in adapted:
            peft.utils.hotswap.hotswap_adapter(one, tmp_path, "default")
        evict(client, "dit")
        with torch.inference_mode():
            assert same(adapted[0](TOKENS), adapted[1](TOKENS))


# --- around them -------------------------------------------------------------------------


def replaced() -> list[Any]:
    return [nn.init.zeros_, nn.Parameter.__deepcopy__, peft.tuners.lora.Linear.merge]


def test_they_are_torchs_own_again_after_the_last_detach(client: Client) -> None:
    before = replaced()
    first, second = client.attach({"a": made()}), client.attach({"b": made()})
    assert all(now is not then for now, then in zip(replaced(), before, strict=True))
    first.detach()
    first.detach()
    assert all(now is not then for now, then in zip(replaced(), before, strict=True))
    second.detach()
    assert replaced() == before
    client.attach({"a": made()})
    gc.collect()
    finalizers.settle()
    assert replaced() == before


def test_a_library_that_is_imported_later_is_covered_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: Any = ModuleType("late")
    late.zero = lambda tensor: tensor.data.zero_()
    more = {("late", ""): {"zero": tools._write}, ("late", "OfAnotherVersion"): {"*": tools._write}}
    monkeypatch.setattr(tools, "TOOLS", {**tools.TOOLS, **more})
    model = made()
    with client.attach({"dit": model}), torch.inference_mode():
        evict(client, "dit")
        monkeypatch.setitem(sys.modules, "late", late)
        nn.Linear(1, 1)  # any module that is made
        late.zero(model.linear.weight)
        assert not dict(model.state_dict())["linear.weight"].any()


def test_after_an_interrupt_no_function_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TOOLS", {("torch.nn.init", ""): {"zeros_": tools._write}})

    def watched() -> tuple[object, int]:
        return nn.init.zeros_, len(_global_optimizer_pre_hooks)

    before = watched()
    with interrupts():
        found = places(tools.watch, 10**6)
        tools.rest()
        for place in found:
            interrupt(tools.watch, place)
            tools.rest()
            assert watched() == before, place


def test_private_tensors_wait_for_nobody(client: Client) -> None:
    """While another thread is in a call that waits for this one."""
    model, waits, goes = made(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        waits.set()
        assert goes.wait(60)

    with client.attach({"dit": model}, resident=0, blocks=["conv", "linear"]):
        handle = model.norm.register_forward_hook(wait)
        thread = started(torch.inference_mode()(model), X)
        waits.wait()
        nn.init.zeros_(nn.Linear(2, 2).weight)
        assert same(copy.deepcopy(model.linear.weight), made().linear.weight)
        goes.set()
        thread.join()
        handle.remove()
