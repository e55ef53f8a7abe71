"""Copies this process's GPU memory to host copies, through a ring of pinned memory.

While one place is emptied into a host copy, the GPU fills the others. Without pinned memory the
driver copies one piece at a time, and the GPU idles in between. Pinning the host copy itself would
take longer than the copy, and hold driver locks that other processes' copies need.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from swapd.device.base import DeviceLost
from swapd.device.context import CudaError
from swapd.device.driver import Driver
from swapd.shared import vm
from swapd_client.memory.layout import RemoteBytes

PLACES = 4
PLACE_BYTES = 4 << 20


class _Fetch(NamedTuple):
    event: Any
    place: int
    target: int
    nbytes: int


def fetch(driver: Driver, spans: Sequence[RemoteBytes]) -> str:
    """Copy the contents as of the work done by now. Blocks. The context must be current.

    If nothing can be pinned, copies without, and returns the reason. Raises: DeviceError, after all
    copies have ended.
    """
    with ExitStack() as undo:
        stream = driver.stream()
        undo.callback(_quietly, driver.destroy_stream, stream)
        try:
            ring = driver.allocate_pinned(PLACES * PLACE_BYTES)
        except CudaError as exc:
            undo.callback(_quietly, driver.finish, stream)
            for span in spans:
                driver.copy_to_host(span.target, span.source, span.nbytes, stream)
            return str(exc)
        undo.callback(_quietly, driver.free_pinned, ring)
        events = []
        for _ in range(PLACES):
            events.append(event := driver.event())
            undo.callback(_quietly, driver.destroy_event, event)
        undo.callback(_quietly, driver.finish, stream)  # runs first after an error
        _through(driver, stream, [ring + n * PLACE_BYTES for n in range(PLACES)], events, spans)
    return ""


def _through(
    driver: Driver,
    stream: Any,
    places: Sequence[int],
    events: Sequence[Any],
    spans: Iterable[RemoteBytes],
) -> None:
    flying: deque[_Fetch] = deque()
    for number, span in enumerate(_cut(spans)):
        if len(flying) == len(places):
            _land(driver, flying.popleft())
        place, event = places[number % len(places)], events[number % len(places)]
        driver.copy_to_host(place, span.source, span.nbytes, stream)
        driver.record(event, stream)
        flying.append(_Fetch(event, place, span.target, span.nbytes))
    for piece in flying:
        _land(driver, piece)


def _land(driver: Driver, piece: _Fetch) -> None:
    driver.synchronize(piece.event)
    vm.copy(piece.target, piece.place, piece.nbytes)


def _cut(spans: Iterable[RemoteBytes]) -> Iterator[RemoteBytes]:
    for target, source, nbytes in spans:
        for at in range(0, nbytes, PLACE_BYTES):
            yield RemoteBytes(target + at, source + at, min(PLACE_BYTES, nbytes - at))


def _quietly(call: Any, argument: Any) -> None:
    with suppress(DeviceLost):  # then it is gone already
        call(argument)
