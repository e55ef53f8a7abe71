"""vLLM's schedulers, so that they hear when what a stage's KV cache held is gone.

The contents of a cache that takes turns may be lost between two turns: it is dropped, or could not
be saved. Then all running requests are preempted and prefixes forgotten: vLLM computes what it
needs again, and no request ends. Each loss has a number. The scheduler says with every step which
it has heard of, so that the worker knows of a step that was scheduled before it had; such a step is
computed, for the worker must see the requests in it, and what comes out is thrown away.

In the worker's own process the worker has vLLM make this scheduler, and that takes the lease before
it looks for prefixes. In another process the configuration names it (`scheduler_cls`), and it hears
by what the worker returns. Lives here: the scheduler's side, and what goes to it.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput

from swapd_client.vllm.stage import Stage

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Above
else:
    _Above = object

#: What a `SchedulerOutput` has more: the number of the last loss its scheduler had heard of.
_HEARD = "swapd_heard"


@dataclass
class Lost(KVConnectorOutput):  # type: ignore[misc]
    """Of a step: it read from a cache whose contents were gone."""

    #: The number of that loss.
    loss: int = 0


class Hears(_Above):  # type: ignore[misc]
    """Mixed into a scheduler class of vLLM's, first."""

    #: In the worker's process: whose lease is taken before prefixes are looked up.
    swapd: ClassVar[Stage | None] = None
    #: The number of the last loss it has heard of.
    _heard = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.swapd
        if stage is None or stage.begun or not self.has_unfinished_requests():
            output = super().schedule(*args, **kwargs)
        else:
            output = self._schedule_leased(stage, *args, **kwargs)
        setattr(output, _HEARD, self._heard)
        return output

    def _schedule_leased(self, stage: Stage, *args: Any, **kwargs: Any) -> Any:
        """The step that is scheduled has its lease afterwards; none if there is nothing in it."""
        stage.note((), self.finished_req_ids)  # or the turn would last for these
        stage.begin()
        try:
            self._hear(stage.components.losses)
            output = super().schedule(*args, **kwargs)
        except BaseException:
            stage.end()
            raise
        if output.total_num_scheduled_tokens <= 0:
            stage.end()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        word = model_runner_output.kv_connector_output
        if isinstance(word, Lost):
            model_runner_output.kv_connector_output = None
            self._hear(word.loss)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _hear(self, loss: int) -> None:
        """Steps that are under way are thrown away, and all they were for is computed again."""
        if loss > self._heard:
            self._heard = loss
            self.reset_prefix_cache(reset_running_requests=True)


class Scheduler(Hears, VllmScheduler):  # type: ignore[misc]
    """vLLM's scheduler. For `scheduler_cls`, where the worker has a process of its own."""


class AsyncScheduler(Hears, VllmAsyncScheduler):  # type: ignore[misc]
    """The same, for `async_scheduling`."""


def problem_with(config: Any) -> str:
    """Why the scheduler of this configuration hears of no loss, and what to set; "" if it does."""
    if config.parallel_config.tensor_parallel_size > 1:
        return "set tensor_parallel_size: 1, for each rank may lose what others have"
    base = config.scheduler_config.get_scheduler_cls()
    if issubclass(base, Hears):
        return ""
    if config.parallel_config.distributed_executor_backend != "uni":
        mine = AsyncScheduler if issubclass(base, VllmAsyncScheduler) else Scheduler
        if base in (VllmScheduler, VllmAsyncScheduler):
            return f"set scheduler_cls: {mine.__module__}.{mine.__name__}"
        return "set distributed_executor_backend: uni"
    if not issubclass(base, VllmScheduler) or _is_of_generation(base):
        return f"{base.__name__} computes nothing again"
    return ""


def have_it_hear(config: Any, stage: Stage) -> None:
    """Have vLLM make a scheduler that hears, before it makes any, if it makes it in this process.

    Only where `problem_with` knows of none.
    """
    if config.parallel_config.distributed_executor_backend != "uni":
        return
    base = config.scheduler_config.get_scheduler_cls()
    # others schedule nothing for long at times, with requests that wait for another stage
    first = base in (VllmScheduler, VllmAsyncScheduler, Scheduler, AsyncScheduler)
    config.scheduler_config.scheduler_cls = type(
        base.__name__,
        (base,) if issubclass(base, Hears) else (Hears, base),
        {"swapd": stage if first else None},
    )


def is_void(scheduler_output: Any, losses: int) -> bool:
    """Whether a step was scheduled by a scheduler that had not heard of the last of `losses`."""
    return bool(getattr(scheduler_output, _HEARD, 0) < losses)


def void(output: Any, losses: int) -> Any:
    """What a step returns, with the word that nothing of it counts."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _Void(output, losses)
    output = copy.copy(output)
    output.kv_connector_output = Lost(loss=losses)
    return output


class _Void(AsyncModelRunnerOutput):  # type: ignore[misc]
    def __init__(self, output: Any, losses: int) -> None:
        self._output = output
        self._losses = losses

    def get_output(self) -> Any:
        return void(self._output.get_output(), self._losses)


def _is_of_generation(base: type) -> bool:
    """vllm-omni's for stages that make all in one step, and schedule by rules of their own."""
    return any(one.__name__ == "OmniGenerationScheduler" for one in base.__mro__)
