"""A diffusion pipeline as vllm-omni has them, small: an encoder, a DiT of blocks, a VAE.

`custom_pipeline_args` say more: `seed` of its weights, `compile` how, whether to `cache`. `method`
is a class of `keeping` that handles the weights of the DiT's layers. `declares` has attributes of
the DiT, and `absent` the lists of components that the pipeline does not declare. `told` is a fifo
in which a request whose prompt is "stop" says that it has got to the middle; it goes on when
something is written there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm_omni.diffusion.compile import regionally_compile
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.hooks import HookRegistry, ModelHook

from tests.vllm import keeping

#: 1 MiB a layer.
WIDTH = 512
STEPS = 4


class Block(nn.Module):
    """A block of the DiT; its layer is one of vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)[0]) + x


class Transformer(nn.Module):
    _repeated_blocks: ClassVar = ["Block"]
    _layerwise_offload_blocks_attrs: ClassVar = ["blocks"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)  # type: ignore[no-any-return]


class EveryOther(ModelHook):  # type: ignore[misc]
    """As vllm-omni's caches: replaces forward, and returns the last output at every other step."""

    def __init__(self) -> None:
        super().__init__()
        self._last: torch.Tensor | None = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        last, self._last = self._last, None
        if last is None:
            last = self._last = self.fn_ref.original_forward(*args, **kwargs)
        return last


class ToyPipeline(nn.Module):
    """vllm-omni's runner calls `forward` itself, so that no hook of the pipeline is called."""

    _dit_modules: ClassVar = ["core"]
    _encoder_modules: ClassVar = ["text_encoder"]
    _vae_modules: ClassVar = ["vae"]
    _resident_modules: ClassVar = ["connector"]

    def __init__(self, *, od_config: Any, **more: object) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        given = od_config.custom_pipeline_args or {}
        for kind in given.get("absent", ()):
            setattr(self, f"_{kind}_modules", [])
        self.told: str = given.get("told", "")
        self.compile_how = given.get("compile")
        self.text_encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.core = Transformer()
        for name, value in given.get("declares", {}).items():
            setattr(self.core, name, value)
        self.vae = Vae()
        self.connector = nn.Linear(WIDTH, WIDTH)
        for module in self.core.modules() if "method" in given else ():
            if isinstance(module, ReplicatedLinear):
                module.quant_method = getattr(keeping, given["method"])()
        if given.get("cache"):
            HookRegistry.get_or_create(self.core).register_hook("cache", EveryOther())
        numbers = torch.Generator().manual_seed(given.get("seed", 0))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=numbers) * 0.05)

    @property
    def weights_sources(self) -> tuple[()]:
        return ()

    def load_weights(self, weights: Iterable[object]) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def setup_compile(self) -> None:
        if self.compile_how == "full":
            self.core.compile(backend="eager")
        else:
            regionally_compile(self.core, backend="eager")

    def forward(self, batch: Any) -> DiffusionOutput:
        request = batch.requests[0]
        latent, prompt = self._begin(request.sampling_params.seed)
        for step in range(STEPS):
            latent = torch.tanh(self.core(latent + prompt))
            if step == 1 and request.prompt["prompt"] == "stop":
                Path(self.told).write_text("stopped")
                Path(self.told).read_text()
        return DiffusionOutput(output=self.vae.decode(latent))

    def _begin(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        return latent, self.connector(self.text_encoder(latent))

    # --- the same, step by step: vllm-omni's `step_execution` ------------------------------

    supports_step_execution: ClassVar = True

    def prepare_encode(self, state: Any, **more: object) -> Any:
        state.latents, state.extra["prompt"] = self._begin(state.sampling.seed)
        state.prompt_embeds = state.extra["prompt"].unsqueeze(0)
        state.timesteps = torch.arange(STEPS)
        return state

    def denoise_step(self, batch: Any, *, states: Any = None, **more: object) -> torch.Tensor:
        return torch.cat([self.core(one.latents + one.extra["prompt"]) for one in states])

    def step_scheduler(self, state: Any, noise: torch.Tensor, **more: object) -> None:
        state.latents = torch.tanh(noise)
        state.step_index += 1

    def post_decode(self, state: Any, **more: object) -> DiffusionOutput:
        return DiffusionOutput(output=self.vae.decode(state.latents))
