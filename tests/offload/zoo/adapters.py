"""Adapters: of peft on transformers, of diffusers' own methods, and a training step."""

from collections.abc import Callable
from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import GREEDY, SMALL, T5, ids

LINEARS = ["q_proj", "v_proj"]


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4)).requires_grad_(False)


def _adapted(config: Any, base: Any = None) -> Any:
    import peft

    return peft.get_peft_model(base or _llama(), config)


def _generates(model: Any) -> Subject:
    return Subject(model, lambda: model.generate(input_ids=ids(), **GREEDY))


@entry(
    "LoRA",
    "low ranks beside Linears; two adapters, of which one is chosen, and none",
    often=True,
    # choosing an adapter makes it require grad
    said={"grad mode": "its parameters require grad"},
)
def lora() -> Subject:
    import peft

    config = peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)
    model = _adapted(config)
    model.add_adapter("second", config)

    def run() -> object:
        tokens, seen = ids(), []
        for name in ("second", "default"):
            model.set_adapter(name)
            seen.append(model(tokens).logits)
        with model.disable_adapter():
            seen.append(model(tokens).logits)
        return seen

    return Subject(model, run)


def _adds(name: str, oddity: str, config: Callable[[Any], Any]) -> None:
    """Adds a Llama with an adapter: `config(peft)`."""

    def build() -> Subject:
        import peft

        return _generates(_adapted(config(peft)))

    entry(name, oddity)(build)


_adds(
    "DoRA",
    "norms of the base's weight, which each call reads",
    lambda peft: peft.LoraConfig(
        r=4, target_modules=LINEARS, init_lora_weights=False, use_dora=True
    ),
)
_adds(
    "LoRA on embeddings, with modules that are saved",
    "copies of whole modules; tied heads",
    lambda peft: peft.LoraConfig(
        r=4,
        target_modules=["embed_tokens", "q_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    ),
)
_adds(
    "VeRA",
    "projections that all layers share, in a dict of buffers",
    lambda peft: peft.VeraConfig(r=4, target_modules=LINEARS),
)
_adds(
    "Prompt tuning",
    "an embedding around the model, read before it",
    lambda peft: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
)
_adds(
    "Trainable tokens",
    "a few rows of an embedding, put into a copy of it at each call",
    lambda peft: peft.TrainableTokensConfig(
        token_indices=[9, 10], target_modules=["embed_tokens"], init_weights=False
    ),
)


@entry("LoRA on parameters of experts", "parametrizations that are there during a call", often=True)
def lora_parameters() -> Subject:
    import peft
    from transformers import MixtralConfig, MixtralForCausalLM

    base = MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    )
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    return _generates(_adapted(config, base.requires_grad_(False)))


@entry("LoRA, merged and unmerged", "writes into the base's weights", often=True)
def lora_merged() -> Subject:
    import peft

    model = _adapted(peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False))

    def run() -> object:
        model.merge_adapter()
        merged = model.generate(input_ids=ids(), **GREEDY)
        model.unmerge_adapter()
        return merged, model(ids()).logits

    return Subject(model, run)


@entry("AdaLoRA on T5", "singular values in a ParameterDict; tied embeddings below")
def adalora() -> Subject:
    import peft
    from transformers import T5Config, T5ForConditionalGeneration

    base = T5ForConditionalGeneration(T5Config(**T5))
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=["q", "v"], init_lora_weights=False
    )
    return _generates(_adapted(config, base))


def _paints(pipeline: Any) -> Any:
    return pipeline(
        "a fox",
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    ).images


@entry("StableDiffusionPipeline, fused for a picture", "writes a LoRA into weights and out")
def fused_pipeline() -> Subject:
    import diffusers
    import peft

    from tests.offload.zoo.diffusion import _sd

    pipeline = _sd("StableDiffusionPipeline", scheduler=diffusers.DDIMScheduler())
    pipeline.unet.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v", "conv1"], init_lora_weights=False)
    )

    def run() -> object:
        seen = [_paints(pipeline)]
        pipeline.unet.fuse_lora()
        seen.append(_paints(pipeline))
        pipeline.unet.unfuse_lora()
        return seen

    return Subject(pipeline, run)


@entry(
    "LoRA, trained",
    "forward, backward and a step of an optimizer over frozen weights",
    told="trained",
    often=True,
)
def lora_trained() -> Subject:
    import peft

    model = _adapted(peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    first = [p.detach().clone() for p in trained]

    def run() -> object:
        for parameter, value in zip(trained, first, strict=True):
            parameter.data.copy_(value)
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        tokens, losses = ids(), []
        for _ in range(2):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [p.detach() for p in trained]

    return Subject(model, run, training=True)
