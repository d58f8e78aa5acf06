"""OpenTelemetry, for programs that use it: what they publish belongs to the span they are in.

Nothing here imports it.  A program that has a span has imported it already; one that has not pays for a look into a
dictionary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from millstream.headers import readable_headers
from millstream.traceparent import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from millstream.client.messages import Message

__all__ = ["handling", "trace_headers", "traced"]


def trace_headers() -> dict[str, str]:
    """The headers `traceparent` and `tracestate` of the span that is active here; empty if there is none."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return {}
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    headers = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"}
    state = context.trace_state.to_header()
    if state:
        headers[TRACESTATE] = state
    return headers


def traced(headers: Mapping[str, str | bytes] | None) -> Mapping[str, str | bytes] | None:
    """Headers with those of the active span, unless they have their own."""
    if "opentelemetry.trace" not in sys.modules:
        return headers
    ours = trace_headers()
    if not ours or (headers and TRACEPARENT in headers):
        return headers
    return {**(headers or {}), **ours}


def handling(message: Message) -> AbstractContextManager[Any]:
    """A span for what a handler does with a message, in the trace of the message."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return nullcontext()
    parent = None
    context = message.trace_context
    if context is not None:
        state = dict(readable_headers(message.raw_headers)).get(TRACESTATE, b"").decode("ascii", "ignore")
        remote = api.SpanContext(
            int(context.trace_id, 16),
            int(context.span_id, 16),
            is_remote=True,
            trace_flags=api.TraceFlags(int(context.sampled)),
            trace_state=api.TraceState.from_header([state]) if state else None,
        )
        parent = api.set_span_in_context(api.NonRecordingSpan(remote))
    span: AbstractContextManager[Any] = api.get_tracer("millstream").start_as_current_span(
        f"process {message.topic}",
        context=parent,
        kind=api.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "millstream",
            "messaging.operation.name": "process",
            "messaging.destination.name": message.topic,
            "messaging.destination.partition.id": str(message.partition),
            "messaging.message.id": message.id,
        },
    )
    return span
