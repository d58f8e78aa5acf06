"""A whole broker on a simulated disk, without sockets: for tests of what survives and what is promised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.broker.broker import Broker, FetchAnswer, Session
from millstream.config import Settings
from millstream.errors import MillstreamError
from millstream.records import Batch, encode_batch
from millstream.testing.storage import SimulatedStorage
from millstream.wire import queue_calls
from millstream.wire.leases import LeasePart, LeaseRequest, Scope, Settle, SettleEntry
from millstream.wire.messages import FetchRequest, PublishRequest
from tests.native import Delivered, delivered


@dataclass
class Client:
    """Talks to a broker without a socket, as every door does."""

    broker: Broker
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.broker.open_session(namespace="default", client_id="test", address="", push=lambda _: None)

    async def call(self, call: object) -> object:
        return await self.broker.call(self.session, call)

    def send(
        self,
        values: list[bytes],
        *,
        topic: str = "orders",
        partition: int = 0,
        producer: int = 0,
        sequence: int = 0,
        label: int = 3,
    ) -> asyncio.Future[int]:
        """`label` is what the confirmation has to promise; the default policy promises the disk."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def confirmed(error: MillstreamError | None, promised: int, base: int, _time: int, _again: bool) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                assert promised == label, "what was asked for is what is promised"
                future.set_result(base)

        batch = encode_batch(values, base_timestamp_us=1, producer=producer << 16, first_sequence=sequence)
        self.broker.publish(self.session, PublishRequest(topic, partition, 1, 0, memoryview(batch)), confirmed)
        self.broker.flush()
        return future

    async def open_queue(self, topic: str = "orders", **options: Any) -> int:
        opened = await self.call(queue_calls.OpenQueue(topic=topic, **options))
        assert isinstance(opened, queue_calls.QueueOpened)
        return opened.consumer

    async def lease(self, consumer: int, most: int = 100, *, wait_ms: int = 0) -> list[Delivered]:
        future: asyncio.Future[Sequence[LeasePart] | MillstreamError] = asyncio.get_running_loop().create_future()
        self.broker.lease(self.session, LeaseRequest(consumer, most, 1 << 20, wait_ms), future.set_result)
        answer = await future
        if isinstance(answer, MillstreamError):
            raise answer
        return delivered(answer)

    async def settle(self, kind: Settle, *messages: Delivered, value: int = -1, reason: str = "") -> list[int]:
        future: asyncio.Future[Sequence[int] | MillstreamError] = asyncio.get_running_loop().create_future()
        entries = [SettleEntry(kind, m.part.nonce, Scope.ONE, m.offset, value, reason=reason) for m in messages]
        self.broker.settle(self.session, entries, lambda answer: future.done() or future.set_result(answer))
        answer = await future
        if isinstance(answer, MillstreamError):
            raise answer
        return list(answer)

    async def read_all(self, topic: str = "orders") -> list[bytes | None]:
        values: list[bytes | None] = []
        offset = 0
        while True:
            future: asyncio.Future[FetchAnswer | MillstreamError] = asyncio.get_running_loop().create_future()
            self.broker.fetch(self.session, FetchRequest(topic, 0, offset, 1 << 20, 0), future.set_result)
            answer = await future
            if isinstance(answer, MillstreamError):
                raise answer
            data = b"".join(answer.buffers)
            if not data:
                return values
            at = 0
            while at < len(data):
                batch = Batch.parse(data, at)
                values += [v for v, o in zip(batch.values(), batch.offsets(), strict=True) if o >= offset]
                at += batch.header.length
            offset = answer.next_offset


async def started(storage: SimulatedStorage, **options: Any) -> Client:
    """`options` of the section `storage`."""
    settings = Settings.model_validate({"storage": {"free_bytes_min": 0, "segment_bytes": 16_384, **options}})
    broker = Broker(settings, storage, rng=random.Random(storage.operations))  # another life draws other ids
    await broker.start()
    return Client(broker)


async def after_kill(client: Client, storage: SimulatedStorage) -> Client:
    """The broker is killed, and a new one starts on what it has written."""
    for task in client.broker._life.tasks:
        task.cancel()
    return await started(storage)


async def after_power_cut(client: Client, storage: SimulatedStorage, *, lose_everything: bool = False) -> Client:
    """The machine goes down with everything that ran on it, and a new broker starts on what the disk kept."""
    for task in client.broker._life.tasks:
        task.cancel()
    storage.heal()
    storage.power_cut(lose_everything=lose_everything)
    return await started(storage)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]
