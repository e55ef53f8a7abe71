"""In an engine's process: a provider of OpenTelemetry spans, and those that were made.

By the API alone, for an environment with vLLM need not have the SDK.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    TracerProvider,
)

_made: list[dict[str, Any]] = []


class _Tracer(Tracer):
    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        *_: Any,
        **__: Any,
    ) -> Span:
        number = len(_made) + 1
        parent = trace.get_current_span(context).get_span_context()
        made = SpanContext(parent.trace_id or number, number, False, TraceFlags(1))
        _made.append(
            {
                "name": name,
                "trace": f"{made.trace_id:032x}",
                "parent": f"{parent.span_id:016x}",
                "components": list((attributes or {}).get("swapd.components", ())),
                "links": [f"{link.context.trace_id:032x}" for link in links or ()],
            }
        )
        return NonRecordingSpan(made)

    def start_as_current_span(self, *_: Any, **__: Any) -> Any:
        return trace.use_span(self.start_span("around"))


class _Provider(TracerProvider):
    def get_tracer(self, *_: Any, **__: Any) -> Tracer:
        return _Tracer()


def provide() -> None:
    """Set up a provider, as vLLM does with a configured endpoint for traces."""
    trace.set_tracer_provider(_Provider())


def made() -> list[dict[str, Any]]:
    """All spans begun so far."""
    return list(_made)
