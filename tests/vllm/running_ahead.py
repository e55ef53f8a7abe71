"""Async scheduling on a CPU: vLLM schedules a step before it reads the last one.

vLLM leaves it out there: "not required". Importing this puts it back into engines of this process,
with streams and events that are none, for a call on a CPU is over when it returns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

_check = CpuPlatform.check_and_update_config.__func__


def _check_all_but_that(cls: type[CpuPlatform], config: Any) -> None:
    wanted = config.scheduler_config.async_scheduling
    _check(cls, config)
    config.scheduler_config.async_scheduling = wanted


class _Nothing:
    """A stream or an event of a device with an empty queue."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def _on(stream: object) -> Iterator[None]:
    yield


def _put_back() -> None:
    CpuPlatform.check_and_update_config = classmethod(_check_all_but_that)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = _Nothing
    cuda.stream = _on


_put_back()
