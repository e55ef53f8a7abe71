"""How the worker of an AR or generation stage starts: loading, memory accounting, warm-up."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import Module
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.offloader.base import NoopOffloader, set_offloader
from vllm.v1.worker import gpu_worker

from swapd_client.errors import InvalidArgument
from swapd_client.finalizers import when_collected
from swapd_client.log import log
from swapd_client.vllm import checkpoint, gpus, kv, refusals, register, scheduler, versions
from swapd_client.vllm.kept_content import NotKept
from swapd_client.vllm.kept_weights import KeptWeights
from swapd_client.vllm.neighbours import neighbours_of
from swapd_client.vllm.options import KEY, Options, name_of_model, options_of
from swapd_client.vllm.ranks import Ranks, ranks_of, stage_of
from swapd_client.vllm.refusals import Unsupported
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.kv_cache import KvTerms
from swapd_client.vllm.start_turn import StartTurn, once_ranks_meet
from swapd_client.vllm.weight_move import WeightMove

_Kind = TypeVar("_Kind", bound=type)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Above
else:
    _Above = object

#: Tokens of the dummy forward that checks a stage's layers.
DUMMY_TOKENS = 2


class HostLayers(NoopOffloader):  # type: ignore[misc]
    """Builds layers on the host, in place of vLLM's offloaders, because a GPU may not hold them."""

    def wrap_modules(self, modules_generator: Iterable[Module], prefix: str = "") -> list[Module]:
        return [layer.to("cpu") for layer in modules_generator]


class WorkerStart(_Above):  # type: ignore[misc]
    _swapd: Stage
    _start: StartTurn | None = None
    _moving: WeightMove

    # --- starting ------------------------------------------------------------------------

    def init_device(self) -> None:
        """Take the turn to start before vLLM reads the device's free memory.

        Raises: UnsupportedVersion, Unsupported, InvalidArgument, NotRunning.
        """
        register()  # if $VLLM_PLUGINS leaves the plugin out, this is the first call
        versions.check()
        refusals.refuse_type(self, self._stage_name(""))
        self._take_over_offloading()
        with self._starting(), once_ranks_meet(gpu_worker, self._begin_start):
            super().init_device()

    def _take_over_offloading(self) -> None:
        """Have swapd stream the layers that vLLM's own flags would offload.

        Call it before vLLM's model runner reads these flags in its constructor. Raises:
        InvalidArgument also if an option says otherwise.
        """
        flags = self.vllm_config.offload_config
        theirs = {
            "offload_group_size": flags.prefetch.offload_group_size,
            "offload_num_in_group": flags.prefetch.offload_num_in_group,
        }
        if not flags.prefetch.offload_group_size or flags.offload_backend == "uva":
            theirs = {"cpu_offload_gb": flags.uva.cpu_offload_gb}
        flags.prefetch.offload_group_size = flags.uva.cpu_offload_gb = 0
        if not any(theirs.values()):
            return
        if flags.uva.cpu_offload_params or flags.prefetch.offload_params:
            raise Unsupported(
                "swapd streams whole layers: leave out cpu_offload_params and offload_params"
            )
        self._settings()  # raises for options that are none
        self._add_options(theirs)

    def _add_options(self, theirs: Mapping[str, float]) -> None:
        config = self.vllm_config.additional_config
        own = config.get(KEY, {})
        said = ", ".join(f"{name}: {value:g}" for name, value in theirs.items())
        if other := [name for name, n in theirs.items() if own.get(name) not in (None, n)]:
            raise InvalidArgument(
                f"stage {self._stage_name('')!r}: additional_config.{KEY}.{other[0]}: "
                f"{own[other[0]]} contradicts vLLM's own flags ({said}): leave out one of them"
            )
        config[KEY] = {**own, **theirs}
        log.info("swapd streams these layers in vLLM's place: %s", said)

    def _begin_start(self) -> None:
        name, options = self._settings()
        folder = gpus.folder_of(options.endpoint, number_of(self.device), self.rank)
        self._start = StartTurn(name, folder)
        self._start.begin(self._share())

    @contextmanager
    def _starting(self, *, to_the_end: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException:
            to_the_end = True
            raise
        finally:
            if to_the_end and self._start is not None:
                self._start.end()

    def _share(self) -> Callable[[str], list[str]] | None:
        if ranks_of(self.parallel_config) > 1:
            return partial(gather, (get_pp_group(), get_tp_group()))
        return None

    def _agree(self, one: bool) -> bool:
        """Return whether all ranks call it with True. Blocks until they have called it."""
        share = self._share()
        return one if share is None else {*share(str(one))} == {str(True)}

    # --- loading -------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load under a workspace lease, then move the weights into swapd.

        Raises: InvalidArgument, Unsupported, and as `Stage.connect`, `StageMemory.take`.
        """
        name, options = self._settings()
        refusals.refuse(refusals.WORKER, self.vllm_config, f"stage {name!r}")
        if options.streams and self._is_compiled():
            raise Unsupported(
                f"stage {name!r}: {options.streams[0]} has layers come in when Python calls them, "
                "and compiled code or CUDA graphs call no layer: set enforce_eager: true on this "
                f"stage, or leave out {options.streams[0]}"
            )
        gpu, share = number_of(self.device), self._share()
        neighbours = neighbours_of(options, self.model_config, stage_of(name))
        with self._starting():
            self._swapd = Stage.connect(
                options, name, gpu=gpu, rank=self.rank, share=share, neighbours=neighbours
            )
            # vLLM shuts no worker down whose start fails later on, in the caller's process
            when_collected(self, self._swapd.client.session, self._swapd.close)
            if self.parallel_config.pipeline_parallel_size > 1:
                self._swapd.turns.streaming.in_pipeline = True
                if self.rank == 0 and (ranks := self._swapd.connection.ranks) is not None:
                    _warn_of_order(name, ranks)
            self._moving = WeightMove(name, keep_place=gpu is None)  # a GPU has no room for two
            try:
                with self._swapd.memory.loading(self._load_bytes(options)):
                    self._load(name, *args, **kwargs)
                window = self._swapd.turns.window
                with self._swapd.using():
                    self._moving.compare(window.layer_of, window.holding)
                self._find_segments()
                scheduler.use_chunk_counting(self.vllm_config, self._swapd)
            except BaseException:
                self._swapd.close()
                raise

    def _load(self, name: str, *args: Any, **kwargs: Any) -> None:
        kept = KeptWeights.of_all(name, self, self._swapd.client.status, self._agree)
        if self._swapd.options.streams:
            set_offloader(HostLayers())
        moved = None
        try:
            moved = self._load_and_move(name, kept, *args, **kwargs)
        except Exception as exc:
            if kept is None or not kept.is_unread:
                raise
            # also what vLLM raises, which processes memory here that nobody has written to
            log.warning("%s reads its files after all: %r", name, exc)
        # not in the handler, whose traceback keeps the model
        if kept is not None and kept.is_unread and not self._agree(moved is not None):
            if moved is not None:  # those of another rank were not kept
                self._swapd.memory.take_back()
            kept.start_over()
            moved = self._load_and_move(name, None, *args, **kwargs)
        assert moved is not None
        self._account_for(moved)

    def _account_for(self, moved: int) -> None:
        """Tell of weights that have not moved, and take those that have out of vLLM's account."""
        moving, share = self._moving, self._share()
        # the ranks of a pipeline have unequal parts
        of_all_ranks = moved if share is None else sum(map(int, share(str(moved))))
        moving.warn_of_rest(read := self._read_bytes(), of_all_ranks)
        moving.warn_of_more(read, of_all_ranks)
        # vLLM subtracts this from the memory it may use; these bytes are in swapd's --budget
        # instead
        if used := getattr(self.model_runner, "model_memory_usage", 0):
            self.model_runner.model_memory_usage = max(used - moved, 0)

    def _load_and_move(self, name: str, kept: KeptWeights | None, *args: Any, **kwargs: Any) -> int:
        """Return the bytes that are in swapd afterwards.

        Raises also: NotKept, if it has not read the weights and the daemon has not kept them.
        """
        graphs = _graphs()
        with nullcontext() if kept is None else kept.loading():
            super().load_model(*args, **kwargs)
        if _graphs() > graphs:
            raise Unsupported(
                f"stage {name!r} captures CUDA graphs while it loads, which would hold the "
                "addresses its weights have then, before they move into swapd: set "
                "enforce_eager: true on this stage"
            )
        models, content = self._models(), None
        if kept is not None and (content := kept.content(models)) is None and kept.is_unread:
            raise NotKept("its files have changed meanwhile")
        beside = self._cache_bytes()
        take = partial(self._swapd.memory.take, models, beside=beside, content=content)
        if kept is not None and kept.is_unread:
            return self._moving.move_unread(models, take)
        return self._moving.move(models, take, self._dummy_forward, self._forward_context)

    def _find_segments(self) -> None:
        if self._is_compiled():
            log.info("%s begins a turn when all is loaded: it is compiled", self._swapd.name)
            return
        try:
            self._swapd.find_segments(self._models(), self._dummy_forward)
        except Exception as exc:  # noqa: BLE001 - a model may need more than exists while it loads
            log.info("%s begins a turn when all is loaded: %r", self._swapd.name, exc)

    def _is_compiled(self) -> bool:
        config = self.vllm_config.compilation_config
        return bool(config.mode or (config.cudagraph_mode and config.cudagraph_mode.value))

    def _models(self) -> Mapping[str, Module]:
        models = {"": self.model_runner.get_model()}
        if isinstance(draft := self.get_draft_model(), Module):
            models["drafter"] = draft
        return models

    def _dummy_forward(self) -> None:
        model = self.model_runner.get_model()
        without_cache = {"skip_attn": True} if self._has_second_runner() else {}
        with torch.inference_mode():
            hidden, _ = self.model_runner._dummy_run(
                DUMMY_TOKENS, is_profile=True, skip_eplb=True, **without_cache
            )
            # a generation stage has no logits: its model may pass the call on to one without the
            # method
            ar = getattr(self.model_config, "worker_type", None) != "generation"
            if ar and isinstance(hidden, torch.Tensor) and hasattr(model, "compute_logits"):
                model.compute_logits(hidden)

    def _has_second_runner(self) -> bool:
        """Return whether the model runner is V2. vllm-omni's need not be vLLM's default."""
        return bool(getattr(self, "use_v2_model_runner", False))

    def _forward_context(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = set_forward_context(
            None, self.vllm_config, num_tokens=DUMMY_TOKENS
        )
        return context

    def _settings(self) -> tuple[str, Options]:
        where = f"stage {self._stage_name('')!r}"
        options = options_of(self.vllm_config.additional_config, where)
        return self._stage_name(options.component), options

    def _stage_name(self, component: str) -> str:
        config, parallel = self.model_config, self.parallel_config
        name = component or getattr(config, "model_stage", None) or name_of_model(config.model)
        return f"{name}.tp{self.rank}" if ranks_of(parallel) > 1 else str(name)

    def _read_bytes(self) -> int | None:
        if self.vllm_config.load_config.load_format not in ("auto", "safetensors"):
            return None
        return self._bytes_in_files(self.model_config.dtype.itemsize)

    def _bytes_in_files(self, item_bytes: int = 0) -> int | None:
        folder = checkpoint.folder_in(self.vllm_config)
        stage = str(getattr(self.model_config, "model_stage", None) or "")
        return None if folder is None else checkpoint.nbytes_of(folder, stage, item_bytes)

    def _cache_bytes(self) -> int:
        private = self._swapd.options.kv == "private"
        return 0 if private else self.cache_config.kv_cache_memory_bytes or 0

    def _load_bytes(self, options: Options) -> int | None:
        if options.load_workspace is not None:
            return options.load_workspace
        nbytes = self._bytes_in_files()
        # ranks of a pipeline do not divide: one may have most of the bytes, as those of the
        # vocabulary
        ranks = self.parallel_config.tensor_parallel_size
        return None if nbytes is None else -(-nbytes // ranks)

    # --- memory ---------------------------------------------------------------------------

    def determine_available_memory(self) -> Any:
        with self._starting(), self._swapd.using():
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            with self._starting():
                making = self._lend_cache(kv_cache_config)
                with self._swapd.using(), making:
                    super().initialize_from_config(kv_cache_config)
            scheduler.use_traced(self.vllm_config, self._swapd)
        except BaseException:
            self._swapd.close()
            raise

    def _lend_cache(self, config: Any) -> AbstractContextManager[None]:
        stage, nbytes = self._swapd, kv.nbytes_of(config)
        fate = stage.options.kv
        if fate == "private" or not nbytes:
            return nullcontext()
        caching = bool(self.cache_config.enable_prefix_caching)
        second_runner = self._has_second_runner()
        by_number, unreported = scheduler.reporting_of(
            self.vllm_config, config, second_runner=second_runner
        )
        slice_s, block_tokens = stage.options.slice_s, kv.block_tokens_of(config)
        layers = kv.layers_of(config)
        terms = KvTerms(fate, caching, layers, unreported, slice_s, by_number, block_tokens)
        apart = stage.components.all is not stage.components.main
        if problem := kv.problem_with(config, self.vllm_config, terms, apart=apart):
            raise Unsupported(
                f"the KV cache of stage {stage.name!r} cannot take turns: {problem}; or set "
                "kv: private"
            )
        if by_number:
            scheduler.use_loss_aware(self.vllm_config, stage)
        return kv.made_over(stage.memory.lend_cache(nbytes, terms))

    def compile_or_warm_up_model(self) -> Any:
        with self._starting(to_the_end=True), self._swapd.using():
            return super().compile_or_warm_up_model()


def number_of(device: torch.device | None) -> int | None:
    """Return the number of a worker's GPU in this process; None on a CPU."""
    if device is None or device.type != "cuda":
        return None
    return device.index or 0


def gather(groups: Iterable[Any], mine: str) -> list[str]:
    """Return the texts of all ranks, which `groups` connect. Blocks until all have called."""
    said = [mine]
    for group in groups:
        lists: list[list[str]] = [[]] * group.world_size
        torch.distributed.all_gather_object(lists, said, group=group.cpu_group)
        said = [one for each in lists for one in each]
    return said


def _warn_of_order(name: str, ranks: Ranks) -> None:
    if ranks.in_turn != sorted(ranks.in_turn):
        log.warning(
            "%s: the steps of its pipeline do not overlap, for the daemons of its ranks have "
            "another order (%s): list its GPUs in that order (devices, CUDA_VISIBLE_DEVICES)",
            name,
            ", ".join(map(str, ranks.in_turn)),
        )


def _graphs() -> int:
    kinds = Counter(map(type, gc.get_objects()))
    return sum(many for kind, many in kinds.items() if issubclass(kind, torch.cuda.CUDAGraph))


def during(
    context: Callable[[Any], AbstractContextManager[object]], *names: str
) -> Callable[[_Kind], _Kind]:
    """Override the methods `names` of a class: each runs as before, in `context(self)`."""

    def override(kind: _Kind) -> _Kind:
        for name in names:
            setattr(kind, name, _in_context(kind, name, context))
        return kind

    return override


def _in_context(
    kind: type, name: str, context: Callable[[Any], AbstractContextManager[object]]
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return getattr(super(kind, self), name)(*args, **kwargs)

    call.__name__, call.__qualname__ = name, f"{kind.__name__}.{name}"
    return call
