"""One call finds a model's components, registers them, and holds each during its calls."""

import copy
import gc
import logging
import re
import tracemalloc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import (
    Client,
    ClientClosed,
    DuplicateName,
    InUse,
    InvalidSource,
    SwapdError,
)
from swapd_client.offload.installation import Installer
from swapd_client.offload.settings import OffloadSettings
from tests.offload.modules import (
    TOKENS,
    Decoder,
    Encoder,
    Model,
    Pipeline,
    assert_comes_back,
    computed,
    evict,
    leases,
    seeded,
)
from tests.threads import started


def names(client: Client) -> set[str]:
    return {c.name for c in client.status().components}


def test_components_are_found_by_the_usual_names(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = computed(TOKENS, Model)
    with caplog.at_level(logging.INFO, "swapd_client"), client.attach(model) as attachment:
        assert names(client) == {"text_encoder", "transformer", "vae"}
        assert list(attachment.components) == ["text_encoder", "transformer", "vae"]
        for _ in range(3):
            assert_comes_back(client, model, TOKENS, expected, "text_encoder", "transformer", "vae")
    (line,) = [r.getMessage() for r in caplog.records if "attached" in r.getMessage()]
    assert "text_encoder (" in line
    assert "144 B of other parameters stay where they are" in line
    assert names(client) == set()
    assert torch.equal(model(TOKENS), expected)


def test_a_model_in_which_nothing_has_a_usual_name_is_one_component(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = computed(TOKENS, Encoder)
    caplog.set_level(logging.INFO, "swapd_client")
    with client.attach(model, prefix="whisper") as one:
        assert names(client) == {"whisper"}
        with one.use("whisper"):  # as the daemon calls it
            assert leases(client) == {"whisper": 1}
        assert_comes_back(client, model, TOKENS, expected, "whisper")
    assert "no module has a usual name" in caplog.text


def test_components_of_a_pipeline_and_of_a_dict_are_found(client: Client) -> None:
    model = seeded(Model)
    pipeline = Pipeline(vae=model.vae, text_encoder=model.text_encoder, scheduler=object())
    with client.attach(pipeline, prefix="flux"):
        assert names(client) == {"flux.vae", "flux.text_encoder"}
    with client.attach({"a": model.transformer, "b": model.head}, ["a"]):
        assert names(client) == {"a"}
    with client.attach({"a": model.transformer, "b": model.head}, "."):
        assert names(client) == {"a", "b"}


def test_a_pattern_takes_the_outermost_and_a_list_stands_for_what_is_in_it(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    with client.attach(model, ["text_encoder.*"]) as attachment:
        assert set(attachment.components) == {
            "text_encoder.embed",
            "text_encoder.norm",
            "text_encoder.layers.0",
            "text_encoder.layers.1",
        }
        assert_comes_back(client, model, TOKENS, expected, *attachment.components)


def test_a_usual_name_is_found_wherever_it_is(client: Client) -> None:
    model = nn.ModuleDict({"model": nn.ModuleDict({"visual": Encoder(), "layers": Encoder()})})
    for given, found in (
        ("visual", {"model.visual"}),
        ("visual.layers.*", {"model.visual.layers.0", "model.visual.layers.1"}),
    ):
        with client.attach(model, [given]):
            assert names(client) == found
    with pytest.raises(InvalidSource, match="'layers'"):
        client.attach(model, ["layers"])
    assert names(client) == set()


def test_a_name_that_matches_nothing_is_an_error_that_lists_what_there_is(client: Client) -> None:
    with pytest.raises(InvalidSource, match=r"'thinker'.*text_encoder, transformer"):
        client.attach(seeded(Model), ["thinker"])
    with pytest.raises(InvalidSource, match="cannot attach to a str"):
        client.attach("model")
    with pytest.raises(InvalidSource, match="'a' is a int"):
        client.attach({"a": 1})
    with pytest.raises(InvalidSource, match="no module in this dict"):
        client.attach({})
    with pytest.raises(InvalidSource, match="the name of a module is 1"):
        client.attach({1: nn.Linear(2, 2)})


def test_a_second_model_of_the_same_names_is_told_of_prefix(client: Client) -> None:
    first, second = seeded(Model), seeded(Model)
    with client.attach(first):
        with pytest.raises(DuplicateName, match="prefix="):
            client.attach(second, ["vae"])
        with client.attach(second, prefix="second"):
            assert "second.vae" in names(client)
            assert torch.equal(first(TOKENS), second(TOKENS))


def test_what_is_attached_is_not_attached_again(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model, ["vae"]):
        with pytest.raises(InvalidSource, match=r"'vae' .*refresh\(\)"):
            client.attach(model, prefix="again")
        with client.attach(model, ["transformer"]):
            assert names(client) == {"vae", "transformer"}
    with client.attach(model):
        model(TOKENS)


def test_all_of_it_is_attached_or_nothing(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    client.register("vae", {"x": b"taken"})
    with pytest.raises(DuplicateName):
        client.attach(model)
    assert names(client) == {"vae"}
    assert torch.equal(model(TOKENS), expected)
    assert not any("_call_impl" in vars(m) for m in model.modules())


def test_detach_puts_everything_back_and_may_be_said_twice(client: Client) -> None:
    model = seeded(Model)
    model.vae.extra = "mine"
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    expected = model(TOKENS)
    attachment = client.attach(model)
    model(TOKENS)
    attachment.detach()
    attachment.detach()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not any("_call_impl" in vars(m) for m in model.modules())
    assert model.vae.decode.__func__ is Decoder.decode
    assert not client.attachments
    assert names(client) == set()
    model.head.weight.add_(0)
    for parameter in model.parameters():
        parameter.add_(1).sub_(1)  # writable, at any residency
    assert torch.allclose(model(TOKENS), expected, atol=1e-3)


def test_detach_of_what_is_in_use_leaves_all_of_it_attached(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    with client.attach(model) as attachment:
        with attachment.use("text_encoder"), pytest.raises(InUse, match="text_encoder"):
            attachment.detach()
        assert names(client) == {"text_encoder", "transformer", "vae"}
        assert torch.equal(model(TOKENS), expected)


def test_what_was_unregistered_by_hand_is_detached_all_the_same(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    attachment = client.attach(model)
    client.unregister("transformer")
    assert_comes_back(client, model, TOKENS, expected, "text_encoder", "vae")
    attachment.detach()
    assert names(client) == set()
    assert torch.equal(model(TOKENS), expected)


def test_what_was_registered_before_is_so_after_detach_and_that_is_said(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = computed(TOKENS, Model)
    client.register("mine", model.vae)
    attachment = client.attach(model)
    for _ in range(2):
        attachment.detach()
        assert names(client) == {"mine"}
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "under a lease only: mine. client.unregister" in said
    client.unregister("mine")
    assert torch.equal(model(TOKENS), expected)


def test_a_model_that_was_detached_is_not_kept(client: Client) -> None:
    model = seeded(Model)
    client.attach(model).detach()
    gone = weakref.ref(model.transformer)
    del model
    gc.collect()
    assert gone() is None


def test_a_client_that_is_closed_takes_its_hooks_along(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    attachment = client.attach(model)
    client.close()
    assert torch.equal(model(TOKENS), expected)
    assert not any("_call_impl" in vars(m) for m in model.modules())
    attachment.detach()


@pytest.mark.parametrize("after_its_hooks", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_client_that_is_closed_while_it_attaches_leaves_no_hooks(
    client: Client, monkeypatch: pytest.MonkeyPatch, again: bool, after_its_hooks: bool
) -> None:
    model, expected = computed(TOKENS, Model)
    attach: Any = partial(client.attach, model, stay=["vae"])
    if again:
        attach = attach().refresh

    def installer(*arguments: Any) -> Installer:
        started(client.close).join()
        return Installer(*arguments)

    if after_its_hooks:
        monkeypatch.setattr(client, "forecast", lambda *_: started(client.close).join())
    else:
        monkeypatch.setattr("swapd_client.offload.attach.Installer", installer)
    with pytest.raises(ClientClosed):
        attach()
    assert torch.equal(model(TOKENS), expected)
    assert not any("_call_impl" in vars(m) for m in model.modules())


def test_a_client_may_be_closed_while_its_model_is_detached(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    attachment = client.attach(model)

    def close_once() -> None:
        if not client.session.closed:
            started(client.close).join()

    attachment.to_undo(close_once)
    attachment.detach()
    assert torch.equal(model(TOKENS), expected)
    assert not any("_call_impl" in vars(m) for m in model.modules())


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vae = nn.Identity()
        self.dit = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dit(self.vae(x))  # type: ignore[no-any-return]


def test_a_component_without_parameters_is_free(client: Client) -> None:
    """Nothing is registered for it, and its calls send no request."""
    model = seeded(Nothing)
    with client.attach(model) as attachment:
        assert names(client) == {"dit"}
        assert attachment.components["vae"].nbytes == 0
        assert "_call_impl" not in vars(model.vae)
        with attachment.use("vae"):
            assert not client.session.leases
        model(torch.ones(2, 8))


def test_attached_components_are_updated_by_their_own_state_dicts(client: Client) -> None:
    model, other = seeded(Model), Model().requires_grad_(False)
    expected = other(TOKENS)
    with client.attach(model):
        for name in ("text_encoder", "transformer", "vae"):
            client.update(name, getattr(other, name).state_dict())
        model.head.load_state_dict(other.head.state_dict())
        assert torch.equal(model(TOKENS), expected)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "mru"}, "no policy 'mru'; there are: lru, permanent, "),
        ({"policy": "permanent", "enable_cpu_offload": True}, "policy='permanent' and settings"),
        ({"resident": "5 parsecs"}, "resident: '5 parsecs' is not a size"),
        ({"resident": -1}, "resident: -1 is no size"),
        ({"resident": {"vae": 0.5}}, "resident: 0.5 is no size"),
        ({"resident": True}, "resident: True is no size"),
        ({"resident": {"vae": 0}, "stay": ["vae"]}, "resident: 'vae' is in stay="),
        ({"components": ["vae"], "blocks": "out", "stay": "vae"}, "blocks: 'vae' is in stay="),
        ({"components": []}, "components is empty; leave it out to attach all"),
        ({"kinds": {"vae": "VAE"}}, "kinds: 'VAE', of 'vae', is none; there are: dit, "),
        ({"kinds": {"unet": "dit"}}, "kinds: no component is called 'unet'; there are: text"),
        ({"stay": ["unet"]}, "stay: no component is called 'unet'"),
        ({"resident": {"unet": 0}}, "resident: no component is called 'unet'"),
        ({"settings": OffloadSettings(), "cpu_offload_gb": 1}, "give all in one or the other"),
        ({"cpu_offload_enable": True}, "did you mean cpu_offload_enabled"),
        ({"wrap_methods": ["decod"]}, "wrap_methods: no component has a method 'decod'"),
        ({"wrap_methods": {"vae": ["decod"]}}, "wrap_methods: 'vae' has no method 'decod'"),
        ({"wrap_methods": {"vae": "conv"}}, "wrap_methods: 'vae' has no method 'conv'"),
        ({"wrap_methods": {"unet": ["decode"]}}, "wrap_methods: no component is called 'unet'"),
        ({"blocks": "layers"}, "blocks names 'layers', and Sequential"),
        ({"extra_tensors": "window"}, "nothing is called 'window'"),
    ],
)
def test_what_makes_no_sense_is_refused_and_attaches_nothing(
    client: Client, given: dict[str, Any], said: str
) -> None:
    model = seeded(Model)
    with pytest.raises(SwapdError, match=re.escape(said)):
        client.attach(model, **given)
    assert names(client) == set()
    model(TOKENS)


@pytest.mark.parametrize(
    "methods", ["_decode", ["_decode"], {"vae": "_decode"}, {"vae": ["_decode"]}]
)
def test_one_name_may_be_given_as_such(client: Client, methods: Any) -> None:
    model = seeded(Model)
    blocks: Any = {"text_encoder": "layers"}
    with client.attach(model, wrap_methods=methods, blocks=blocks) as attachment:
        assert "streamed in 1 block" in str(attachment)
        evict(client, "vae")
        model.vae._decode(torch.ones(1, 256))


class Reads(nn.Module):
    """Reads the contents of lists and dicts of parameters, without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(256), torch.randn(256, 256)])
        self.named = nn.ParameterDict({"shift": torch.randn(256)})
        self.deep = nn.ModuleList([nn.ParameterList([torch.randn(256)])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.scales[0]) @ self.scales[1]
        return x + self.named["shift"] + self.deep[0][0]  # type: ignore[index, no-any-return]


def test_lists_and_dicts_of_parameters_go_with_the_module_that_reads_them(client: Client) -> None:
    model, x = seeded(Reads), torch.ones(1, 256)
    expected = model(x)
    with client.attach({"dit": model}):
        assert_comes_back(client, model, x, expected, "dit")
        evict(client, "dit")
        state = model.state_dict()
        assert list(state) == ["scales.0", "scales.1", "named.shift", "deep.0.0"]
        assert torch.equal(copy.deepcopy(model)(x), expected)
        model.load_state_dict({name: value * 0 for name, value in state.items()})
        assert not model(x).any()


def test_lists_that_nobody_calls_are_refused_by_name_and_those_of_modules_stand_for_them(
    client: Client,
) -> None:
    for model, components, said in (
        (seeded(Reads), ["scales"], "'scales' is a ParameterList, which nobody calls"),
        (seeded(Reads), ["nam*"], "'named' is a ParameterDict, which nobody calls"),
        (seeded(Reads).scales, None, "this is a ParameterList, which nobody calls"),
    ):
        with pytest.raises(InvalidSource, match=said):
            client.attach(model, components)
    layers = nn.ModuleList(seeded(nn.Linear, 256, 256) for _ in range(2))
    x = torch.ones(1, 256)
    expected = layers[1](layers[0](x))
    with client.attach(layers) as attachment:
        assert list(attachment.components) == ["0", "1"]
        evict(client, "0", "1")
        assert torch.equal(layers[1](layers[0](x)), expected)


def test_attaching_and_detaching_again_and_again_keeps_nothing(client: Client) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)]).requires_grad_(False)

    def attach(times: int) -> None:
        for _ in range(times):
            client.attach({"a": model}).detach()
        gc.collect()

    attach(5)
    tracemalloc.start()
    attach(5)
    before, _ = tracemalloc.get_traced_memory()
    attach(10)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 10 * 100 * 100, "bytes of ten attachments of a hundred tensors"
