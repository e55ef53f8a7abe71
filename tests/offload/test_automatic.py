"""Components that `attach` finds without names: by names, configs and sizes; and the rest."""

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from swapd_client.offload.automatic import parts_of
from swapd_client.offload.private import staying
from tests.offload.modules import TOKENS, Decoder, Encoder, Model, Pipeline, evict, seeded


def layers(width: int, model_type: str = "", **children: nn.Module) -> nn.Module:
    """A module of 16 times `width` bytes, optionally with more children, and with a config."""
    module = nn.Sequential(nn.Linear(4, width, bias=False), nn.Identity())
    for name, child in children.items():
        module.add_module(name, child)
    if model_type:
        module.config = SimpleNamespace(model_type=model_type)  # type: ignore[assignment]
    return module


def around(model_type: str = "", **children: nn.Module) -> nn.Module:
    """A module of children alone."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    if model_type:
        module.config = SimpleNamespace(model_type=model_type)  # type: ignore[assignment]
    return module


def found(module: nn.Module) -> list[str]:
    return list(parts_of(module))


def test_the_outermost_of_the_usual_names_are_parts_wherever_they_are() -> None:
    inner = around(thinker=layers(8, visual=layers(8)), talker=layers(8))
    assert found(around(model=inner)) == ["model.thinker", "model.talker"]


def test_what_has_a_config_of_another_kind_is_a_part_and_a_half_of_a_model_is_none() -> None:
    bark = around("bark", semantic=layers(8, "gpt"), fine=layers(8, "gpt"), head=layers(1))
    assert found(bark) == ["semantic", "fine"]
    t5 = around("t5", shared=layers(2), encoder=layers(8, "t5"), decoder=layers(8, "t5"))
    assert found(t5) == []
    assert found(around("whisper", model=around(encoder=layers(8), decoder=layers(8)))) == []


def test_a_wrapper_around_a_model_is_looked_into() -> None:
    llava = around("llava", vision_tower=layers(2, "clip"), language_model=layers(8, "llama"))
    paths = ["base.model.vision_tower", "base.model.language_model"]
    assert found(around(base=around(model=llava))) == paths


def test_names_in_a_part_and_in_a_list_of_blocks_say_nothing() -> None:
    sam = around("sam", vision_encoder=layers(200, "v"), mask_decoder=around(transformer=layers(8)))
    assert found(sam) == ["vision_encoder", "mask_decoder"]
    sam.vision_encoder = layers(2000, "v")  # now the other is too small, and so are modules in it
    assert found(sam) == []
    blocks = nn.ModuleList(around(transformer=layers(8), fusion=layers(8)) for _ in range(2))
    assert found(around(encoder=around(layer=blocks))) == []


def test_a_model_is_one_where_names_leave_much_of_it() -> None:
    git = around("git", image_encoder=layers(4), embeddings=layers(4), encoder=layers(4))
    assert found(git) == []
    idefics = around("idefics", vision_model=layers(1, "vision"), layers=layers(20))
    assert found(idefics) == []
    blocks = nn.ModuleList(layers(2) for _ in range(8))
    assert found(around(vae=layers(2), blocks=blocks)) == []
    assert found(around(vae=layers(2), dit=layers(20), blocks=blocks)) == ["vae", "dit"]


def test_the_largest_are_parts_where_neither_names_nor_configs_say_anything() -> None:
    model = around(text_encoder=layers(4), planner=layers(4), painter=layers(4))
    model.add_module("head", nn.Linear(4, 2))  # a single layer stays with the module around it
    assert found(model) == ["text_encoder", "planner", "painter"]


def test_what_is_tied_is_in_a_part_if_any_of_its_users_is() -> None:
    tower, language_model = layers(1), layers(8)
    head = nn.Linear(4, 8, bias=False)
    head.weight = language_model[0].weight  # type: ignore[index]
    model = around("m", lm_head=head, model=around(visual=tower, language_model=language_model))
    assert found(model) == ["model.visual", "model.language_model"]


def test_a_lesser_name_alone_takes_nothing_apart() -> None:
    assert found(around("clip", text_model=layers(8), projection=layers(1))) == []
    assert found(around("gpt2", transformer=layers(8), score=layers(1))) == ["transformer"]


@pytest.mark.parametrize(
    ("module", "name", "parts"),
    [
        ("sam", "SamModel", ["vision_encoder", "mask_decoder"]),
        (
            "musicgen",
            "MusicgenForConditionalGeneration",
            ["text_encoder", "audio_encoder", "decoder"],
        ),
        (
            "gemma3",
            "Gemma3ForConditionalGeneration",
            ["model.vision_tower", "model.language_model"],
        ),
        ("t5", "T5ForConditionalGeneration", []),
    ],
)
def test_models_of_transformers_come_apart_where_they_run_in_turns(
    module: str, name: str, parts: list[str]
) -> None:
    from transformers.initialization import no_init_weights

    kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    with torch.device("meta"), no_init_weights():
        model = kind(kind.config_class())
    model.tie_weights()
    assert found(model) == parts


# --- attached ----------------------------------------------------------------------------


def pipeline() -> Pipeline:
    return Pipeline(
        text_encoder=seeded(Encoder),
        unet=seeded(Encoder),
        controlnet=seeded(Encoder),
        safety_checker=seeded(Decoder),
        vae=seeded(Decoder),
        scheduler=object(),
    )


def test_whatever_is_in_a_pipeline_is_a_component(client: Client) -> None:
    model = pipeline()
    with client.attach(model) as attachment, torch.inference_mode():
        parts = ["text_encoder", "unet", "controlnet", "safety_checker", "vae"]
        assert list(attachment.components) == parts
        evict(client, *parts)
        assert "stay" not in str(attachment)
        model.components["controlnet"](TOKENS)


def test_a_pipeline_around_a_model_is_its_model(client: Client) -> None:
    model = seeded(Model)
    with client.attach(SimpleNamespace(model=model, tokenizer=object())) as attachment:
        assert list(attachment.components) == ["text_encoder", "transformer", "vae"]
    speech = SimpleNamespace(model=seeded(Encoder), vocoder=seeded(Decoder), device="cpu")
    with client.attach(speech) as attachment:
        assert list(attachment.components) == ["model", "vocoder"]


def test_what_runs_at_each_step_of_a_dit_does_not_take_turns_with_it(client: Client) -> None:
    for named, exclusive in ((None, False), (["unet", "controlnet"], True)):
        with client.attach(pipeline(), named, cpu_offload_enabled=True):
            groups = {c.name: c.group for c in client.status().components}
            assert groups["unet"] is not None
            assert (groups["controlnet"] is not None) is exclusive


# --- private tensors ---------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


class Quantised(Model):
    """A module whose weights are buffers, as in GPTQ."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer.register_buffer("qweight", torch.zeros(1 << 20))


def test_more_than_a_fifth_that_stays_is_a_warning_that_names_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with client.attach(seeded(Quantised)) as attachment:
        assert "144 B of other parameters and 4 MiB of buffers stay where" in str(attachment)
    assert warnings(caplog).startswith(
        "4 MiB of buffers stay in private memory: transformer (4 MiB). A forward may write to"
    )
    assert "head" not in warnings(caplog)
    caplog.clear()
    with client.attach(seeded(Model)):
        assert not warnings(caplog)
    with client.attach(seeded(Model), ["vae"]) as attachment:  # users who name some know the rest
        assert "other parameters stay where they are" in str(attachment)
        assert not warnings(caplog)


def test_a_fifth_of_a_model_that_nothing_names_is_a_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = around(dit=layers(1 << 18), blocks=nn.ModuleList(layers(1 << 15) for _ in range(4)))
    with client.attach(model.requires_grad_(False)) as attachment:
        assert list(attachment.components) == ["dit"]
    assert "2 MiB of parameters stay in private memory: blocks (2 MiB). Name" in warnings(caplog)


def test_what_stays_is_named_by_the_outermost_modules() -> None:
    model = around(model=around(visual=layers(4), proj=layers(2)), lm_head=nn.Linear(8, 8))
    left = {"model.proj.0.weight": 1 << 19, "lm_head.weight": 3 << 19, "lm_head.bias": 1 << 19}
    stays = staying(dict(model.named_modules()), ["model.visual"], left)
    (said,) = stays.warnings(1 << 20, named=False)
    assert "2.5 MiB of parameters stay in private memory: lm_head (2 MiB), model.proj (5" in said
    assert not list(stays.warnings(1 << 20, named=True))
    assert not list(stays.warnings(1 << 24, named=False))


@pytest.mark.filterwarnings("ignore:torch")  # torch deprecates features that are still in use
def test_packed_weights_are_named(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    linears = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    quantize: Any = torch.ao.quantization.quantize_dynamic
    model = quantize(linears, {nn.Linear})
    expected = model(torch.ones(1, 64))
    with client.attach({"dit": model}):
        assert torch.equal(model(torch.ones(1, 64)), expected)
    assert "dit.0._packed_params" in warnings(caplog)
    assert "and 2 more hold weights packed (torch.ao's quantised modules)" in warnings(caplog)
