"""Queue groups: consumers that ack, fail, give back, dawdle, ignore and die."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream import aio
from millstream.client.leases import QueueMessage
from millstream.errors import MillstreamError
from millstream.wire import queue_calls
from millstream.wire.leases import Settled
from tests.simulation.deliveries import Deliveries, Delivery
from tests.simulation.world import World


class QueueGroup:
    """One queue group with some consumers."""

    def __init__(self, world: World, topic: str, group: str) -> None:
        random = world.random
        self.name = f"queue {topic}/{group}"
        self.published = True
        self._world = world
        self._random = random
        self.topic = topic
        self.group = group
        ordering = random.choice(("none", "none", "key", "strict"))
        sync_acks = random.random() < 0.4
        self._consumers = random.randrange(1, 4)
        self._tasks = random.choice((1, 3))
        lease_s = random.choice((1, 3, 10))
        self._options: dict[str, Any] = {
            "prefetch": random.choice((1, 5, 100)),
            "lease": f"{lease_s}s",
            "auto_extend": random.random() < 0.5,
            "max_processing": f"{2 * lease_s}s",
            "policy": {
                "ordering": ordering,
                "ack_durability": "sync" if sync_acks else "async",
                "retry": random.choice(("simple", "standard,initial=200ms", "eager")),
                "processing_ms": 3_000 * lease_s,
            },
        }
        #: How consumers of this run behave; a seed of careful ones finds other things than one of careless ones.
        kinds = ("ack", "ack", "ack", "acked", "acked", "nack", "nacked", "reject", "rejected", "release", "ignore")
        self._habits = random.choice((("ack", "acked"), ("acked",), kinds, kinds))
        self._pause_s = random.choice((0.0, 0.05, lease_s * 0.7))
        self._deliveries = Deliveries(world, topic, group, ordering, sync_acks, lease_s)

    async def start(self) -> None:
        self._world.history.note("queue", self.name, self._options)
        for number in range(self._consumers):
            self._world.act(f"{self.group}-{number}", self._consume)

    async def _consume(self, client: aio.Client) -> None:
        name = client._target.client_id
        async with client.queue(self.topic, group=self.group, **self._options) as queue:
            tasks = [asyncio.create_task(self._work(queue, name)) for _ in range(self._tasks)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _work(self, queue: Any, consumer: str) -> None:
        while (message := await queue.next()) is not None:
            delivery = self._deliveries.delivered(message, consumer)
            calm = self._world.calm.is_set()
            if self._pause_s and not calm:
                await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            await self._settle(queue, message, delivery, "acked" if calm else self._random.choice(self._habits))

    async def _settle(self, queue: Any, message: QueueMessage, delivery: Delivery, habit: str) -> None:
        """Say something about a message: in passing, or (`acked`, `nacked`) waiting for the answer."""
        deliveries = self._deliveries
        retry_after = self._random.choice((None, "0s", "2s"))
        match habit:
            case "ack":
                deliveries.says(delivery, "ack")
                message.ack()
            case "nack":
                deliveries.says(delivery, "nack")
                message.nack("no luck", retry_after=retry_after)
            case "reject":
                deliveries.says(delivery, "reject")
                message.reject("not mine")
            case "release":
                deliveries.says(delivery, "release")
                message.release()
            case "ignore":
                self._world.history.note("ignore", delivery.id)
            case _:
                kind = {"acked": "ack", "nacked": "nack", "rejected": "reject"}[habit]
                deliveries.says(delivery, kind)
                try:
                    (result,) = await getattr(queue, kind)([message])
                except MillstreamError as error:
                    self._world.history.note("unanswered", delivery.id, error.code)
                else:
                    deliveries.answered(delivery, Settled(result))

    async def drained(self) -> bool:
        call = queue_calls.DescribeQueue(topic=self.topic, group=self.group)
        info: queue_calls.QueueInfo = await self._world.admin.call(call, queue_calls.QueueInfo)
        self._world.history.note("depth", self.name, info.depth, info.ready, info.leased, info.waiting)
        return not info.depth

    async def check(self) -> None:
        log = await self._world.read_log(self.topic)
        dead = await self._dead_letters()
        self._deliveries.check_fates(log, dead)
        self._deliveries.check_order(log, dead)

    async def _dead_letters(self) -> dict[str, int]:
        """How often each message of this group is a dead letter."""
        found: dict[str, int] = {}
        for message in await self._world.read(f"{self.topic}.dlq"):
            if message.headers["millstream-dead-group"] == self.group:
                id = message.value.decode()  # noqa: A001
                found[id] = found.get(id, 0) + 1
        return found
