"""The worker extension for vllm-omni's diffusion stages, named by `worker_extension_cls`.

vllm-omni puts it before its own worker class in the MRO.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from vllm_omni.diffusion.distributed.parallel_state import get_world_group
from vllm_omni.diffusion.offloader.module_collector import ModuleDiscovery
from vllm_omni.diffusion.worker.diffusion_worker import (
    CustomPipelineWorkerExtension,
    DiffusionWorker,
)

from swapd.shared import config
from swapd_client.finalizers import when_collected
from swapd_client.log import log
from swapd_client.offload.registering import ToSource
from swapd_client.offload.strategy import Kind
from swapd_client.vllm import checkpoint, gpus, refusals, register, versions
from swapd_client.vllm.kept_pipeline import KeptPipeline
from swapd_client.vllm.options import Options, take_over
from swapd_client.vllm.pipeline import Components, WholePipeline, as_whole
from swapd_client.vllm.refusals import Unsupported
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.start_turn import StartTurn
from swapd_client.vllm.weight_move import WeightMove
from swapd_client.vllm.worker_start import during, gather, number_of

if TYPE_CHECKING:

    class _Above(CustomPipelineWorkerExtension, DiffusionWorker):  # type: ignore[misc]
        ...
else:
    _Above = CustomPipelineWorkerExtension

T = TypeVar("T")


class _Swapd:
    def __init__(self, worker: Any) -> None:
        register()  # vllm-omni does so too, unless its plugins are filtered
        versions.check()
        config = worker.od_config
        where = f"stage {config.stage_id}"
        options = take_over(config, where)
        refusals.refuse(refusals.DIFFUSION, config, where)
        if options.resident is not None or options.offload_group_size:
            raise Unsupported(
                f"{where}: resident and offload_group_size are for AR and generation stages: set "
                "cpu_offload_gb or enable_layerwise_offload"
            )
        if options.kv != "private":
            raise Unsupported(f"{where}: a diffusion stage has no KV cache: leave out kv")
        if options.slice_s is not None:
            raise Unsupported(
                f"{where}: a diffusion stage has no turns that end inside requests: leave out "
                "slice_s, or set finish_within_s"
            )
        name = options.component or f"stage{config.stage_id}"
        whole = as_whole(options, name, config.num_gpus)
        share = None
        if config.num_gpus > 1:
            name, share = f"{name}.tp{worker.rank}", partial(gather, (get_world_group(),))
        self.options = options
        self.whole = whole is not None
        self._moving = WeightMove(name, keep_place=worker.device.type == "cpu")
        gpu = number_of(worker.device)
        self.stage = Stage.connect(whole or options, name, gpu=gpu, rank=worker.rank, share=share)
        when_collected(worker, self.stage.client.session, self.stage.close)
        self._start = StartTurn(name, gpus.folder_of(options.endpoint, gpu, worker.rank))
        self._share = share
        self.weights: Components | WholePipeline | None = None
        self.kept: KeptPipeline | None = None
        #: vllm-omni's own loading.
        self.load: Callable[[], None] = lambda: None
        #: The workspace lease and the turn to start, while the stage loads.
        self.loading = ExitStack()

    def begin_loading(self, nbytes: int | None) -> None:
        """Take the turn to start and a workspace until `loading` is closed, also if this raises."""
        self.loading.callback(self._start.end)
        self._start.begin(self._share)
        self.loading.enter_context(self.stage.memory.loading(nbytes))

    def load_unread(self, worker: Any) -> None:
        """Load the pipeline without what the daemon has kept of it."""
        name = self.stage.name
        self.kept = None if self.whole else KeptPipeline.of(name, worker, self.stage.client.status)
        with nullcontext() if self.kept is None else self.kept.loading():
            self.load()

    def or_read(self, worker: Any, do: Callable[[], T], again: Callable[[], T]) -> T:
        """Return `do()`, or else `again()`, which loads the pipeline once more, and reads it."""
        try:
            return do()
        except Exception as exc:  # also of what processes memory that nobody has written to
            if self.kept is None or not self.kept.is_unread:
                raise
            log.warning("%s reads its files after all: %r", self.stage.name, exc)
        # not in the handler, whose traceback keeps the pipeline: a GPU may have no room for two
        self.kept = worker.model_runner.pipeline = None
        return again()

    def take(self, pipeline: Any) -> int:
        def take(outside: Mapping[str, Tensor], aliases: Sequence[Tensor]) -> int:
            if self.whole:
                self.weights = WholePipeline(self.stage, pipeline, outside, aliases)
            else:
                kinds = _kinds(pipeline)
                self.weights = Components(self.stage, self.options, pipeline, kinds, source)
            return self.weights.nbytes

        source: ToSource = dict
        if self.kept is not None:
            source = self.kept.source(self.stage.client.session.processor)
            if self.kept.is_unread:
                return self._moving.move_unread({"": pipeline}, take)
        # only requests run a pipeline, so its linear layers are called one by one
        moved = self._moving.move({"": pipeline}, take, lambda: None)
        self._moving.warn_of_rest(self._moving.held, moved)
        return moved

    def compare(self) -> None:
        """Raises: PointerKept. Blocks for leases."""
        assert self.weights is not None
        self._moving.compare(self.weights.around, self.weights.hold)


class _Overriding(type):
    """Metaclass that hides overridden methods from `dir`, or vllm-omni warns of each."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not hasattr(DiffusionWorker, name)]


def _request(worker: Any) -> AbstractContextManager[None]:
    swapd = worker._swapd
    return nullcontext() if swapd is None or swapd.weights is None else swapd.weights.request()


@during(
    _request,
    "execute_model",
    "execute_model_batch",
    "execute_stepwise",
    "determine_available_kv_memory",
    "submit_interaction",
    "add_lora",
)
class DiffusionExtension(_Above, metaclass=_Overriding):
    _swapd: _Swapd | None = None

    # --- loading -------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load under a workspace lease, which `init_lora_manager` ends.

        Raises: UnsupportedVersion, InvalidArgument, Unsupported, and as `Stage.connect`.
        """
        if self._swapd is None:
            self._swapd = _Swapd(self)
        swapd = self._swapd
        nbytes = _load_bytes(self.od_config, swapd.options)
        swapd.load = partial(super().load_model, *args, **kwargs)
        try:
            swapd.begin_loading(nbytes)
            swapd.or_read(self, partial(swapd.load_unread, self), swapd.load)
        except BaseException:
            swapd.loading.close()
            raise
        if self.model_runner.pipeline is None:  # dummy: `re_init_pipeline` loads
            swapd.loading.close()

    def init_lora_manager(self) -> None:
        """Move the weights into swapd once the last step of loading may have merged LoRAs."""
        swapd = self._swapd
        assert swapd is not None
        runner, above = self.model_runner, super().init_lora_manager

        def load_again() -> int:
            swapd.load()
            above()
            return swapd.take(runner.pipeline)

        with swapd.loading:
            above()
            if runner.pipeline is None or swapd.weights is not None:
                return
            moved = swapd.or_read(self, lambda: swapd.take(runner.pipeline), load_again)
            swapd.kept = None
            # vllm-omni subtracts this from the memory it may use; these bytes are in swapd's
            # --budget instead
            runner.model_memory_usage = max(runner.model_memory_usage - moved, 0)
        swapd.compare()

    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        swapd = self._swapd
        if swapd is not None and swapd.weights is not None:
            with swapd.stage.memory.loading(swapd.weights.nbytes):
                swapd.weights.take_back()
                swapd.weights = None
        super().re_init_pipeline(custom_pipeline_args)

    # --- sleep and end ---------------------------------------------------------------------
    # vllm-omni's `handle_sleep_task` and `handle_wake_task` call these.

    def sleep(self, level: int = 1) -> int:
        if (swapd := self._swapd) is None or swapd.weights is None:
            return 0
        swapd.stage.sleep()
        return swapd.weights.nbytes

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if self._swapd is not None:
            self._swapd.stage.wake_up(tags)
        return True

    def shutdown(self) -> None:
        super().shutdown()
        if (swapd := self._swapd) is not None:
            self._swapd = None
            swapd.loading.close()
            swapd.stage.close()


if config.is_disabled():
    DiffusionExtension = CustomPipelineWorkerExtension  # type: ignore[misc]


def _kinds(pipeline: Any) -> Mapping[str, Kind]:
    found = ModuleDiscovery.discover(pipeline)
    kinds: dict[str, Kind] = dict.fromkeys(found.encoder_names, "encoder")
    kinds |= dict.fromkeys(found.dit_names, "dit")
    for name in found.vae_names:
        kinds.setdefault(name, "vae")
    return kinds


def _load_bytes(config: Any, options: Options) -> int | None:
    """None: the files do not tell. Each component has a folder of its own."""
    if options.load_workspace is not None:
        return options.load_workspace
    if (folder := checkpoint.folder_of(config.model, config.revision)) is None:
        return None
    if not (folder / "model_index.json").is_file():
        nbytes = checkpoint.nbytes_of(folder, "")
    else:
        parts = [path for path in folder.iterdir() if path.is_dir()]
        nbytes = sum(checkpoint.nbytes_of(path, "") or 0 for path in parts) or None
    return None if nbytes is None else -(-nbytes // config.parallel_config.tensor_parallel_size)
