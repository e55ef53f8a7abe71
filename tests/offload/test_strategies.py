"""Each setting keeps its promise on the device, and sets the policy of each component."""

from typing import Any

import pytest
import torch

from swapd_client import Client
from swapd_client.offload.settings import OffloadSettings
from swapd_client.offload.strategy import Kind, Sharing, kind_of, of_settings
from tests.offload.modules import TOKENS, Encoder, Model, computed, seeded


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformer", "dit"),
        ("model.transformer_2", "dit"),
        ("unet", "dit"),
        ("text_encoder", "encoder"),
        ("text_encoder_4", "encoder"),
        ("image_encoder", "encoder"),
        ("vae", "vae"),
        ("thinker", ""),
        ("encoder", ""),
    ],
)
def test_a_component_is_what_its_name_says(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_what_is_worth_streaming_is_the_dit_or_the_decoder_or_all() -> None:
    streamed = OffloadSettings(enable_layerwise_offload=True)
    of_omni = of_settings({"thinker": 4, "vae": 1}, streamed)
    assert of_omni == {"thinker": Sharing(streamed=True), "vae": Sharing("permanent")}
    assert of_settings({"vae": 1}, streamed) == {"vae": Sharing(streamed=True)}


# --- on the device -----------------------------------------------------------------------


#: The states of a released component until the daemon knows, and this process has unmapped it.
ON_THEIR_WAY = {"leased", "loading", "revoking"}


def states(client: Client) -> dict[str, str]:
    """The state of each component, once none is in transfer."""
    while True:
        found = {c.name: c.state for c in client.status().components}
        if not ON_THEIR_WAY & set(found.values()):
            return found


def used(client: Client, model: Model) -> list[dict[str, str]]:
    """The states after each step of two rounds."""
    seen = []
    with torch.inference_mode():
        for _ in range(2):
            x = model.text_encoder(TOKENS)
            seen.append(states(client))
            x = model.transformer(x)
            seen.append(states(client))
            model.vae.decode(x)
            seen.append(states(client))
    return seen


def test_alternating_one_in_means_the_others_out_and_it_stays(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    order = ["text_encoder", "transformer", "vae"] * 2
    with client.attach(model, cpu_offload_enabled=True):
        for seen, name in zip(used(client, model), order, strict=True):
            assert [n for n, state in seen.items() if state == "idle"] == [name]
        assert torch.equal(model(TOKENS), expected)
        assert client.status().bytes_out == 0


def test_sequential_loads_on_demand_and_drops_after_use(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    with client.attach(model, cpu_offload_enabled=True, cpu_offload_strategy="sequential"):
        for seen in used(client, model):
            assert set(seen.values()) == {"absent"}
        assert torch.equal(model(TOKENS), expected)


def test_dit_and_encoders_exclude_each_other_and_the_vae_stays(client: Client) -> None:
    first, second = seeded(Model), Encoder()
    parts = {
        "text_encoder": first.text_encoder,
        "text_encoder_2": second,
        "transformer": first.transformer,
        "vae": first.vae,
    }
    with client.attach(parts, enable_cpu_offload=True), torch.inference_mode():
        first.vae.decode(torch.ones(1, 256))
        for _ in range(2):
            x = first.text_encoder(TOKENS)
            second(TOKENS)
            assert states(client) == {
                "text_encoder": "idle",
                "text_encoder_2": "idle",
                "transformer": "absent",
                "vae": "resident",
            }
            first.transformer(x)
            assert states(client) == {
                "text_encoder": "absent",
                "text_encoder_2": "absent",
                "transformer": "idle",
                "vae": "resident",
            }


def test_one_encoder_alone_is_no_stream_of_its_family(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    with client.attach(model, enable_cpu_offload=True) as attachment:
        assert "streamed" not in str(attachment)
        assert torch.equal(model(TOKENS), expected)


def test_nested_components_never_exclude_each_other(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    with client.attach(
        model, ["transformer", "text_encoder", "text_encoder.embed"], cpu_offload_enabled=True
    ):
        policies = {c.name: c.policy for c in client.status().components}
        assert policies == {
            "transformer": "alternating",
            "text_encoder": "lru",
            "text_encoder.embed": "lru",
        }
        assert torch.equal(model(TOKENS), expected)


def test_a_policy_is_for_all_components(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model, policy="permanent"):
        assert {c.policy for c in client.status().components} == {"permanent"}
    with client.attach(model, policy="alternating"):
        assert len({c.group for c in client.status().components}) == 1
        assert {c.policy for c in client.status().components} == {"alternating"}


@pytest.mark.parametrize("given", [{}, {"stay": ["vae"]}, {"resident": 0}])
def test_settings_in_which_nothing_is_on_attach_nothing(
    client: Client, given: dict[str, Any]
) -> None:
    model = seeded(Model)
    with client.attach(model, settings=OffloadSettings(), **given) as attachment:
        assert not client.status().components
        assert "no setting" in str(attachment)
        assert "_call_impl" not in vars(model.vae)


def test_settings_name_the_components_unless_the_call_does(client: Client) -> None:
    model = seeded(Model)
    settings = OffloadSettings(cpu_offload_enabled=True, cpu_offload_components=("vae",))
    with client.attach(model, settings=settings) as attachment:
        assert list(attachment.components) == ["vae"]
    with client.attach(model, ["transformer"], settings=settings) as attachment:
        assert list(attachment.components) == ["transformer"]


def test_what_a_component_is_may_be_said_where_its_name_does_not(client: Client) -> None:
    settings = OffloadSettings(enable_cpu_offload=True)
    kinds: dict[str, Kind] = {"core": "dit", "mllm": "encoder"}
    model = torch.nn.ModuleDict({"core": torch.nn.Linear(4, 4), "mllm": torch.nn.Linear(4, 4)})
    with client.attach(model, ["core", "mllm"], settings=settings, kinds=kinds):
        there = {c.name: c for c in client.status().components}
        assert there["core"].group == there["mllm"].group is not None
        assert {c.policy for c in there.values()} == {"alternating"}


def test_those_that_are_to_stay_are_not_evicted_whatever_is_said_of_the_others(
    client: Client,
) -> None:
    model = seeded(Model)
    settings = OffloadSettings(cpu_offload_enabled=True, cpu_offload_strategy="sequential")
    with client.attach(model, ["transformer", "vae"], settings=settings, stay=["vae"]):
        assert {c.name: c.policy for c in client.status().components} == {
            "transformer": "sequential",
            "vae": "permanent",
        }
