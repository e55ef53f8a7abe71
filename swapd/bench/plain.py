"""The baseline of a swap-in: the simplest copy of as many bytes onto the device.

On the host that is `torch.Tensor.copy_`; on a GPU one cudaMemcpyAsync from pinned memory, which
is the driver's cuMemcpyHtoDAsync.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple


class Copier(NamedTuple):
    """`copy` blocks until all bytes are copied, in `threads` threads of the host."""

    copy: Callable[[], object]
    threads: int


def copier(device: str, nbytes: int) -> AbstractContextManager[Copier]:
    """A copier of `nbytes` bytes onto `device`, with its own memory. Raises: DeviceError."""
    return _on_host(nbytes) if device == "host" else _on_gpu(device, nbytes)


@contextmanager
def _on_host(nbytes: int) -> Iterator[Copier]:
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    yield Copier(lambda: target.copy_(source), torch.get_num_threads())


@contextmanager
def _on_gpu(device: str, nbytes: int) -> Iterator[Copier]:
    from swapd.device.driver import Driver

    driver = Driver(int(device.partition(":")[2] or 0))
    with ExitStack() as undo:
        undo.callback(driver.close)
        undo.enter_context(driver.current())
        stream = driver.stream()
        undo.callback(driver.destroy_stream, stream)
        source = driver.allocate_pinned(nbytes)
        undo.callback(driver.free_pinned, source)
        target = int(driver.call(driver.api.cuMemAlloc, nbytes))
        undo.callback(driver.call, driver.api.cuMemFree, target)

        def copy() -> None:
            driver.copy_to_device(target, source, nbytes, stream)
            driver.finish(stream)

        yield Copier(copy, 1)
