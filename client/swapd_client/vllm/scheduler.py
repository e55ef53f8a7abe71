"""vLLM's schedulers, extended to learn when contents of a stage's KV cache are lost.

After a loss, a scheduler of swapd preempts all running requests and forgets prefixes, and vLLM
computes the needed contents again. Each loss has a number. The scheduler sends the last number that
it knows with every step, so the worker recognises a step that was scheduled before a loss. The
worker computes that step all the same, because it must see the requests in it; the results are
discarded.

If the scheduler runs in the worker's process, the worker makes vLLM use this one, which takes the
lease before it looks up prefixes. For another process the configuration names it (`scheduler_cls`),
and the results of steps tell it of losses. vLLM's own scheduler instead learns which lost blocks a
step has read, as if a KV connector had failed to load them, and computes requests again from the
first such block on.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput

from swapd_client.log import log
from swapd_client.tracing import are_provided
from swapd_client.vllm.kv import note, steps_of
from swapd_client.vllm.ranks import ranks_of
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.kv_cache import StageCache
from swapd_client.vllm.stage.streaming import ChunkStreaming

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Above
    from vllm.v1.kv_cache_interface import KVCacheConfig
else:
    _Above = object

#: Makes the message to a scheduler about a step; None if all of the step counts.
StepVerdict = Callable[[], KVConnectorOutput | None]

#: Added attribute of a `SchedulerOutput`: the last loss that its scheduler knew.
_KNOWN_LOSS = "swapd_known_loss"


@dataclass
class LossOutput(KVConnectorOutput):  # type: ignore[misc]
    loss: int = 0


class LossAwareScheduler(_Above):  # type: ignore[misc]
    """Mixed into a scheduler class of vLLM, as first base."""

    #: In the worker's process: the stage whose lease it takes before it looks up prefixes.
    swapd: ClassVar[Stage | None] = None
    _known_loss = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.swapd
        if stage is None or stage.begun or not self.has_unfinished_requests():
            output = super().schedule(*args, **kwargs)
        else:
            output = self._schedule_leased(stage, *args, **kwargs)
        setattr(output, _KNOWN_LOSS, self._known_loss)
        return output

    def _schedule_leased(self, stage: Stage, *args: Any, **kwargs: Any) -> Any:
        if self.finished_req_ids:
            stage.note((), self.finished_req_ids)  # else they would prolong the turn
        stage.begin()
        try:
            self._handle_loss(stage.components.losses)
            output = super().schedule(*args, **kwargs)
        except BaseException:
            stage.end()
            raise
        if output.total_num_scheduled_tokens <= 0:
            stage.end()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        verdict = model_runner_output.kv_connector_output
        if isinstance(verdict, LossOutput):
            model_runner_output.kv_connector_output = None
            self._handle_loss(verdict.loss)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _handle_loss(self, loss: int) -> None:
        if loss > self._known_loss:
            self._known_loss = loss
            self.reset_prefix_cache(reset_running_requests=True)


class ChunkCountingScheduler(_Above):  # type: ignore[misc]
    """Mixed into vllm-omni's scheduler, as first base: tells its stage how many chunks it sent."""

    stage: ClassVar[Stage]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (adapter := getattr(self, "chunk_transfer_adapter", None)) is None:
            return _counts_no_chunks(self.stage, "leave out model_runner: v2")
        streaming, first = self.stage.turns.streaming, not self.vllm_config.model_config.stage_id
        receives = adapter.receives_chunks and not first
        streaming.begin_with(lambda: dict(adapter.put_req_chunk), receives=receives)
        adapter.connector.get = _looked(adapter.connector.get, streaming)


class TracedScheduler(_Above):  # type: ignore[misc]
    """Mixed into a scheduler class of vLLM, as first base: tells its stage all traces."""

    stage: ClassVar[Stage]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage.turns.headers = self._headers

    def _headers(self) -> list[Mapping[str, str]]:
        return [headers for r in list(self.requests.values()) if (headers := r.trace_headers)]


class Scheduler(LossAwareScheduler, VllmScheduler):  # type: ignore[misc]
    """For `scheduler_cls`, where the worker has a process of its own."""


class AsyncScheduler(LossAwareScheduler, VllmAsyncScheduler):  # type: ignore[misc]
    """For `async_scheduling`."""


def _looked(get: Callable[..., Any], streaming: ChunkStreaming) -> Callable[..., Any]:
    def look(*args: Any, **kwargs: Any) -> Any:
        found = get(*args, **kwargs)
        streaming.looked(found=found is not None)
        return found

    return look


def reporting_of(config: Any, cache: "KVCacheConfig", *, second_runner: bool) -> tuple[bool, str]:
    """Return whether the scheduler learns of losses by number, and a remedy if not at all."""
    if problem := _problem_with_numbers(config, second_runner=second_runner):
        unreported = second_runner or _problem_with_blocks(config, cache)
        return False, problem if unreported else ""
    return True, ""


def _problem_with_numbers(config: Any, *, second_runner: bool) -> str:
    if _is_told_by_all(config):
        return "set distributed_executor_backend: mp, where one rank reports for all"
    base = config.scheduler_config.get_scheduler_cls()
    if issubclass(base, LossAwareScheduler):
        return ""
    if config.parallel_config.distributed_executor_backend != "uni":
        mine = AsyncScheduler if issubclass(base, VllmAsyncScheduler) else Scheduler
        if base in (VllmScheduler, VllmAsyncScheduler):
            return f"set scheduler_cls: {mine.__module__}.{mine.__name__}"
        if ranks_of(config.parallel_config) > 1:
            return "set tensor_parallel_size: 1, and no pipeline_parallel_size"
        return "set distributed_executor_backend: uni"
    if not issubclass(base, VllmScheduler) or _is_of_generation(base):
        remedy = "leave out model_runner: v2" if second_runner else "set async_scheduling: false"
        return f"{base.__name__} computes nothing again: {remedy}"
    return ""


def _problem_with_blocks(config: Any, cache: "KVCacheConfig") -> str:
    """Return why the scheduler does not compute the contents of lost blocks again.

    A scheduler of vLLM goes back in a request to the first lost block, and leaves the request in
    place. That is sound if
    - it is vLLM's own, or vllm-omni's of generation stages, in the version for one step at a time:
      no other undoes its plans from a dropped step, or the steps ahead of it;
    - the request has all blocks from there on: requests give back blocks before a sliding window;
    - a block is complete after at most two parts of a prompt, because two requests may share it,
      and only one of them must compute it.

    vLLM 0.30 to 0.33 do this alike. For layers in several groups 0.30 restarts such a request, and
    the others raise an error. Model Runner V2 does not go back in a request, in any of them.
    """
    scheduler = config.scheduler_config
    base = scheduler.get_scheduler_cls()
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    problems = (
        (
            base is not VllmScheduler and not _is_of_generation(base),
            f"{base.__name__} is not vLLM's own",
        ),
        (_is_told_by_all(config), "each rank may lose blocks that others have"),
        (
            scheduler.async_scheduling or config.parallel_config.pipeline_parallel_size > 1,
            "steps are scheduled ahead",
        ),
        (config.speculative_config is not None, "a drafter has a cache as well"),
        (config.parallel_config.decode_context_parallel_size > 1, "a block is in several ranks"),
        (
            len(specs) > 1 or not all(map(_has_all_blocks, specs)),
            "requests have given back blocks that would be computed again",
        ),
        (
            0 < scheduler.long_prefill_token_threshold < specs[0].block_size,
            "a part of a prompt is shorter than a block",
        ),
    )
    return next((why for is_so, why in problems if is_so), "")


def _is_told_by_all(config: Any) -> bool:
    """Return whether each rank reports a step, or vLLM is not known to ask only one."""
    parallel = config.parallel_config
    return bool(parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend != "mp")


def _has_all_blocks(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)  # one kind of layers in several sizes
    specs = list(inner.values()) if inner else [spec]
    return all(isinstance(one, FullAttentionSpec) for one in specs)


def use_loss_aware(config: Any, stage: Stage) -> None:
    """Make vLLM use a scheduler that learns of losses by number. Call it before vLLM makes it."""
    if config.parallel_config.distributed_executor_backend != "uni":
        return
    base = config.scheduler_config.get_scheduler_cls()
    # other schedulers may schedule nothing for long, while requests wait for another stage
    first = base in (VllmScheduler, VllmAsyncScheduler, Scheduler, AsyncScheduler)
    _extend(config, LossAwareScheduler, swapd=stage if first else None)


def use_chunk_counting(config: Any, stage: Stage) -> None:
    """Make vLLM use a scheduler that counts the chunks it sends. Call it before vLLM makes it."""
    if not getattr(config.model_config, "async_chunk", False):
        return
    if config.parallel_config.distributed_executor_backend != "uni":
        return _counts_no_chunks(stage, "set distributed_executor_backend: uni")
    _extend(config, ChunkCountingScheduler, stage=stage)


def _counts_no_chunks(stage: Stage, remedy: str) -> None:
    log.info(
        "%s streams, but gives way between requests only; to give way inside of them: %s",
        stage.name,
        remedy,
    )


def use_traced(config: Any, stage: Stage) -> None:
    """Make vLLM use a scheduler that reports traces. Call it last, after `use_loss_aware`."""
    if config.parallel_config.distributed_executor_backend == "uni" and are_provided():
        _extend(config, TracedScheduler, stage=stage)


def _extend(config: Any, mixin: type, **attributes: Stage | None) -> None:
    base = config.scheduler_config.get_scheduler_cls()
    bases = (base,) if issubclass(base, mixin) else (mixin, base)
    config.scheduler_config.scheduler_cls = type(base.__name__, bases, attributes)


def verdict_of(cache: StageCache, scheduler_output: Any, *, reports: bool = True) -> StepVerdict:
    """Return a function that makes the message about a step, once the step has its lease.

    Call the function when the step has computed: by then the other ranks have counted their losses.
    `reports`: whether vLLM takes the output of this rank. Raises: CacheLost, if the step would read
    lost blocks and the scheduler cannot learn of it.
    """
    note(cache.in_use, scheduler_output)
    if cache.counts_alone and getattr(scheduler_output, _KNOWN_LOSS, 0) >= cache.losses:
        return all_counts
    cache.publish_losses()
    if cache.counts.ranks > 1 and not cache.terms.unreported:
        return partial(_verdict_of_ranks, cache, scheduler_output) if reports else all_counts
    said = _verdict_of(cache, scheduler_output)
    return lambda: said


def _verdict_of(cache: StageCache, scheduler_output: Any) -> KVConnectorOutput | None:
    if cache.terms.by_number:
        heard, losses = getattr(scheduler_output, _KNOWN_LOSS, 0), cache.counts.total
        return LossOutput(loss=losses) if heard < losses else None
    gone = cache.read(steps_of(cache, scheduler_output))
    return KVConnectorOutput(invalid_block_ids=gone) if gone else None


def _verdict_of_ranks(cache: StageCache, scheduler_output: Any) -> KVConnectorOutput | None:
    if not cache.terms.by_number:
        cache.take_in_losses()
    return _verdict_of(cache, scheduler_output)


def all_counts() -> None:
    """The message about a step that counts, and of a rank that vLLM does not ask."""


def verdict_of_fence(cache: StageCache) -> KVConnectorOutput | None:
    """Return the message about a step that may have computed on others' memory.

    None: the scheduler cannot learn of it. Only for the rank whose output vLLM takes: in another
    rank this is too late, because the step's output may be out already.
    """
    return LossOutput(loss=cache.count_doubtful()) if cache.terms.by_number else None


def with_verdict(output: Any, verdict: StepVerdict) -> Any:
    """Return a step's result with the message about what does not count. Raises as `verdict`."""
    if isinstance(output, AsyncModelRunnerOutput):
        output.__class__, output.swapd_verdict = _counting(output.__class__), verdict
        return output
    if (said := verdict()) is None:
        return output
    output = copy.copy(output)
    output.kv_connector_output = said
    return output


@cache
def _counting(kind: Any) -> type:
    def get_output(self: Any) -> Any:
        return with_verdict(kind.get_output(self), self.swapd_verdict)

    return type(kind.__name__, (kind,), {"get_output": get_output})


def _is_of_generation(base: type) -> bool:
    return any(one.__name__ == "OmniGenerationScheduler" for one in base.__mro__)
