"""OpenTelemetry spans of an acquire's wait: the loads and evictions made for it.

A thread makes the spans after the acquire, with its times: a provider that is slow, or raises,
costs only spans. The daemon needs no OpenTelemetry: the reply to a `traced` acquire has its part
(`protocol.Account`). The API is imported only if a program asks for spans; a current span has
already imported it.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd.shared.system import LimitError, start
from swapd_client.errors import BY_CODE, SwapdError
from swapd_client.log import log
from swapd_client.session.session import Session

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

API = "opentelemetry.trace"
#: Key in a context: spans of further requests to link.
LINKS = "swapd-links"

#: Acquires beyond this number get no spans until others are made.
UNMADE_MAX = 1024
CLOSE_S = 2.0

#: For errors that this process found.
_CODES: dict[type[BaseException], str] = {kind: code for code, kind in BY_CODE.items()}


class Trace(msgspec.Struct, eq=False):
    """One acquire, as a `with` block, at whose end the spans are made."""

    tracing: "Tracing"
    names: tuple[str, ...]
    context: "Context"
    account: protocol.Account | None = None
    granted: protocol.Granted | None = None
    #: Code or kind of the error, and its text. The exception itself would keep frames alive.
    error: tuple[str, str] | None = None
    tried: bool = False
    sent: float = 0.0
    ended: float = 0.0

    def __enter__(self) -> "Trace":
        self.sent = time.monotonic()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, where: object) -> None:
        self.ended = time.monotonic()
        if exc is not None:
            code, said = (exc.code, str(exc)) if isinstance(exc, SwapdError) else (None, "")
            self.error = code or _CODES.get(type(exc), type(exc).__name__), said
        self.tracing.hand_over(self)

    def marked(self, request: protocol.AnyAcquire) -> protocol.AnyAcquire:
        self.tried = request.timeout_s == 0
        return msgspec.structs.replace(request, traced=True)

    def answered(self, reply: protocol.AnyReply) -> None:
        if isinstance(reply, protocol.Granted | protocol.Refused):
            self.account = reply.account
        if isinstance(reply, protocol.Granted):
            self.granted = reply


class Tracing:
    """The tracing of one client. Thread-safe."""

    def __init__(self, wanted: bool | None, attributes: Mapping[str, Any]) -> None:
        self._wanted = wanted
        self._attributes = dict(attributes)
        self._unmade: queue.Queue[Trace | None] = queue.Queue(UNMADE_MAX)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._warned = False

    def begin(self, names: tuple[str, ...]) -> Trace | None:
        """Start a trace for an acquire that asks the daemon; None if it gets no spans."""
        if self._wanted is False or (trace := sys.modules.get(API)) is None:
            return None
        try:
            current = trace.get_current_span().get_span_context()
            if current.is_valid and not current.trace_flags.sampled:
                return None
            if not (self._wanted or current.is_valid):
                return None
            from opentelemetry import context

            return Trace(self, names, context.get_current())
        except Exception as exc:  # noqa: BLE001 - foreign code, perhaps half imported
            self._warn(exc)
            return None

    def hand_over(self, trace: Trace) -> None:
        """Have the spans made soon. Does not block, and raises nothing."""
        try:
            if self._thread is None:
                self._start()
            self._unmade.put_nowait(trace)
        except (queue.Full, LimitError) as exc:
            self._warn(exc)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="swapd-traces", daemon=True)
                start(thread)
                self._thread = thread

    def _run(self) -> None:
        # a full queue had no room for the None of `close`
        while not (self._closed and self._unmade.empty()) and (trace := self._unmade.get()):
            try:
                _make(trace, self._attributes)
            except Exception as exc:  # noqa: BLE001 - providers, samplers, exporters may raise any
                self._warn(exc)

    def _warn(self, exc: Exception) -> None:
        if not self._warned:
            self._warned = True
            why = "the provider is too slow for them" if isinstance(exc, queue.Full) else repr(exc)
            log.warning(
                "acquires have no spans, and later ones go unreported: %s. They work on: fix the "
                "OpenTelemetry provider of this process, or connect with tracing=False",
                why,
            )

    def close(self) -> None:
        """Make the remaining spans, for CLOSE_S at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        with suppress(queue.Full):
            self._unmade.put(None, timeout=CLOSE_S)
        thread.join(CLOSE_S)


def check_installed(wanted: bool | None) -> None:
    """Raise MissingExtra if tracing is `wanted` and the API is not installed."""
    if wanted:
        with needed("tracing=True"):
            import opentelemetry.trace  # noqa: F401


def tracing_of(session: Session, given: bool | Tracing | None) -> Tracing:
    if isinstance(given, Tracing):
        return given
    about = {"swapd.device": session.welcome.device, "swapd.session": session.welcome.session}
    return Tracing(given, about)


@contextmanager
def in_traces_of(headers: Callable[[], Sequence[Mapping[str, str]]]) -> Iterator[None]:
    """Make acquires in this `with` block join the trace of the first of these `traceparent`
    headers.

    Headers are W3C's. The traces of further headers are linked.
    """
    token = None
    with suppress(Exception):  # headers come from requests
        token = _attach(headers())
    try:
        yield
    finally:
        if token is not None:
            from opentelemetry import context

            context.detach(token)


def _attach(headers: Sequence[Mapping[str, str]]) -> Any:
    """Make another context current and return its token, if there is one."""
    if not headers or API not in sys.modules:
        return None
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract = TraceContextTextMapPropagator().extract
    found = [extract(header) for header in headers]
    spans = [trace.get_current_span(one).get_span_context() for one in found]
    valid = [i for i, span in enumerate(spans) if span.is_valid]
    if not valid:
        return None
    # prefer sampled traces: without sampling, acquires get no spans
    valid.sort(key=lambda i: not spans[i].trace_flags.sampled)
    links = [spans[i] for i in valid[1:] if spans[i].trace_flags.sampled]
    return context.attach(context.set_value(LINKS, links, found[valid[0]]))


def are_provided() -> bool:
    """Whether this process has a span provider."""
    trace = sys.modules.get(API)
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


# --- in the thread -----------------------------------------------------------------------


def _make(trace: Trace, attributes: Mapping[str, Any]) -> None:
    from opentelemetry import context
    from opentelemetry import trace as api

    clock = _Clock(trace)
    tracer = api.get_tracer("swapd_client")
    others = context.get_value(LINKS, trace.context)
    span = tracer.start_span(
        "swapd.acquire",
        trace.context,
        api.SpanKind.CLIENT,
        {**attributes, **_said_of(trace)},
        [api.Link(other) for other in others] if isinstance(others, list) else None,
        clock.own(trace.sent),
    )
    try:
        if trace.error is not None and not _is_skipped(trace):
            code, said = trace.error
            span.set_status(api.Status(api.StatusCode.ERROR, f"{code}: {said}" if said else code))
        inside = api.set_span_in_context(span, trace.context)
        for move in trace.account.moves if trace.account else ():
            _make_move(tracer, inside, move, trace, clock)
    finally:
        span.end(clock.own(trace.ended))


def _make_move(
    tracer: "Tracer", inside: "Context", move: protocol.Move, trace: Trace, clock: "_Clock"
) -> None:
    said: dict[str, Any] = {
        "swapd.component": move.name,
        "swapd.bytes": move.nbytes,
        "swapd.record": move.record,
    }
    if move.kind == "evict":
        said["swapd.reason"] = move.why
    elif move.why:
        said["error.type"] = "device_failed"
    if move.ended_s is None:
        said["swapd.unfinished"] = True
    span: Span = tracer.start_span(
        f"swapd.{move.kind}", inside, attributes=said, start_time=clock.daemons(move.began_s)
    )
    if move.kind == "load" and move.why:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, move.why))
    ended = clock.own(trace.ended) if move.ended_s is None else clock.daemons(move.ended_s)
    span.end(ended)


def _is_skipped(trace: Trace) -> bool:
    """Whether an acquire with a timeout of 0 found no room, which is no error."""
    return trace.tried and trace.error is not None and trace.error[0] == "timeout"


def _said_of(trace: Trace) -> dict[str, Any]:
    said: dict[str, Any] = {"swapd.components": list(trace.names)}
    if trace.error is not None:
        said["swapd.skipped" if _is_skipped(trace) else "error.type"] = (
            True if _is_skipped(trace) else trace.error[0]
        )
    if granted := trace.granted:
        said |= {
            "swapd.lease": granted.id,
            "swapd.hit": not granted.loaded,
            "swapd.waited_s": granted.waited_s,
        }
    if account := trace.account:
        moved = {"load": 0, "evict": 0}
        for move in account.moves:
            moved[move.kind] += move.nbytes
        said |= {
            "swapd.bytes_in": moved["load"],
            "swapd.bytes_back": moved["evict"],
            "swapd.record": account.record,
        }
        if account.waits_for:
            said["swapd.waits_for"] = account.waits_for
        if account.left_out:
            said["swapd.moves_left_out"] = account.left_out
    return said


class _Clock:
    """Converts an acquire's times to nanoseconds since 1970."""

    def __init__(self, trace: Trace) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        #: Correction for a container with a clock of its own: the reply is taken to arrive at once.
        self._shift_s = 0.0
        answered = trace.account.answered_s if trace.account else trace.ended
        if not trace.sent <= answered <= trace.ended:
            self._shift_s = trace.ended - answered

    def own(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns

    def daemons(self, monotonic_s: float) -> int:
        return self.own(monotonic_s + self._shift_s)
