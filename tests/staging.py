"""Staging messages without a socket, for tests of what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.errors import MillstreamError
from millstream.records import encode_batch
from millstream.wire.messages import PublishRequest
from millstream.wire.stage_calls import OpenStage, Published, PublishStages, StageOpened, StagePart, stage_address
from tests.simulated_broker import Client
from tests.waiting import eventually_async

__all__ = ["open_stage", "publish", "put", "seen", "stage_values"]


async def open_stage(client: Client, batch: int = 0, *, query: str = "q", task: int = 0, attempt: int = 0) -> str:
    opened = await client.call(OpenStage(query=query, batch=batch, task=task, attempt=attempt))
    assert isinstance(opened, StageOpened)
    return opened.stage


def put(
    client: Client, stage: str, values: list[bytes], *, topic: str = "orders", partition: int = 0, **columns: Any
) -> asyncio.Future[int]:
    """The number of messages before these in the stage, once they are on disk."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def confirmed(error: MillstreamError | None, _label: int, base: int, _time: int, _again: bool) -> None:
        if not future.done():
            if error is None:
                future.set_result(base)
            else:
                future.set_exception(error)

    batch = encode_batch(values, base_timestamp_us=1, **columns)
    request = PublishRequest(stage_address(stage, topic), partition, 1, 0, memoryview(batch))
    client.broker.publish(client.session, request, confirmed)
    client.broker.flush()
    return future


async def stage_values(client: Client, batch: int, *batches: list[bytes], query: str = "q", task: int = 0) -> StagePart:
    """A stage with these batches of values for `orders`."""
    stage = await open_stage(client, batch, query=query, task=task)
    await asyncio.gather(*(put(client, stage, values) for values in batches))
    return StagePart(stage=stage, batches=len(batches), messages=sum(map(len, batches)))


async def publish(client: Client, batch: int, *parts: StagePart, query: str = "q") -> Published:
    published = await client.call(PublishStages(query=query, batch=batch, stages=list(parts)))
    assert isinstance(published, Published)
    return published


async def seen(client: Client, count: int, topic: str = "orders") -> None:
    """Wait until a topic has so many messages."""

    async def enough() -> bool:
        return len(await client.read_all(topic)) >= count

    await eventually_async(enough, f"{count} messages in {topic}")
