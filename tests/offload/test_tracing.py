"""A call of an attached model, under a span: its trace has the swaps that it caused."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swapd import spawn
from swapd_client import connect, connect_async
from tests.client.test_tracing import exporter

__all__ = ["exporter"]  # a fixture

#: Float32 of 4 MiB.
ROWS = 1024


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thinker = torch.nn.Linear(1024, ROWS, bias=False)
        self.talker = torch.nn.Linear(1024, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.talker(self.thinker(x))
        return out


X = torch.ones(1, 1024)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with spawn.daemon(budget="6MiB") as daemon:
        yield daemon.folder


def swapped(exporter: InMemorySpanExporter, request: trace.Span) -> list[str]:
    """The components loaded for acquires of that request."""
    spans = exporter.get_finished_spans()
    own = {s.context.span_id for s in spans if _is_of(s, request) and s.context is not None}
    loads = [s for s in spans if s.name == "swapd.load" and s.parent and s.parent.span_id in own]
    return sorted(str((load.attributes or {})["swapd.component"]) for load in loads)


def _is_of(span: ReadableSpan, request: trace.Span) -> bool:
    return span.name == "swapd.acquire" and span.parent == request.get_span_context()


def test_a_call_of_an_attached_model_has_its_swaps(
    folder: Path, exporter: InMemorySpanExporter
) -> None:
    model = Model()
    with connect(folder) as client, torch.inference_mode():
        client.attach(model, ["thinker", "talker"])
        model(X)
        with trace.get_tracer("test").start_as_current_span("request") as request:
            model(X)
    assert swapped(exporter, request) == ["talker", "thinker"]


async def test_so_has_one_that_is_called_in_a_thread_of_an_async_program(
    folder: Path, exporter: InMemorySpanExporter
) -> None:
    model = Model()
    async with await connect_async(folder) as client:
        with torch.inference_mode():
            await client.attach(model, ["thinker", "talker"])
        with trace.get_tracer("test").start_as_current_span("request") as request:
            await asyncio.to_thread(torch.inference_mode()(model), X)
    assert swapped(exporter, request) == ["talker", "thinker"]
