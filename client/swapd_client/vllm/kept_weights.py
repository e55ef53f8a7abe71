"""A start that reads no weights, because the daemon has kept those of the last process.

vLLM builds the model. Before it reads the files, this computes a key (the hash of everything that
the weights are made from) and the fingerprint of the model without them. If the daemon has kept all
components of both, vLLM reads nothing, and processes memory that was never written to into the form
that its kernels want. Then the fingerprint is taken again, and the components are registered under
all three: so loading and processing must have left nothing else in the model than now. A model that
drafts for it does as the model does, and is in the second fingerprint.

Only layers that vLLM declares complete without their processing start so
(`supports_pre_processed_weights`), as those of fp8. All ranks of a stage read, or none, since they
compute together while a stage starts.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm import envs
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import swapd_client
from swapd.shared.protocol import Status
from swapd_client.errors import InvalidSource
from swapd_client.log import log
from swapd_client.vllm.checkpoint import folder_in
from swapd_client.vllm.fingerprint import fingerprint, hashed
from swapd_client.vllm.kept_content import Content, has_all
from swapd_client.vllm.kernel_tensors import found_in, packed_bytes
from swapd_client.vllm.options import KEY
from swapd_client.weights.safetensors import File

#: To be increased when the plugin makes other bytes of the same files.
READER = 1
#: Where the classes of models are that read no files but those of their folder.
_MODELS = (
    "vllm.model_executor.models.",
    "vllm_omni.model_executor.models.qwen2_5_omni.",
    "vllm_omni.model_executor.models.qwen3_omni.",
)
#: Most files of a model's folder.
_FILES = 10_000

#: Ways to speculate without a model, or with one that shares no weights with its target.
_DRAFTS = ("ngram", "ngram_gpu", "suffix", "draft_model")

#: vLLM's settings under which a stage reads its files at each start, by their name in the log.
_READS: Mapping[str, Callable[[Any], object]] = {
    "a model that is neither in a folder nor in Hugging Face's cache": lambda c: (
        None in [folder_in(c, model) for model in _models(c)]
    ),
    "ModelScope": lambda _: envs.VLLM_USE_MODELSCOPE,
    "another loader than vLLM's default": lambda c: (
        type(get_model_loader(c.load_config)) is not DefaultModelLoader
    ),
    "kv_cache_dtype": lambda c: c.cache_config.cache_dtype != "auto",
    "speculative decoding by neither n-grams nor a draft model": lambda c: (
        c.speculative_config is not None and c.speculative_config.method not in _DRAFTS
    ),
    "data parallelism": lambda c: c.parallel_config.data_parallel_size > 1,
    "expert parallelism": lambda c: c.parallel_config.enable_expert_parallel,
    "weight_transfer_config": lambda c: c.weight_transfer_config is not None,
    "ec_transfer_config": lambda c: c.ec_transfer_config is not None,
}

Agree = Callable[[bool], bool]


class KeptWeights:
    def __init__(self, name: str, worker: Any, status: Callable[[], Status], agree: Agree) -> None:
        """`agree`: as `WorkerStart._agree`."""
        self._agree = agree
        self._name = name
        self._worker = worker
        self._status = status
        self._key = key_of(worker)
        self._loaded = ""
        self.is_unread = False
        #: Models that have begun to load.
        self._begun = 0
        #: Entries of vLLM's configuration to which building the model adds.
        compilation = worker.vllm_config.compilation_config
        self._layers = compilation.static_forward_context
        self._experts = compilation.static_all_moe_layers
        self._before = dict(self._layers), list(self._experts)

    @classmethod
    def of(
        cls, name: str, worker: Any, status: Callable[[], Status], agree: Agree
    ) -> "KeptWeights | None":
        """None: no weights of this stage are kept. Blocks until all ranks have called it."""
        found = cls._of(name, worker, status, agree) if status().keep_host_bytes else None
        return found if agree(found is not None) else None

    @classmethod
    def _of(
        cls, name: str, worker: Any, status: Callable[[], Status], agree: Agree
    ) -> "KeptWeights | None":
        try:
            why = next((said for said, reads in _READS.items() if reads(worker.vllm_config)), "")
            if not why:
                return cls(name, worker, status, agree)
        except Exception as exc:  # noqa: BLE001 - of any model: it starts without this
            why = repr(exc)
        log.info("%s reads its files at each start, whatever swapd keeps: %s", name, why)
        return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In the block, vLLM reads the weights only if those of all ranks are kept."""
        read = DefaultModelLoader.load_weights

        def load(*given: Any) -> None:
            self._load(read, *given)

        DefaultModelLoader.load_weights = load
        try:
            yield
        finally:
            DefaultModelLoader.load_weights = read

    def _load(
        self, read: Callable[..., None], loader: DefaultModelLoader, model: Module, config: Any
    ) -> None:
        first, self._begun = not self._begun, self._begun + 1
        if first:
            self.is_unread = self._agree(self._is_kept(model))
            if self.is_unread:
                log.info("%s reads no weights: swapd has kept them", self._name)
        elif self._begun > len(_models(self._worker.vllm_config)):
            self._key = ""  # one whose files are not in the key
        elif why := _problem_with(model):
            self._give_up(why)
        if self.is_unread and self._key:
            return
        read(loader, model, config)
        if first:
            self._loaded = self._key and self._printed(model)

    def content(self, models: Mapping[str, Module]) -> Content | None:
        """Return the weights' name for the daemon; None: they are not kept.

        They have no name if their files changed meanwhile, or so lately that a write may not show.
        """
        if not self._key or not self._loaded:
            return None
        if not self.is_unread and packed_bytes(models, found_in(models)):
            return None
        try:
            if key_of(self._worker) == self._key:
                return Content(self._key, self._loaded, fingerprint(models), self.is_unread)
        except Exception as exc:  # noqa: BLE001 - as above
            log.info("the weights of %s cannot be kept: %r", self._name, exc)
        return None

    def start_over(self) -> None:
        """Have vLLM build the model again, and read. A GPU may have no room for two."""
        runner = self._worker.model_runner
        runner.model = None
        if hasattr(getattr(runner, "drafter", None), "model"):
            runner.drafter.model = None
        self._layers.clear()
        self._layers.update(self._before[0])
        self._experts[:] = self._before[1]

    def _is_kept(self, model: Module) -> bool:
        self._loaded = self._key and self._printed(model)
        return bool(self._loaded) and has_all(self._status().kept, self._key, self._loaded)

    def _printed(self, model: Module) -> str:
        """Return the model's fingerprint; "": its weights are not kept."""
        if (why := _problem_with(model)) is None:
            try:
                return fingerprint({"": model})
            except Exception as exc:  # noqa: BLE001 - as above
                why = repr(exc)
        self._give_up(why)
        return ""

    def _give_up(self, why: str) -> None:
        log.info("the weights of %s cannot be kept: %s", self._name, why)
        self._key = ""


def _problem_with(model: Module) -> str | None:
    kind = type(model)
    if not kind.__module__.startswith(_MODELS) or getattr(model, "secondary_weights", None):
        return f"{kind.__module__}.{kind.__qualname__} may read other files"
    return unfit(model)


def unfit(model: Module) -> str | None:
    """Return which layer would not be complete without its processing."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            return f"{name} has a {type(method).__name__}"
    return None


def key_of(worker: Any) -> str:
    """Return a hash of all that vLLM makes the weights from; "" shortly after a file was written.

    Raises: InvalidSource, OSError.
    """
    config = worker.vllm_config
    models = [_made_from(config, model) for model in _models(config)]
    if () in models:
        return ""
    made_from = (
        *machine(worker),
        *(repr(getattr(config.parallel_config, name)) for name in _RANKS),
        *models,
        *(repr(config.load_config), repr(getattr(config, "kernel_config", None))),
        repr(config.lora_config),
        {name: value for name, value in config.additional_config.items() if name != KEY},
    )
    return hashed(repr(made_from).encode())


def machine(worker: Any) -> tuple[object, ...]:
    """Return what makes weights beside a model's files and settings."""
    return (
        READER,
        swapd_client.__version__,
        {name: getattr(sys.modules.get(name), "__version__", "") for name in _PACKAGES},
        f"{type(worker).__module__}.{type(worker).__qualname__}",
        *(worker.rank, _device(worker.device)),
        sorted((name, repr(value)) for name, value in envs.compile_factors().items()),
    )


def _models(config: Any) -> list[Any]:
    """Return vLLM's configurations of a stage's models, of which each has files of its own."""
    speculates = config.speculative_config
    drafts = speculates is not None and speculates.method == "draft_model"
    return [config.model_config, *([speculates.draft_model_config] if drafts else ())]


def _made_from(config: Any, model: Any) -> tuple[object, ...]:
    """Return what one model is made from; () if its files may change, or are in no folder now."""
    if not (files := files_in(folder_in(config, model))):
        return ()
    return (
        *(model.model, model.revision, model.code_revision, str(model.dtype)),
        *(model.hf_config.to_json_string(use_diff=False), str(model.hf_overrides)),
        *(str(getattr(model, name, None)) for name in _OF_THE_MODEL),
        *files,
    )


_PACKAGES = ("vllm", "vllm_omni", "torch", "transformers", "triton", "flashinfer")
_RANKS = ("world_size", "tensor_parallel_size", "pipeline_parallel_size")
_OF_THE_MODEL = (
    *("model_impl", "convert_type", "runner_type", "model_stage", "trust_remote_code"),
    *("quantization", "quantization_config"),
)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def files_in(folder: Path | None) -> list[tuple[str, tuple[int, ...]]]:
    """Return path and identity of all files; none shortly after one of them was written."""
    found, settled = [], True
    for where, _, names in os.walk(folder or "", followlinks=True):
        for name in names:
            with closing(File(Path(where, name))) as file:
                found.append((str(file.path), file.identity))
                settled &= file.is_settled
            if len(found) > _FILES:
                raise InvalidSource(f"{folder} has more than {_FILES} files")
    return sorted(found) if settled else []
