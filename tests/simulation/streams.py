"""Publishers and stream groups: nothing confirmed is lost, and no reader ever sees what is taken back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from millstream import aio
from millstream.errors import MillstreamError, ScheduleFired
from tests.simulation.history import Broken, Published
from tests.simulation.world import TROUBLE_S, World


class Publishers:
    """Some clients that publish to a topic, message after message or several at once."""

    def __init__(self, world: World, topic: str, *, messages: int, config: dict[str, str] | None = None) -> None:
        self.name = f"publishers of {topic}"
        self.topic = topic
        self._world = world
        self._random = world.random
        self._messages = messages
        self._config = config or {}
        if self._config.get("visible") == "written":
            world.history.shown_early.add(topic)
        if self._config.get("fsync", "group") != "group":
            world.history.unsynced.add(topic)
        self._started = 0
        self._partitions = self._random.randrange(1, 4)
        self._keys = self._random.choice((0, 2, 5))
        self._pause_s = TROUBLE_S / messages / 2
        #: Which of the things a message can carry are in use; most runs have few.
        extras = ("priority", "ttl", "delay")
        self._extras = set(self._random.sample(extras, self._random.choice((0, 1, 1, 2, 3))))

    async def start(self) -> None:
        world = self._world
        async with aio.connect(world.machine.address, client_id="admin", timeout_s=60, stay_awake=False) as client:
            await client.create_topic(self.topic, partitions=self._partitions, config=self._config, if_missing=True)
        self._actors = [world.act(f"publisher-{self.topic}-{n}", self._publish) for n in range(2)]

    @property
    def published(self) -> bool:
        return self._started >= self._messages

    async def drained(self) -> bool:
        """Everything has been published, and what was scheduled has come."""
        if not all(actor.done for actor in self._actors):
            return False
        log = set((await self._world.read_log(self.topic)).values())
        messages = self._world.history.published.values()
        scheduled = [m.id for m in messages if m.topic == self.topic and m.due_us is not None and m.must_come]
        missing = [id for id in scheduled if id not in log]  # noqa: A001
        self._world.history.note("not come yet", missing)
        return not missing

    async def _publish(self, client: aio.Client) -> None:
        while self._started < self._messages and not self._world.calm.is_set():
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            count = self._random.choice((1, 1, 1, 5))
            await asyncio.gather(*(self._publish_one(client) for _ in range(count)))

    async def _publish_one(self, client: aio.Client) -> None:
        self._started += 1
        key = f"k{self._random.randrange(self._keys)}" if self._keys else None
        message = Published(f"m{self._started}", self.topic, key)
        options = self._draw_options(message)
        self._world.history.publishing(message, options)
        try:
            receipt = await client.publish(self.topic, message.id, key=key, **options)
        except MillstreamError as error:
            self._world.history.note("unconfirmed", message.id, error.code)
            return
        self._world.history.confirmed(message.id, receipt.partition, receipt.offset)
        if message.due_us is not None and self._random.random() < 0.3:
            await self._cancel(client, message, receipt)

    async def _cancel(self, client: aio.Client, message: Published, receipt: aio.Receipt) -> None:
        """Take a schedule back, in time or too late."""
        history = self._world.history
        await asyncio.sleep(self._random.choice((0.0, 0.1, 2.0)))
        message.may_come = False
        history.note("cancel", message.id)
        try:
            await client.schedules.cancel(receipt)
        except ScheduleFired:
            message.may_come = True
            history.note("too late", message.id)
        except MillstreamError as error:
            history.note("unanswered", message.id, error.code)
        else:
            message.cancelled = True
            history.note("cancelled", message.id)

    def _draw_options(self, message: Published) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if "priority" in self._extras:
            options["priority"] = self._random.randrange(5)
        if "ttl" in self._extras and self._random.random() < 0.3:
            options["ttl"] = self._random.choice((0.5, 5.0, 60.0))
            message.expiry_us = round((time.time() + options["ttl"]) * 1_000_000)
        if "delay" in self._extras and self._random.random() < 0.3:
            options["delay"] = self._random.choice((0.2, 3.0, 30.0))
            message.due_us = round((time.time() + options["delay"]) * 1_000_000)
        return options

    async def check(self) -> None:
        self._world.history.check_log(self.topic, await self._world.read_log(self.topic))


class StreamGroup:
    """Members of a group that read a topic, come and go."""

    def __init__(
        self, world: World, topic: str, *, members: int, pauses_s: Sequence[float] = (0.0, 0.0, 0.01, 0.3)
    ) -> None:
        """`pauses_s`: how long members may take over a message."""
        self.name = f"stream group of {topic}"
        self.published = True
        self.topic = topic
        self._world = world
        self._members = members
        self._pauses_s = pauses_s
        self._handled: set[str] = set()

    async def start(self) -> None:
        for number in range(self._members):
            self._world.act(f"member-{number}", self._read)

    async def _read(self, client: aio.Client) -> None:
        history = self._world.history
        async with client.stream(self.topic, group="readers", start="earliest", session_ms=6_000) as stream:
            async for message in stream:
                history.note(
                    "read", client._target.client_id, message.partition, message.offset, message.value.decode()
                )
                history.saw(self.topic, message.partition, message.offset, message.value.decode())
                self._handled.add(message.value.decode())
                await asyncio.sleep(self._world.random.choice(self._pauses_s))

    def drained(self) -> bool:
        return not self._missing()

    def _missing(self) -> list[str]:
        return [
            message.id
            for message in self._world.history.published.values()
            if message.topic == self.topic and message.must_come and message.id not in self._handled
        ]

    async def check(self) -> None:
        if missing := self._missing():
            raise Broken(f"the group never read {missing}")
