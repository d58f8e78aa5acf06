"""RabbitMQ streams over their own protocol (the plugin rabbitmq_stream), through rstream."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.contestants.rabbitmq import rabbitmq_missing, rabbitmq_version, start_node
from benchmarks.servers import Server, free_port

if TYPE_CHECKING:
    from rstream import ConfirmationStatus

__all__ = ["RabbitMqStream"]

_BATCH = 500
_UNCONFIRMED_MAX = 10_000
_STORE_EVERY = 1000  # a stored position is a record in the stream itself, so not one for each message
_CREDIT = 20  # chunks that may be on their way to a consumer
_WHO: dict[str, Any] = {"username": "guest", "password": "guest"}


@dataclass(frozen=True, slots=True)
class RabbitMqStream:
    name: str = "RabbitMQ stream"
    client: str = "rstream"  # AMQP with pika, the other way in, published ten times slower
    leases: bool = False

    def missing(self) -> str | None:
        return rabbitmq_missing() or (None if importlib.util.find_spec("rstream") else "pip install rstream")

    def version(self) -> str:
        return rabbitmq_version()

    def promise(self, level: Level) -> str | None:
        return None if level is Level.FSYNC else "OS; fsync left to the operating system"

    def start(self, directory: Path, _level: Level) -> Server:
        server = Server(free_port())
        settings = [
            f"stream.listeners.tcp.1 = 127.0.0.1:{server.port}",
            "stream.advertised_host = 127.0.0.1",
            f"stream.advertised_port = {server.port}",
        ]
        start_node(server, directory, amqp_port=free_port(), plugins=["rabbitmq_stream"], settings=settings)
        return server

    def declare(self, port: int, queue: str) -> None:
        asyncio.run(_declare(port, queue))

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


async def _declare(port: int, queue: str) -> None:
    from rstream import Producer

    async with Producer("127.0.0.1", port, **_WHO) as producer:
        await producer.create_stream(queue)


class _Client:
    def __init__(self, port: int, queue: str) -> None:
        self._port = port
        self._queue = queue
        self._runner = asyncio.Runner()
        self._producer: Any = None
        self._sent = 0
        self._confirmed = 0
        self._progress = asyncio.Event()

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        self._runner.run(self._publish_many(bodies))

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        self._runner.run(self._publish_each(bodies))

    def publish_paced(self, schedule: Schedule) -> None:
        self._runner.run(self._publish_paced(schedule))

    def consume(self, sink: Sink) -> None:
        self._runner.run(self._consume(sink))

    def close(self) -> None:
        if self._producer is not None:
            self._runner.run(self._producer.close())
        self._runner.close()

    async def _open_producer(self) -> Any:
        from rstream import Producer

        if self._producer is None:
            self._producer = Producer("127.0.0.1", self._port, **_WHO)
            await self._producer.start()
        return self._producer

    async def _publish_many(self, bodies: Sequence[bytes]) -> None:
        producer = await self._open_producer()
        for start in range(0, len(bodies), _BATCH):
            await self._send(producer, bodies[start : start + _BATCH])
            await self._wait_until_unconfirmed(_UNCONFIRMED_MAX)
        await self._wait_until_unconfirmed(0)

    async def _publish_each(self, bodies: Iterable[bytes]) -> None:
        producer = await self._open_producer()
        for body in bodies:
            await producer.send_wait(self._queue, body)

    async def _publish_paced(self, schedule: Schedule) -> None:
        producer = await self._open_producer()
        async for body in schedule:
            await self._send(producer, [body])
        await self._wait_until_unconfirmed(0)

    async def _send(self, producer: Any, bodies: Sequence[bytes]) -> None:
        self._sent += len(bodies)
        await producer.send_batch(self._queue, bodies, on_publish_confirm=self._settle)

    def _settle(self, status: ConfirmationStatus) -> None:
        if not status.is_confirmed:
            raise RuntimeError(f"RabbitMQ refused message {status.message_id}: {status.response_code}")
        self._confirmed += 1
        self._progress.set()

    async def _wait_until_unconfirmed(self, allowed: int) -> None:
        while self._sent - self._confirmed > allowed:
            self._progress.clear()
            await self._progress.wait()

    async def _consume(self, sink: Sink) -> None:
        from rstream import Consumer, ConsumerOffsetSpecification, OffsetType

        consumer = Consumer("127.0.0.1", self._port, **_WHO)
        await consumer.start()
        waiting: list[bytes] = []

        async def take(body: Any, context: Any) -> None:
            waiting.append(body)
            if context.offset % _STORE_EVERY == _STORE_EVERY - 1:
                await consumer.store_offset(self._queue, "bench", context.offset)
            if len(waiting) < sink.chunk:
                return
            if not sink(waiting[:]):
                consumer.stop()
            waiting.clear()

        await consumer.subscribe(
            self._queue,
            take,
            offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST, None),
            initial_credit=_CREDIT,
            subscriber_name="bench",
        )
        await consumer.run()
        await consumer.close()
