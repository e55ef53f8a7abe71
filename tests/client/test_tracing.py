"""OpenTelemetry: an acquire that asks the daemon has a span, which contains its waits."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from swapd import spawn
from swapd.core.actions import CopyIn, Grant
from swapd.log import reader
from swapd.shared import protocol
from swapd_client import (
    Client,
    ClientClosed,
    Timeout,
    TooLarge,
    UnknownComponent,
    connect,
    connect_async,
)
from swapd_client.tracing import API, Tracing, are_provided, in_traces_of
from tests.contents import bytes_of
from tests.guarantees.harness import World
from tests.processes import output_of
from tests.threads import started

MIB = 1 << 20
HALF = bytes(3 * MIB)

Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """The folder of a daemon with room for one of two components."""
    with spawn.daemon(budget="4MiB") as daemon:
        yield str(daemon.folder)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    made = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return made


def made_of(client: Client, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """All spans of a client, in order of their starts; closes the client."""
    client.close()
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def said_by(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def test_a_slow_acquire_shows_the_swap_that_made_it_slow(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder)
    client.register("painter", {"x": HALF}, mutable=True)
    client.register("talker", {"x": HALF})
    client.acquire("painter").release()
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("request") as request, client.acquire("talker"):
        pass
    spans = made_of(client, exporter)
    (acquire,) = named(spans, "swapd.acquire")
    (load,) = named(spans, "swapd.load")
    (evict,) = named(spans, "swapd.evict")
    assert acquire.parent == request.get_span_context()
    assert acquire.kind is SpanKind.CLIENT
    assert acquire.status.status_code is StatusCode.UNSET
    said = said_by(acquire)
    assert said["swapd.components"] == ("talker",)
    assert said["swapd.hit"] is False
    assert (said["swapd.bytes_in"], said["swapd.bytes_back"]) == (len(HALF), len(HALF))
    assert said["swapd.device"] == "host"
    assert said["swapd.waited_s"] > 0
    for move, name in ((load, "talker"), (evict, "painter")):
        assert move.parent == acquire.context
        assert said_by(move)["swapd.component"] == name
        assert said_by(move)["swapd.bytes"] == len(HALF)
        assert "swapd.unfinished" not in said_by(move)
        assert acquire.start_time is not None
        assert move.start_time is not None
        assert acquire.start_time <= move.start_time <= (move.end_time or 0)
        assert (move.end_time or 0) < (acquire.end_time or 0)
    assert said_by(evict)["swapd.reason"] == "room"


def test_a_load_that_an_early_lease_does_not_wait_for_is_unfinished(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder, tracing=True)
    client.register("talker", {"x": HALF})
    client.acquire("talker", early=True).release()
    acquire, load = made_of(client, exporter)
    assert said_by(load)["swapd.unfinished"] is True
    assert load.end_time == acquire.end_time


def test_a_span_has_the_records_of_the_swap_log(
    world: World, exporter: InMemorySpanExporter
) -> None:
    daemon = world.daemon()
    client = connect(daemon.folder, tracing=True)
    client.register("talker", {"x": HALF})
    client.acquire("talker").release()
    spans = made_of(client, exporter)
    daemon.terminate()
    daemon.wait()
    actions = {line.record.seq: line.record.action for line in reader.read(daemon.swap_log)}
    kinds = {span.name: type(actions[said_by(span)["swapd.record"]]) for span in spans}
    assert kinds == {"swapd.acquire": Grant, "swapd.load": CopyIn}


def test_there_are_none_where_no_span_is_current_and_none_are_wanted(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder)
    client.register("talker", {"x": HALF})
    client.acquire("talker").release()
    assert made_of(client, exporter) == []
    off = connect(folder, tracing=False)
    off.register("talker", {"x": HALF})
    with trace.get_tracer("test").start_as_current_span("request"):
        off.acquire("talker").release()
    assert [span.name for span in made_of(off, exporter)] == ["request"]


def test_what_is_not_sampled_asks_the_daemon_for_no_account(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with connect(folder, tracing=True) as client:
        with trace.get_tracer("test").start_as_current_span("request"):
            assert client.leasing.tracing.begin(("talker",)) is None
        assert client.leasing.tracing._thread is None


def test_a_refusal_is_an_error_of_its_span_and_a_try_is_none(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder, tracing=True)
    client.register("talker", {"x": HALF})
    with pytest.raises(TooLarge):
        client.acquire_workspace("1GiB")
    with pytest.raises(Timeout):
        client.acquire("talker", timeout=0)
    with pytest.raises(UnknownComponent):
        client.acquire("nobody")
    refused, tried, unknown = made_of(client, exporter)
    assert refused.status.status_code is StatusCode.ERROR
    assert said_by(refused)["error.type"] == "too_large"
    assert "1 GiB" in (refused.status.description or "")
    assert tried.status.status_code is StatusCode.UNSET
    assert said_by(tried)["swapd.skipped"] is True
    assert said_by(unknown)["error.type"] == "unknown_component"


def test_who_waits_for_a_holder_is_told_for_whom(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    with connect(folder, label="painter") as other:
        other.register("painter", {"x": bytes_of("painter", len(HALF))})
        client = connect(folder, tracing=True)
        client.register("talker", {"x": HALF})
        held = other.acquire("painter")
        waiting = started(lambda: client.acquire("talker").release())
        while not held.wanted and not other.status().waiting:
            pass
        held.release()
        other.leasing.giving_back.flush_kept()
        waiting.join()
        (acquire,) = named(made_of(client, exporter), "swapd.acquire")
    assert "painter" in said_by(acquire)["swapd.waits_for"]


def test_what_was_prefetched_and_is_coming_is_shown_as_it_began(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder, tracing=True)
    client.register_family("talker", {"a": {"x": bytes(MIB)}, "b": {"x": bytes(MIB)}})
    client.prefetch("talker")
    client.acquire("talker").release()
    client.acquire("talker/a").release()
    spans = made_of(client, exporter)
    first, again = named(spans, "swapd.acquire")
    loads = {said_by(load)["swapd.component"] for load in named(spans, "swapd.load")}
    assert loads <= {"talker/a", "talker/b"}  # the loads that had not ended by then
    assert said_by(first)["swapd.bytes_in"] == MIB * len(loads)
    assert said_by(again)["swapd.hit"] is True
    assert said_by(again)["swapd.bytes_in"] == 0


def test_a_lease_that_a_loop_keeps_has_no_span_each_time(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    client = connect(folder, tracing=True)
    client.register("talker", {"x": HALF})
    for _ in range(5):
        client.acquire("talker").release()
    assert len(named(made_of(client, exporter), "swapd.acquire")) == 2  # then the lease is kept


async def test_an_async_client_has_the_same(folder: str, exporter: InMemorySpanExporter) -> None:
    async with await connect_async(folder) as client:
        await client.register("talker", {"x": HALF})
        with trace.get_tracer("test").start_as_current_span("request") as request:
            async with client.acquire("talker"):
                pass
        with (
            trace.get_tracer("test").start_as_current_span("cancelled"),
            suppress(TimeoutError),
        ):
            async with asyncio.timeout(0):
                await client.acquire("nobody", await_registration=True)
    spans = exporter.get_finished_spans()
    first, second = named(spans, "swapd.acquire")
    assert first.parent == request.get_span_context()
    assert len(named(spans, "swapd.load")) == 1
    assert said_by(second)["error.type"] == "CancelledError"


def test_requests_of_others_are_the_parents_and_links_of_an_acquire(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    headers = [
        {"traceparent": "rubbish"},
        {"traceparent": f"00-{'a' * 32}-{'1' * 16}-00"},  # not sampled
        {"traceparent": f"00-{'b' * 32}-{'2' * 16}-01"},
        {"traceparent": f"00-{'c' * 32}-{'3' * 16}-01"},
    ]
    client = connect(folder)
    client.register("talker", {"x": HALF})
    with suppress(KeyError), in_traces_of(lambda: headers):
        client.acquire("talker").release()
        raise KeyError  # the trace ends with the block all the same
    assert not trace.get_current_span().get_span_context().is_valid
    (acquire,) = named(made_of(client, exporter), "swapd.acquire")
    assert acquire.parent is not None
    assert f"{acquire.parent.span_id:x}" == "2" * 16
    assert [f"{link.context.span_id:x}" for link in acquire.links] == ["3" * 16]


def test_a_process_has_spans_only_with_a_provider(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert are_provided()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert not are_provided()
    monkeypatch.delitem(sys.modules, API)
    assert not are_provided()


def test_headers_that_cannot_be_had_change_nothing() -> None:
    def headers() -> list[dict[str, str]]:
        raise AttributeError("a request of another version has none")

    with in_traces_of(headers):
        assert not trace.get_current_span().get_span_context().is_valid


# --- bad luck ----------------------------------------------------------------------------


class Raises(SpanProcessor):
    def on_start(self, span: object, parent_context: object = None) -> None:
        raise RuntimeError("no room")


class Slow(SpanProcessor):
    """Blocks until it is told to go on."""

    def __init__(self) -> None:
        self.has_one = threading.Event()
        self.goes_on = threading.Event()

    def on_end(self, span: object) -> None:
        self.has_one.set()
        self.goes_on.wait()


def provided(monkeypatch: pytest.MonkeyPatch, processor: SpanProcessor) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)


def test_a_provider_that_raises_costs_spans_and_is_said_once(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provided(monkeypatch, Raises())
    with connect(folder, tracing=True) as client:
        client.register("talker", {"x": HALF})
        for _ in range(3):
            client.acquire("talker", early=True).release()
            client.leasing.giving_back.flush_kept()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line for line in said if "no room" in line] == said
    assert len(said) == 1
    assert "tracing=False" in said[0]


def test_a_provider_that_is_slow_delays_no_acquire_and_no_close(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    provided(monkeypatch, slow)
    monkeypatch.setattr("swapd_client.tracing.CLOSE_S", 0.0)
    with connect(folder, tracing=True) as client:
        client.register("talker", {"x": HALF})
        for _ in range(3):
            client.acquire("talker").release()
            client.leasing.giving_back.flush_kept()
        thread = client.leasing.tracing._thread
    assert thread is not None
    assert thread.is_alive(), "all was done, and closed, while it was in the provider"
    slow.goes_on.set()
    thread.join()


def test_a_queue_that_is_full_leaves_spans_out_and_its_thread_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    provided(monkeypatch, slow)
    monkeypatch.setattr("swapd_client.tracing.UNMADE_MAX", 2)
    monkeypatch.setattr("swapd_client.tracing.CLOSE_S", 0.0)
    tracing = Tracing(True, {})
    for _ in range(8):
        begun = tracing.begin(("a",))
        assert begun is not None
        with begun:
            pass
        slow.has_one.wait()
    assert "too slow" in caplog.text
    tracing.close()
    slow.goes_on.set()
    assert tracing._thread is not None
    tracing._thread.join()


def test_a_forked_child_has_spans_of_its_own_and_waits_for_nothing(
    folder: str, exporter: InMemorySpanExporter
) -> None:
    with connect(folder, tracing=True) as client:
        client.register("talker", {"x": HALF})
        client.acquire("talker").release()
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os._exit(_as_child(client, folder))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_child(client: Client, folder: str) -> int:
    with suppress(ClientClosed):
        client.acquire("talker")
        return 1
    client.close()
    own = connect(folder, tracing=True)
    own.register("painter", {"x": b"1"})
    own.acquire("painter").release()
    own.close()
    return 0 if own.leasing.tracing._thread is not None else 2


def test_an_acquire_goes_on_if_what_is_current_cannot_be_asked(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise AttributeError("partially initialized module")

    monkeypatch.setattr(trace, "get_current_span", broken)
    with connect(folder) as client:
        client.register("talker", {"x": HALF})
        client.acquire("talker").release()


def test_a_client_imports_no_opentelemetry_of_its_own(folder: str) -> None:
    program = (
        "import sys, swapd_client\n"
        f"with swapd_client.connect({folder!r}) as client:\n"
        "    client.register('a', {'x': b'1'}); client.acquire('a').release()\n"
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    assert output_of(program, anew=True).split() == []


def test_what_is_not_traced_is_asked_and_answered_as_before() -> None:
    assert b"account" not in protocol.encode(protocol.Granted(1, ()))
    assert b"traced" not in protocol.encode(protocol.Acquire(1, ("a",)))
