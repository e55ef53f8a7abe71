"""A call that is unsafe beside a capture ends the capture without a graph."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver

from tests import fakecuda
from tests.fakecuda import calls
from tests.fakecuda.calls import call, code_of, memory, unmapped

MODES = driver.CUstreamCaptureMode
GLOBAL = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
LOCAL = MODES.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = MODES.CU_STREAM_CAPTURE_MODE_RELAXED

UNSUPPORTED, INVALIDATED, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 906, 907, 908


@pytest.fixture
def stream() -> Iterator[Any]:
    fake = fakecuda.loaded()
    calls.start()
    made = calls.stream()
    yield made
    call("cuStreamDestroy", made)
    assert fake.held_bytes() == 0
    calls.end()


@pytest.fixture
def event(stream: Any) -> Iterator[Any]:
    made = calls.event()
    yield made
    call("cuEventDestroy", made)


def ended(stream: Any) -> int:
    code, graph = driver.cuStreamEndCapture(stream)
    if not code:
        call("cuGraphDestroy", graph)
    return int(code)


def elsewhere(mode: Any, *query: Any) -> int:
    """The code of a call in another thread of that mode."""

    def ask() -> int:
        calls.use()
        call("cuThreadExchangeStreamCaptureMode", mode)
        return code_of(*query)

    return int(calls.in_thread(ask))


def here(mode: Any, *query: Any) -> int:
    before = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        return code_of(*query)
    finally:
        assert call("cuThreadExchangeStreamCaptureMode", before) == mode


def test_a_capture_that_is_left_alone_ends_well_and_nothing_of_it_is_done(
    stream: Any, event: Any
) -> None:
    address = memory()
    call("cuStreamBeginCapture", stream, GLOBAL)
    assert int(call("cuStreamIsCapturing", stream)) == 1
    call("cuMemsetD8Async", address, 5, 16, stream)
    call("cuEventRecord", event, stream)
    assert ended(stream) == 0
    assert int(call("cuStreamIsCapturing", stream)) == 0
    call("cuStreamSynchronize", stream)
    assert ctypes.string_at(address, 1) == b"\0"
    unmapped(address)


@pytest.mark.parametrize(
    ("captured", "asker", "mode", "spoils"),
    [
        (GLOBAL, elsewhere, GLOBAL, True),
        (GLOBAL, elsewhere, LOCAL, False),
        (GLOBAL, elsewhere, RELAXED, False),
        (LOCAL, elsewhere, GLOBAL, False),
        (GLOBAL, here, LOCAL, True),
        (LOCAL, here, GLOBAL, True),
        (GLOBAL, here, RELAXED, False),
        (RELAXED, here, GLOBAL, False),
    ],
)
@pytest.mark.parametrize("query", ["cuEventQuery", "cuMemGetInfo"])
def test_an_unsafe_call_spoils_the_captures_that_its_thread_is_to_respect(
    stream: Any,
    event: Any,
    captured: Any,
    asker: Callable[..., int],
    mode: Any,
    spoils: bool,
    query: str,
) -> None:
    call("cuStreamBeginCapture", stream, captured)
    arguments = (event,) if query == "cuEventQuery" else ()
    assert asker(mode, query, *arguments) == (UNSUPPORTED if spoils else 0)
    assert ended(stream) == (INVALIDATED if spoils else 0)


def test_what_captures_is_not_asked_in_any_mode(stream: Any, event: Any) -> None:
    call("cuStreamBeginCapture", stream, GLOBAL)
    assert here(RELAXED, "cuStreamQuery", stream) == UNSUPPORTED
    assert code_of("cuEventRecord", event, stream) == INVALIDATED
    assert ended(stream) == INVALIDATED
    call("cuStreamBeginCapture", stream, GLOBAL)
    call("cuEventRecord", event, stream)
    assert here(RELAXED, "cuEventQuery", event) == CAPTURED_EVENT
    assert ended(stream) == INVALIDATED
    call("cuStreamBeginCapture", stream, GLOBAL)
    assert here(RELAXED, "cuCtxSynchronize") == UNSUPPORTED
    assert ended(stream) == INVALIDATED
    call("cuEventRecord", event, stream)
    call("cuEventSynchronize", event)


def test_nobody_can_tell_of_the_default_stream_while_one_that_it_waits_for_captures(
    stream: Any,
) -> None:
    blocking = call("cuStreamCreate", 0)
    call("cuStreamBeginCapture", blocking, RELAXED)
    assert code_of("cuStreamIsCapturing", 0) == IMPLICIT
    assert ended(blocking) == 0
    call("cuStreamBeginCapture", blocking, RELAXED)
    assert code_of("cuStreamQuery", 0) == IMPLICIT
    assert ended(blocking) == INVALIDATED
    assert code_of("cuStreamQuery", 0) == 0
    call("cuStreamDestroy", blocking)


def test_a_capture_ends_where_it_began(stream: Any) -> None:
    def end() -> int:
        calls.use()
        return ended(stream)

    call("cuStreamBeginCapture", stream, GLOBAL)
    assert calls.in_thread(end) == WRONG_THREAD
    assert ended(stream) == INVALIDATED
    call("cuStreamBeginCapture", stream, RELAXED)
    assert calls.in_thread(end) == 0
