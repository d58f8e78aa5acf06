"""OpenTelemetry spans of messages that carry a sampled `traceparent`: publish, store, deliver and settle.

Only where `traces.otlp_endpoint` is set; otherwise nothing of this is made, imported or asked.  A message is recognised
when it is published and remembered, up to a limit, until it is settled; what was published before the broker started
has no spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from millstream.broker.traces.recorder import Recorder
from millstream.clock import Clock
from millstream.errors import ConfigInvalid, MillstreamError
from millstream.headers import readable_headers
from millstream.ids import message_id
from millstream.records import Batch, BatchHeader, Columns
from millstream.traceparent import TRACEPARENT, TraceContext, context_of
from millstream.traces.records import Record
from millstream.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from millstream.broker.answers import PublishReply
    from millstream.broker.registry import Topic

__all__ = ["Spans", "open_provider"]

_log = structlog.get_logger("millstream.traces")

_HEADERS: Final = int(Columns.HEADERS)
_NEEDLE: Final = TRACEPARENT.encode()
#: Messages of one batch that get spans.
_BATCH_MAX: Final = 100
#: Messages that are remembered until they are settled.
_REMEMBERED_MAX: Final = 100_000
_SETTLES: Final = frozenset(("acked", "nacked", "timeout", "returned", "rejected"))
_EXPORT_S: Final = 5


class _Traced(NamedTuple):
    context: TraceContext
    topic: str
    append_us: int


def open_provider(endpoint: str, node_id: str) -> TracerProvider:
    """What makes spans and sends them.  Raises ConfigInvalid when the packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ConfigInvalid(
            f"traces.otlp_endpoint is set, but {missing.name} is not installed: pip install 'millstream[otel]'"
        ) from None
    attributes = {"service.name": "millstream", "service.version": VERSION, "service.instance.id": node_id}
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)))
    return provider


class Spans:
    """All methods are called on the event loop; spans are sent by a thread of the provider's."""

    def __init__(self, provider: TracerProvider, recorder: Recorder, *, clock: Clock) -> None:
        from opentelemetry import trace

        self._api: Any = trace
        self._provider = provider
        self._tracer = provider.get_tracer("millstream", VERSION)
        self._recorder = recorder
        self._clock = clock
        self._traced: dict[tuple[int, int], _Traced] = {}
        recorder.listeners.append(self._settled)

    def publishing(self, topic: Topic, uid: int, batch: memoryview, reply: PublishReply | None) -> PublishReply | None:
        """A batch came in: who is to be told when it is stored."""
        contexts = _contexts(batch)
        if not contexts:
            return reply
        came_us = self._clock.now_us()

        def stored(error: MillstreamError | None, label: int, base: int, append_us: int, again: bool) -> None:
            if reply is not None:
                reply(error, label, base, append_us, again)
            self._stored(topic, uid, contexts, came_us, error, base, append_us)

        return stored

    async def close(self) -> None:
        """Send what is left, if that does not take long."""
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            await asyncio.wait_for(loop.run_in_executor(None, self._provider.shutdown), _EXPORT_S)

    # --- spans ---------------------------------------------------------------------------------------------------

    def _stored(
        self,
        topic: Topic,
        uid: int,
        contexts: Sequence[tuple[int, TraceContext]],
        came_us: int,
        error: MillstreamError | None,
        base: int,
        append_us: int,
    ) -> None:
        now_us = self._clock.now_us()
        producer = self._api.SpanKind.PRODUCER
        for place, context in contexts:
            offset = base + place
            name = "" if error is not None else message_id(append_us, uid, offset)
            publish = self._span("publish", topic.name, self._remote(context), came_us, name, kind=producer)
            if error is not None:
                publish.set_status(self._api.StatusCode.ERROR, str(error))
            else:
                within = self._api.set_span_in_context(publish)
                self._span("store", topic.name, within, append_us, name).end(max(now_us, append_us) * 1000)
                self._remember(uid, offset, _Traced(context, topic.name, append_us))
            publish.end(now_us * 1000)

    def _settled(self, records: Sequence[Record]) -> None:
        """Deliveries have ended."""
        if not self._traced:
            return
        for record in records:
            if record.kind not in _SETTLES:
                continue
            uid = int.from_bytes(record.place)
            for subject in record.subjects:
                traced = self._traced.get((uid, subject.offset))
                if traced is not None and subject.trace is not None:
                    self._deliver(record, traced, message_id(traced.append_us, uid, subject.offset))

    def _deliver(self, record: Record, traced: _Traced, name: str) -> None:
        api = self._api
        deliver = self._span(
            "deliver",
            traced.topic,
            self._remote(traced.context),
            record.since_ms * 1000,
            name,
            kind=api.SpanKind.CONSUMER,
            attributes={"messaging.consumer.group.name": record.group, "messaging.client.id": record.consumer},
        )
        outcome: dict[str, str] = {"millstream.outcome": record.kind}
        within = api.set_span_in_context(deliver)
        settle = self._span("settle", traced.topic, within, record.time_ms * 1000, name, attributes=outcome)
        if record.kind != "acked":
            for span in (deliver, settle):
                span.set_status(api.StatusCode.ERROR, record.error or record.kind)
        settle.end(record.time_ms * 1_000_000)
        deliver.end(record.time_ms * 1_000_000)

    def _span(
        self,
        operation: str,
        topic: str,
        context: Any,
        start_us: int,
        name: str,
        *,
        kind: Any = None,
        attributes: dict[str, str] | None = None,
    ) -> Any:
        return self._tracer.start_span(
            f"{operation} {topic}",
            context=context,
            kind=kind or self._api.SpanKind.INTERNAL,
            start_time=start_us * 1000,
            attributes={
                "messaging.system": "millstream",
                "messaging.operation.name": operation,
                "messaging.destination.name": topic,
                "messaging.message.id": name,
                **(attributes or {}),
            },
        )

    def _remote(self, context: TraceContext) -> Any:
        api = self._api
        span = api.SpanContext(
            int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=api.TraceFlags(1)
        )
        return api.set_span_in_context(api.NonRecordingSpan(span))

    def _remember(self, uid: int, offset: int, traced: _Traced) -> None:
        self._traced[uid, offset] = traced
        if len(self._traced) > _REMEMBERED_MAX:
            del self._traced[next(iter(self._traced))]
        self._recorder.watch(uid, (offset,))


def _contexts(batch: memoryview) -> list[tuple[int, TraceContext]]:
    """Which messages of a batch belong to a trace that somebody wants to see; the first ones, if they are many."""
    with suppress(MillstreamError):  # what is wrong with it is said by whoever stores it
        if not BatchHeader(batch).flags & _HEADERS:
            return []
        parsed = Batch.parse(batch, verify=False)
        if _NEEDLE not in bytes(parsed.block):
            return []
        found = []
        for place, raw in enumerate(parsed.raw_headers() or ()):
            context = context_of(readable_headers(raw)) if raw else None
            if context is not None and context.sampled:
                found.append((place, context))
                if len(found) == _BATCH_MAX:
                    break
        return found
    return []
