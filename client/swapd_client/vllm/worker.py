"""The worker class of AR and generation stages: steps, new weights, sleep.

vLLM calls a worker's methods one after the other, in one thread.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from torch.nn import Module
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from swapd.shared import config
from swapd_client.errors import SessionFenced, SwapdError
from swapd_client.log import log
from swapd_client.vllm import refusals, scheduler
from swapd_client.vllm.ranks import ranks_of
from swapd_client.vllm.refusals import Unsupported
from swapd_client.vllm.worker_start import WorkerStart, during


# vLLM's own method raises if this version does not have it
@during(
    lambda worker: worker._swapd.using(),
    "add_lora",
    "pin_lora",  # activates the LoRA if it is not active
)
@during(
    lambda worker: worker._swapd.reading_all(),
    "save_sharded_state",
    "save_tensorized_model",
    "compute_weight_checksums",
    "apply_model",  # its function may read the weights; writing to them is a fault
)
class SwapdWorkerMixin(WorkerStart):
    """Mixed into a worker class of vLLM, as first base."""

    _change = ExitStack()
    _weight_update_active: bool
    #: Makes the message to the scheduler about the current step.
    _verdict: scheduler.StepVerdict = staticmethod(scheduler.all_counts)
    #: The same for the last step, in a rank whose output vLLM does not take.
    _unasked: scheduler.StepVerdict | None = None

    # --- steps ---------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        stage = self._swapd
        self._check_last_step()
        new, finished = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
        if new or finished:
            stage.note(map(_id_of, new), finished)
        # with data parallelism a replica without tokens may compute in step with the others
        alone = self.parallel_config.data_parallel_size <= 1
        if scheduler_output.total_num_scheduled_tokens <= 0 and alone:
            result = super().execute_model(scheduler_output)
            stage.rest()
            return result
        try:
            if (encoders := bool(scheduler_output.scheduled_encoder_inputs)) or not stage.begun:
                stage.begin(encoders=encoders)  # else the scheduler has begun it
            result = self._computed(scheduler_output)
        except BaseException as exc:
            stage.end()
            if isinstance(exc, SwapdError):
                self._end_with_others(exc)
            raise
        if result is not None:  # else sample_tokens follows, and uses weights too
            stage.end()
        return result

    def _computed(self, scheduler_output: Any) -> Any:
        if (cache := self._swapd.components.cache) is not None:
            self._verdict = scheduler.verdict_of(cache, scheduler_output, reports=self._reports)
        if (result := super().execute_model(scheduler_output)) is not None:
            result = self._counted(result)
        self._swapd.arrive()
        return result

    @property
    def _reports(self) -> bool:
        """Whether vLLM takes the output of this rank, the first at the end of the pipeline."""
        parallel = self.parallel_config
        return bool(self.rank == ranks_of(parallel) - parallel.tensor_parallel_size)

    def _end_with_others(self, error: SwapdError) -> None:
        """End this process unless vLLM takes its output.

        The other ranks compute this step and would wait for this rank for ever, but vLLM notices
        the end of a process.
        """
        if not self._reports:
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
        verdict, fence = self._verdict, self._swapd.fence()
        computed = isinstance(result, ModelRunnerOutput)
        if computed and verdict is scheduler.all_counts and fence() is None:
            return result
        verdict = partial(self._verdict_then, verdict, fence)
        if not self._reports and isinstance(result, AsyncModelRunnerOutput):
            self._unasked = verdict
        return scheduler.with_verdict(result, verdict)

    def _check_last_step(self) -> None:
        verdict, self._unasked = self._unasked, None
        if verdict is not None:
            verdict()

    def _verdict_then(
        self, verdict: scheduler.StepVerdict, fence: Callable[[], SessionFenced | None]
    ) -> Any:
        said = verdict()
        if (fenced := fence()) is None:
            return said
        cache = self._swapd.components.cache if self._reports else None
        if cache is None or (said := scheduler.verdict_of_fence(cache)) is None:
            stopped = self._swapd.connection.stop(fenced)
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

    # --- new weights -----------------------------------------------------------------------

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """If this fails, all weights are as they were."""
        with self._changing():
            super().reload_weights(*args, **kwargs)
        self._moving.warn_of_new(self._models())

    def reset_weights(self) -> None:
        """Set all weights to zero, so that a trainer can check that it writes to each of them."""
        with self._changing():
            super().reset_weights()

    def start_weight_update(self) -> None:
        self._start_change(super().start_weight_update)

    def start_draft_weight_update(self) -> None:
        self._start_change(super().start_draft_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """If this fails, all weights are as they were when the update started."""
        with self._undone_on_error():
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        with self._undone_on_error():
            super().finish_weight_update()
        self._change.close()
        self._moving.warn_of_new(self._models())

    def _start_change(self, start: Callable[[], None]) -> None:
        if self._weight_update_active:
            return start()  # it raises vLLM's own error
        with ExitStack() as stack:
            stack.enter_context(self._changing())
            start()
            self._change = stack.pop_all()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._swapd.memory.changing():
            try:
                yield
            except BaseException:
                _put_back(self._models())
                raise

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            if self._weight_update_active:  # vLLM leaves it so where the end fails
                self._weight_update_active = False
                self.weight_transfer_engine.reset_weight_update_target()
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
        raise Unsupported(refusals.CHECKPOINT)

    def checkpoint_restore(self) -> None:
        raise Unsupported(refusals.CHECKPOINT)

    def elastic_ep_execute(self, execute_method: str, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(refusals.ELASTIC)

    def shutdown(self) -> None:
        with self._starting(to_the_end=True):
            super().shutdown()
        if (stage := self.__dict__.get("_swapd")) is not None:
            stage.close()


_id_of = attrgetter("req_id")


def _put_back(models: Mapping[str, Module]) -> None:
    """Give layers their parameters back, which vLLM takes from them until all new ones are there.

    Else they stay without, and vLLM would count what had come as part of the next update.
    """
    for layer in chain.from_iterable(model.modules() for model in models.values()):
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


if config.is_disabled():
    SwapdWorkerMixin = type("Nothing", (), {})  # type: ignore[misc,assignment]


class Worker(SwapdWorkerMixin, VllmWorker):  # type: ignore[misc]
    """For vLLM alone, on a GPU."""

    _of_type = ""
