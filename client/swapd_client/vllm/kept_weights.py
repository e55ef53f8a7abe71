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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.nn import Module
from vllm import envs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from swapd.shared.protocol import Status
from swapd_client.log import log
from swapd_client.vllm.checkpoint import folder_in
from swapd_client.vllm.fingerprint import fingerprint, hashed
from swapd_client.vllm.kept_content import NotKept
from swapd_client.vllm.kept_start import KeptStart, files_in, machine, refuse_unfit
from swapd_client.vllm.options import KEY

#: Where the classes of models are that read no files but those of their folder.
_MODELS = (
    "vllm.model_executor.models.",
    "vllm_omni.model_executor.models.qwen2_5_omni.",
    "vllm_omni.model_executor.models.qwen3_omni.",
)

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


class KeptWeights(KeptStart):
    _LOADER = DefaultModelLoader

    def __init__(self, name: str, worker: Any, status: Callable[[], Status], agree: Agree) -> None:
        """`agree`: as `WorkerStart._agree`. Raises as `_key_now`."""
        super().__init__(name, worker, status)
        self._agree = agree
        #: Entries of vLLM's configuration to which building the model adds.
        compilation = worker.vllm_config.compilation_config
        self._layers = compilation.static_forward_context
        self._experts = compilation.static_all_moe_layers
        self._before = dict(self._layers), list(self._experts)

    @classmethod
    def of_all(
        cls, name: str, worker: Any, status: Callable[[], Status], agree: Agree
    ) -> "KeptWeights | None":
        """None: no weights of this stage are kept. Blocks until all ranks have called it."""
        found = cls.of(name, worker, status, agree)
        return found if agree(found is not None) else None

    def _key_now(self) -> str:
        config = self._worker.vllm_config
        if why := next((said for said, reads in _READS.items() if reads(config)), ""):
            raise NotKept(why)
        return key_of(self._worker)

    def _load(self, read: partial[None], loader: Any, model: Module) -> None:
        first, self._begun = not self._begun, self._begun + 1
        if first:
            self.is_unread = self._agree(self._is_kept(loader, model))
            if self.is_unread:
                log.info("%s reads no weights: swapd has kept them", self._name)
        elif self._begun > len(_models(self._worker.vllm_config)):
            self._key = ""  # one whose files are not in the key
        else:
            self._tried(partial(_refuse, model))
        if self.is_unread and self._key:
            return
        read()
        if first:
            self._print(loader, model)

    def _fingerprint(self, _: Any, model: Module) -> str:
        _refuse(model)
        return fingerprint({"": model})

    def start_over(self) -> None:
        """Have vLLM build the model again, and read. A GPU may have no room for two."""
        runner = self._worker.model_runner
        runner.model = None
        if hasattr(getattr(runner, "drafter", None), "model"):
            runner.drafter.model = None
        self._layers.clear()
        self._layers.update(self._before[0])
        self._experts[:] = self._before[1]


def _refuse(model: Module) -> None:
    kind = type(model)
    if not kind.__module__.startswith(_MODELS) or getattr(model, "secondary_weights", None):
        raise NotKept(f"{kind.__module__}.{kind.__qualname__} may read other files")
    refuse_unfit(model)


def key_of(worker: Any) -> str:
    """See `KeptStart._key_now`."""
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


_RANKS = ("world_size", "tensor_parallel_size", "pipeline_parallel_size")
_OF_THE_MODEL = (
    *("model_impl", "convert_type", "runner_type", "model_stage", "trust_remote_code"),
    *("quantization", "quantization_config"),
)
