"""An engine that takes its steps with the plugin around them and without, by turns."""

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from swapd_client.vllm.cpu import CPUWorker
from swapd_client.vllm.scheduler import LossAwareScheduler
from swapd_client.vllm.worker import SwapdWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Above
else:
    _Above = object

#: Steps of one side before the other's, of which the first is not counted.
STEPS = 8


class Sides:
    """Which side's turn it is, and the seconds of the steps of each."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.bare = False
        #: The lease of bare steps.
        self._lease = ExitStack()
        self._began = 0.0
        self._forward_s = 0.0
        #: Of the current block: seconds in the model's forward, and around it.
        self._taken: list[tuple[float, float]] = []
        #: Whether a step was bare, its seconds in the model's forward, and those around it.
        self.steps: list[tuple[bool, float, float]] = []

    def step(self, *, first: bool) -> None:
        """A step begins. `first`: of its requests, so the time before it was no step."""
        now = time.perf_counter()
        if first:
            self._taken = []
        else:
            self._taken.append((self._forward_s, now - self._began - self._forward_s))
        if len(self._taken) == STEPS:
            self.steps += [(self.bare, *taken) for taken in self._taken[1:]]
            self._taken = []
            self._change()
        self._forward_s = 0.0
        self._began = time.perf_counter()

    def forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            self._forward_s += time.perf_counter() - began

    def _change(self) -> None:
        self._lease.close()
        self.bare = not self.bare
        if self.bare:
            self._lease.enter_context(self._worker._swapd.using())
            for name in ("execute_model", "sample_tokens"):
                self._lease.callback(self._worker.__dict__.pop, name)
                setattr(self._worker, name, getattr(super(SwapdWorkerMixin, self._worker), name))


class Scheduler(_Above):  # type: ignore[misc]
    """Mixed into the scheduler of the plugin, or of vLLM: tells where a step begins."""

    sides: ClassVar[Sides]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.sides.step(first=not self.running)
        return self._of_side().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_side().update_from_output(*args, **kwargs)

    def _of_side(self) -> Any:
        bare = self.sides.bare and isinstance(self, LossAwareScheduler)
        return super(LossAwareScheduler if bare else Scheduler, self)


class Worker(CPUWorker):
    """The plugin's worker, on a CPU, whose steps are bare by turns."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._sides = Sides(self)
        model = self.model_runner.get_model()
        model.forward = partial(self._sides.forward, model.forward)
        config = self.vllm_config.scheduler_config
        base = config.get_scheduler_cls()
        config.scheduler_cls = type(base.__name__, (Scheduler, base), {"sides": self._sides})

    def steps(self) -> list[tuple[bool, float, float]]:
        """Whether a step was bare, its seconds in the model's forward, and those around it."""
        return self._sides.steps
