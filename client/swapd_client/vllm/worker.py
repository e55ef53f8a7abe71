"""Base of all worker classes of AR and generation stages: use and loading of weights.

vLLM calls a worker's methods one after the other, in one thread. Lives here: the methods that use
weights, refusals, and vLLM's memory accounting. `stage/turns.py` has the leases. `calls.py` lists
all methods that vLLM calls, also those not overridden here.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from swapd_client.errors import SessionFenced, SwapdError
from swapd_client.vllm import checkpoint, gpus, kv, register, scheduler, versions
from swapd_client.vllm.moving import Moving
from swapd_client.vllm.options import Options, options_of
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.cache import CacheLost, Hears, Terms
from swapd_client.vllm.starting import Start, once_ranks_meet
from swapd_client.vllm.topology import neighbours_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Above
else:
    _Above = object

log = logging.getLogger("swapd_client")

#: Tokens of the dummy forward that checks a stage's layers.
DUMMY_TOKENS = 2


class Unsupported(SwapdError, RuntimeError):
    """This stage's configuration is not possible with swapd; the message tells the change."""


class Leased(_Above):  # type: ignore[misc]
    """Mixed into a worker class of vLLM, first: its weights are in swapd, and leased for each
    call."""

    _swapd: Stage
    _start: Start | None = None
    _moving: Moving
    #: The running weight update.
    _change = ExitStack()
    #: Makes the message to the scheduler about the current step, if the KV cache lost contents.
    _word: scheduler.Word = staticmethod(scheduler.nothing)
    #: The same for the last step, in a rank that vLLM does not ask for it.
    _unasked: scheduler.Word | None = None

    # --- starting ------------------------------------------------------------------------

    def init_device(self) -> None:
        """Take the turn to start before vLLM reads the device's free memory.

        Raises: UnsupportedVersion, InvalidSettings, NotRunning.
        """
        versions.check()
        with self._starting(), once_ranks_meet(gpu_worker, self._begin_start):
            super().init_device()

    def _begin_start(self) -> None:
        name, options = self._settings()
        folder = gpus.folder_of(options.endpoint, number_of(self.device), self.rank)
        self._start = Start(name, folder)
        self._start.begin(self._share())

    @contextmanager
    def _starting(self, *, to_the_end: bool = False) -> Iterator[None]:
        """A step of the start. The start ends after its last step, or with an error."""
        try:
            yield
        except BaseException:
            to_the_end = True
            raise
        finally:
            if to_the_end and self._start is not None:
                self._start.end()

    def _share(self) -> Callable[[str], list[str]] | None:
        """The function that sends a text to all ranks of the stage; None for a single rank."""
        if self.parallel_config.tensor_parallel_size > 1:
            return partial(gather, get_tp_group())
        return None

    # --- loading -------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load under a workspace lease, then move the weights into swapd.

        Raises: UnsupportedVersion, InvalidSettings, Unsupported, NotRunning, and as `Stage.take`.
        """
        versions.check()
        register()  # if $VLLM_PLUGINS leaves the plugin out, this is the first call
        name, options = self._settings()
        _refuse(self.vllm_config, name)
        gpu, share = number_of(self.device), self._share()
        neighbours = neighbours_of(options, self.model_config, name.partition(".tp")[0])
        with self._starting():
            self._swapd = Stage.connect(
                options, name, gpu=gpu, rank=self.rank, share=share, neighbours=neighbours
            )
            self._moving = Moving(name, keep_place=gpu is None)  # a GPU has no room for them twice
            try:
                with self._swapd.loading(self._load_bytes(options)):
                    self._load(name, *args, **kwargs)
                with self._swapd.using():
                    self._moving.compare()
                self._find_segments()
                scheduler.have_it_stream(self.vllm_config, self._swapd)
            except BaseException:
                self._swapd.close()
                raise

    def _load(self, name: str, *args: Any, **kwargs: Any) -> None:
        graphs = _graphs()
        super().load_model(*args, **kwargs)
        if _graphs() > graphs:
            raise Unsupported(
                f"stage {name!r} captures CUDA graphs while it loads, which would hold the "
                "addresses its weights have then, before they move into swapd: set "
                "enforce_eager: true on this stage"
            )
        models, moving = self._models(), self._moving
        take = partial(self._swapd.take, models, beside=self._cache_bytes())
        moved = moving.move(models, take, self._dummy_forward, self._forward_context)
        of_all_ranks = moved * self.parallel_config.tensor_parallel_size
        moving.warn_of_rest(read := self._read_bytes(), of_all_ranks)
        moving.warn_of_more(read, of_all_ranks)
        # vLLM subtracts this from the memory it may use; these bytes are in swapd's --budget
        # instead
        if used := getattr(self.model_runner, "model_memory_usage", 0):
            self.model_runner.model_memory_usage = max(used - moved, 0)

    def _find_segments(self) -> None:
        """Let turns begin with the first layers, if Python calls each layer: its hook waits."""
        config = self.vllm_config.compilation_config
        if config.mode or (config.cudagraph_mode and config.cudagraph_mode.value):
            log.info("%s begins a turn when all is loaded: it is compiled", self._swapd.name)
            return
        try:
            self._swapd.find_segments(self._models(), self._dummy_forward)
        except Exception as exc:  # noqa: BLE001 - a model may need more than exists while it loads
            log.info("%s begins a turn when all is loaded: %r", self._swapd.name, exc)

    def _models(self) -> Mapping[str, Module]:
        models = {"": self.model_runner.get_model()}
        if isinstance(draft := self.get_draft_model(), Module):
            models["drafter"] = draft
        return models

    def _dummy_forward(self) -> None:
        """Run every computation with the model's weights, on minimal input."""
        model = self.model_runner.get_model()
        without_cache = {"skip_attn": True} if self._has_second_runner() else {}
        with torch.inference_mode():
            hidden, _ = self.model_runner._dummy_run(
                DUMMY_TOKENS, is_profile=True, skip_eplb=True, **without_cache
            )
            # a generation stage has none: its model may pass the call on to an inner one without it
            ar = getattr(self.model_config, "worker_type", None) != "generation"
            if ar and isinstance(hidden, torch.Tensor) and hasattr(model, "compute_logits"):
                model.compute_logits(hidden)

    def _has_second_runner(self) -> bool:
        """Whether its model runner is V2. vllm-omni's need not be vLLM's default."""
        return bool(getattr(self, "use_v2_model_runner", False))

    def _forward_context(self) -> AbstractContextManager[None]:
        """The context that vLLM's layers need when they are called."""
        context: AbstractContextManager[None] = set_forward_context(
            None, self.vllm_config, num_tokens=DUMMY_TOKENS
        )
        return context

    def _settings(self) -> tuple[str, Options]:
        """The stage's name and options. Raises: InvalidSettings."""
        where = f"stage {self._stage_name('')!r}"
        options = options_of(self.vllm_config.additional_config, where)
        return self._stage_name(options.component), options

    def _stage_name(self, component: str) -> str:
        """The stage's name in the daemon; each of its ranks has a name of its own."""
        config, parallel = self.model_config, self.parallel_config
        name = component or getattr(config, "model_stage", None) or Path(config.model).name
        return f"{name}.tp{self.rank}" if parallel.tensor_parallel_size > 1 else str(name)

    def _read_bytes(self) -> int | None:
        """The bytes that the loader has read, in the model's dtype; None if unknown."""
        config = self.vllm_config
        if config.load_config.load_format not in ("auto", "safetensors"):
            return None
        stage = str(getattr(self.model_config, "model_stage", None) or "")
        return checkpoint.loaded_bytes(
            self.model_config.model, stage, self.model_config.dtype.itemsize
        )

    def _cache_bytes(self) -> int:
        """The bytes of the KV cache in swapd, if configured; else 0."""
        private = self._swapd.options.kv == "private"
        return 0 if private else self.cache_config.kv_cache_memory_bytes or 0

    def _load_bytes(self, options: Options) -> int | None:
        if options.load_workspace is not None:
            return options.load_workspace
        stage = str(getattr(self.model_config, "model_stage", None) or "")
        nbytes = checkpoint.nbytes_of(self.model_config.model, stage)
        ranks = self.parallel_config.tensor_parallel_size
        return None if nbytes is None else -(-nbytes // ranks)

    # --- steps ---------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        stage = self._swapd
        self._ask()
        if scheduler_output.scheduled_new_reqs or scheduler_output.finished_req_ids:
            came = [request.req_id for request in scheduler_output.scheduled_new_reqs]
            stage.note(came, scheduler_output.finished_req_ids)
        if scheduler_output.total_num_scheduled_tokens <= 0 and not self._computes_anyway():
            result = super().execute_model(scheduler_output)
            stage.rest()
            return result
        if (encoders := bool(scheduler_output.scheduled_encoder_inputs)) or not stage.begun:
            stage.begin(encoders=encoders)  # else the scheduler has begun it
        try:
            if (cache := stage.components.cache) is not None:
                self._word = scheduler.word_of(cache, scheduler_output)
            if (result := super().execute_model(scheduler_output)) is not None:
                result = self._counted(result)
            stage.arrive()
        except CacheLost as exc:
            stage.end()
            self._end_with_others(exc)
            raise
        except BaseException:
            stage.end()
            raise
        if result is not None:  # else sample_tokens follows, and uses weights too
            stage.end()
        return result

    def _end_with_others(self, error: SwapdError) -> None:
        """End this process if it is one of several ranks, and not the one that vLLM listens to.

        The other ranks compute this step and would wait for it for ever; vLLM notices the end of a
        process.
        """
        if self.rank > 0:
            kind = type(error).__name__
            log.critical("rank %d of %s ends: %s: %s", self.rank, self._swapd.name, kind, error)
            os._exit(1)

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            result = super().sample_tokens(grammar_output)
            return None if result is None else self._counted(result)
        finally:
            self._swapd.end()

    def _counted(self, result: Any) -> Any:
        """A step's result, with a message to the scheduler about results that do not count."""
        word, fence = self._word, self._swapd.fence()
        computed = isinstance(result, ModelRunnerOutput)
        if computed and word is scheduler.nothing and fence() is None:
            return result
        word = partial(self._word_then, word, fence)
        if self.rank > 0 and isinstance(result, AsyncModelRunnerOutput):
            self._unasked = word
        return scheduler.counted(result, word)

    def _ask(self) -> None:
        """Check whether the last step counts, where vLLM does not ask. Raises: Stopped."""
        word, self._unasked = self._unasked, None
        if word is not None:
            word()

    def _word_then(self, word: scheduler.Word, fence: Callable[[], SessionFenced | None]) -> Any:
        """The message about a step that has computed. Raises: Stopped."""
        said = word()
        if (fenced := fence()) is None:
            return said
        cache = self._swapd.components.cache
        if cache is None or (said := scheduler.word_of_fence(cache)) is None:
            stopped = self._swapd.stop(fenced)
            self._end_with_others(stopped)
            raise stopped from fenced
        log.warning("%s computes the last step again: %s", self._swapd.name, fenced)
        return said

    def execute_dummy_batch(self) -> None:
        self._swapd.begin()
        try:
            super().execute_dummy_batch()
            self._swapd.arrive()
        finally:
            self._swapd.end()

    def _computes_anyway(self) -> bool:
        """With data parallelism a replica without tokens may compute in step with the others."""
        return bool(self.parallel_config.data_parallel_size > 1)

    # --- other calls that read weights -----------------------------------------------------
    # `super` reports methods that vLLM's own version does not have.

    def determine_available_memory(self) -> Any:
        with self._starting(), self._swapd.using():
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            with self._starting():
                making = self._lend_cache(kv_cache_config)
                with self._swapd.using(), making:
                    super().initialize_from_config(kv_cache_config)
            scheduler.have_it_trace(self.vllm_config, self._swapd)
        except BaseException:
            self._swapd.close()
            raise

    def _lend_cache(self, config: Any) -> AbstractContextManager[None]:
        """Put the KV cache into swapd, if configured: a context for its allocation."""
        stage, nbytes = self._swapd, kv.nbytes_of(config)
        fate = stage.options.kv
        if fate == "private" or not nbytes:
            return nullcontext()
        caching = bool(self.cache_config.enable_prefix_caching)
        second_runner = self._has_second_runner()
        hears, deaf = scheduler.hears_of(self.vllm_config, config, second_runner=second_runner)
        terms = Terms(
            fate,
            caching,
            kv.layers_of(config),
            deaf,
            stage.options.slice_s,
            hears,
            kv.block_tokens_of(config),
        )
        apart = stage.components.all is not stage.components.main
        if problem := kv.problem_with(config, self.vllm_config, terms, apart=apart):
            raise Unsupported(
                f"the KV cache of stage {stage.name!r} cannot take turns: {problem}; or set "
                "kv: private"
            )
        if hears is Hears.BY_NUMBER:
            scheduler.have_it_hear(self.vllm_config, stage)
        return kv.made_over(stage.lend_cache(nbytes, terms))

    def compile_or_warm_up_model(self) -> Any:
        with self._starting(to_the_end=True), self._swapd.using():
            return super().compile_or_warm_up_model()

    def add_lora(self, lora_request: Any) -> Any:
        with self._swapd.using():
            return super().add_lora(lora_request)

    def pin_lora(self, lora_id: int) -> Any:
        """Activates the LoRA if it is not active."""
        with self._swapd.using():
            return super().pin_lora(lora_id)

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        with self._swapd.using():
            super().save_sharded_state(*args, **kwargs)

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        with self._swapd.using():
            super().save_tensorized_model(*args, **kwargs)

    def compute_weight_checksums(self) -> Any:
        with self._swapd.using():
            return super().compute_weight_checksums()

    def apply_model(self, fn: Any) -> Any:
        """`fn` may read the weights; writing to them is a fault."""
        with self._swapd.using():
            return super().apply_model(fn)

    # --- new weights -----------------------------------------------------------------------

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """If it fails, vLLM leaves the model without weights: start the stage again."""
        with self._swapd.changing():
            super().reload_weights(*args, **kwargs)
        self._moving.warn_of_new(self._models())

    def reset_weights(self) -> None:
        """All weights are zero afterwards: a trainer checks so that it writes to each of them."""
        with self._swapd.changing():
            super().reset_weights()

    def start_weight_update(self) -> None:
        self._start_change(super().start_weight_update)

    def start_draft_weight_update(self) -> None:
        self._start_change(super().start_draft_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """If it fails, all weights are as they were when the update started."""
        with self._undone_on_error():
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        with self._undone_on_error():
            super().finish_weight_update()
        self._change.close()
        self._moving.warn_of_new(self._models())

    def _start_change(self, start: Callable[[], None]) -> None:
        """Replace the weights by private copies until the update is finished."""
        if self._weight_update_active:
            return start()  # it raises vLLM's own error
        with ExitStack() as stack:
            stack.enter_context(self._swapd.changing())
            start()
            self._change = stack.pop_all()

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self._change.__exit__(type(exc), exc, exc.__traceback__)
            raise

    # --- sleep -----------------------------------------------------------------------------
    # Weights stay in their host copies at each level. vllm-omni's `handle_sleep_task` calls these.

    def sleep(self, level: int = 1) -> None:
        self.discard(("weights", "kv_cache"))

    def discard(self, tags: tuple[str, ...]) -> None:
        self._swapd.sleep(tags)
        if self._swapd.components.cache is None and getattr(self.model_runner, "kv_caches", None):
            log.warning(
                "the KV cache of %s stays on the device while it sleeps, because it is private to "
                "this process: set kv: auto to have it leave, too",
                self._swapd.name,
            )

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._swapd.wake_up(tags)

    # --- what does not go with it ----------------------------------------------------------

    def checkpoint_prepare(self) -> None:
        raise Unsupported(_CHECKPOINT)

    def checkpoint_restore(self) -> None:
        raise Unsupported(_CHECKPOINT)

    def elastic_ep_execute(self, execute_method: str, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(_ELASTIC)

    def shutdown(self) -> None:
        with self._starting(to_the_end=True):
            super().shutdown()
        if (stage := self.__dict__.get("_swapd")) is not None:
            stage.close()


class Worker(Leased, VllmWorker):  # type: ignore[misc]
    """vLLM's GPU worker, with its weights in swapd."""


#: Why `enable_sleep_mode` is refused.
SLEEP_MODE = (
    "enable_sleep_mode would allocate the weights in a pool of vLLM's, but swapd has them. Leave "
    "it out: sleep and wake_up work without it, and a stage that sleeps leaves the device"
)
_CHECKPOINT = (
    "a checkpoint of this process would lack its weights, which are in swapd's memory: "
    "end the stage, and start it again"
)
_ELASTIC = (
    "elastic expert parallelism moves weights to other ranks while they are in use: set "
    "enable_elastic_ep: false"
)
#: Weight transfer backends that find the weights at their current addresses. Others may write to
#: the weights' first addresses, where they are read-only.
_TRANSFERS = ("nccl", "ipc", "sparse_nccl", "sharded_rdt")


def _refuse(config: Any, name: str) -> None:
    """Raise Unsupported for settings that are not possible with swapd."""
    parallel, offload = config.parallel_config, config.offload_config
    transfer = config.weight_transfer_config
    why = ""
    if getattr(config.model_config, "enable_sleep_mode", False):
        why = SLEEP_MODE
    elif parallel.enable_eplb:
        why = "EPLB moves weights while they are in use: set enable_eplb: false"
    elif parallel.pipeline_parallel_size > 1:
        why = "pipeline parallelism is not supported: set pipeline_parallel_size: 1"
    elif parallel.prefill_context_parallel_size > 1:
        why = "its ranks are not in the order of leases: set prefill_context_parallel_size: 1"
    elif parallel.data_parallel_size > 1 and config.model_config.is_moe:
        why = (
            "replicas of a model with experts wait for each other in every step, unknown to the "
            "daemons: set data_parallel_size: 1, or use more tensor_parallel_size"
        )
    elif offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        why = (
            "vLLM's own offloading moves weights too: leave out cpu_offload_gb and "
            "offload_group_size, and set the options of additional_config.swapd instead"
        )
    elif transfer is not None and transfer.backend not in _TRANSFERS:
        why = (
            f"the weight transfer {transfer.backend} may write to the weights' first addresses: "
            f"set the backend of weight_transfer_config to one of {', '.join(_TRANSFERS)}"
        )
    if why:
        raise Unsupported(f"stage {name!r}: {why}")


def number_of(device: torch.device | None) -> int | None:
    """The number of a worker's GPU in this process; None on a CPU."""
    if device is None or device.type != "cuda":
        return None
    return device.index or 0


def gather(group: Any, mine: str) -> list[str]:
    """The texts of all ranks of vLLM's `group`. Blocks until all have called."""
    said: list[str] = [""] * group.world_size
    torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    return said


def _graphs() -> int:
    """The number of CUDA graphs, wherever a model keeps them."""
    return sum(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects())
