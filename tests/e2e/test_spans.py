"""OpenTelemetry: clients pass the active span on, handlers run in spans, and the broker makes spans of its own."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.broker.traces.spans import Spans
from millstream.client import Client
from millstream.config import Settings
from millstream.errors import ConfigInvalid
from millstream.testing.broker import BrokerForTests

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.waiting import eventually, eventually_async

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENDER = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{SENDER}-01"}


@pytest.fixture(scope="module")
def mine() -> InMemorySpanExporter:
    """What this program exports; there is one provider for a program, whatever it does."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests() as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


@pytest.fixture
def theirs(broker: BrokerForTests) -> Iterator[InMemorySpanExporter]:
    """What the broker exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def begin() -> None:
        broker.broker.spans = Spans(provider, broker.broker.recorder, clock=broker.clock)

    async def end() -> None:
        broker.broker.spans = None
        broker.broker.recorder.listeners.clear()
        broker.broker.recorder.watched.clear()

    broker.run(begin())
    yield exporter
    broker.run(end())


def traceparent_of(client: Client, message_id: str) -> str:
    return dict(client.find(message_id).headers).get("traceparent", b"").decode()


# --- clients ---------------------------------------------------------------------------------------------------------


def test_what_is_published_within_a_span_belongs_to_it(mine: InMemorySpanExporter, client: Client) -> None:
    with trace.get_tracer("shop").start_as_current_span("order") as span:
        plain = client.publish("spans", b"x")
        (many,) = client.publish_many("spans", [b"y"])
        own = client.publish("spans", b"z", headers=HEADERS)
        shown = millstream.trace_headers()
    outside = client.publish("spans", b"x")

    context = span.get_span_context()
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    assert traceparent_of(client, plain.id) == traceparent_of(client, many.id) == expected
    assert shown == {"traceparent": expected}
    assert traceparent_of(client, own.id) == HEADERS["traceparent"]
    assert traceparent_of(client, outside.id) == ""


def test_a_program_without_opentelemetry_adds_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with trace.get_tracer("shop").start_as_current_span("order"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert millstream.trace_headers() == {}
        assert traceparent_of(client, client.publish("spans", b"x").id) == ""


def process_spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name.startswith("process ")]


def test_a_handler_runs_in_a_span_of_the_messages_trace(mine: InMemorySpanExporter, client: Client) -> None:
    mine.clear()
    sent = client.publish("handled", b"x", headers={**HEADERS, "tracestate": "shop=1"})
    inside: list[str] = []

    @client.worker("handled", group="billing")
    def handle(message: millstream.QueueMessage) -> None:
        inside.append(millstream.trace_headers()["traceparent"])
        assert message.trace_context is not None
        assert message.trace_context.trace_id == TRACE

    with handle:
        eventually(lambda: process_spans(mine))

    (span,) = process_spans(mine)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SENDER
    assert span.attributes is not None
    assert span.attributes["messaging.message.id"] == sent.id
    assert inside == [f"00-{TRACE}-{span.context.span_id:016x}-01"]
    assert span.context.trace_state.get("shop") == "1"


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_handlers_of_the_asynchronous_client_run_in_spans_too(
    broker: BrokerForTests, mine: InMemorySpanExporter, kind: str
) -> None:
    mine.clear()

    async def body() -> None:
        async with await aio.connect(broker.address) as client:
            await client.publish(f"handled.{kind}", b"x", headers=HEADERS)

            async def handle(message: Any) -> None:
                raise ValueError(millstream.trace_headers()["traceparent"])

            def handle_in_thread(message: Any) -> None:
                raise ValueError(millstream.trace_headers()["traceparent"])

            chosen = handle if kind == "coroutine" else handle_in_thread
            async with client.worker(f"handled.{kind}", group="billing")(chosen):
                await eventually_async(lambda: process_spans(mine))

    asyncio.run(body())
    span = process_spans(mine)[0]
    assert f"{span.context.trace_id:032x}" == TRACE
    assert not span.status.is_ok
    assert f"{span.context.span_id:016x}" in (span.status.description or "")


def test_a_reply_belongs_to_the_trace_of_its_request(mine: InMemorySpanExporter, client: Client) -> None:
    def answer(message: millstream.Message) -> None:
        message.reply(b"pong")

    with client.subscribe("asked") as asked:
        waiting = threading.Thread(target=lambda: answer(next(iter(asked))))
        waiting.start()
        reply = client.request("asked", b"ping", headers=HEADERS, timeout=10)
        waiting.join()

    assert reply.trace_context is not None
    assert reply.trace_context.trace_id == TRACE


# --- the broker ------------------------------------------------------------------------------------------------------


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]


def test_the_broker_makes_spans_of_messages_that_are_traced(client: Client, theirs: InMemorySpanExporter) -> None:
    client.publish("traced", b"untraced")
    client.publish("traced", b"unsampled", headers={"traceparent": f"00-{TRACE}-{SENDER}-00"})
    sent = client.publish("traced", b"x", headers=HEADERS)
    with client.queue("traced", group="billing", consumer="worker-1") as work:
        for message in work.lease(max=3, wait=10):
            message.ack()
    eventually(lambda: len(names(theirs)) == 4)

    assert sorted(names(theirs)) == ["deliver traced", "publish traced", "settle traced", "store traced"]
    spans = {span.name.split()[0]: span for span in theirs.get_finished_spans()}
    for span in spans.values():
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == sent.id
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    for name, parent in (("publish", SENDER), ("deliver", SENDER)):
        assert spans[name].parent is not None
        assert f"{spans[name].parent.span_id:016x}" == parent  # type: ignore[union-attr]
    assert spans["store"].parent == spans["publish"].context
    assert spans["settle"].parent == spans["deliver"].context
    assert spans["deliver"].attributes is not None
    assert spans["deliver"].attributes["messaging.consumer.group.name"] == "billing"


def test_a_failed_delivery_is_a_failed_span(client: Client, theirs: InMemorySpanExporter) -> None:
    client.publish("fails", b"x", headers=HEADERS)
    with client.queue("fails", group="billing") as work:
        (message,) = work.lease(wait=10)
        message.nack("db down", retry_after=0)
        (message,) = work.lease(wait=10)
        message.ack()
    eventually(lambda: names(theirs).count("settle fails") == 2)

    failed, fine = [span for span in theirs.get_finished_spans() if span.name == "deliver fails"]
    assert not failed.status.is_ok
    assert failed.status.description == "db down"
    assert fine.status.is_unset


def test_spans_are_sent_to_the_endpoint() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    got: list[tuple[str, bytes]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        with BrokerForTests(settings=Settings.model_validate({"traces": {"otlp_endpoint": endpoint}})) as broker:
            broker.connect().publish("orders", b"x", headers=HEADERS)
        server.shutdown()

    assert {path for path, _ in got} == {"/v1/traces"}
    assert bytes.fromhex(TRACE) in b"".join(body for _, body in got)
    assert b"store orders" in b"".join(body for _, body in got)


def test_an_endpoint_without_the_packages_is_a_mistake_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = Settings.model_validate({"traces": {"otlp_endpoint": "http://127.0.0.1:1/v1/traces"}})

    with pytest.raises(ConfigInvalid, match="millstream\\[otel\\]"), BrokerForTests(settings=settings):
        pass
