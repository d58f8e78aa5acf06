"""An operator who sends dead letters again, to another topic, while everything else goes on."""

from __future__ import annotations

import asyncio

from millstream import aio
from millstream.errors import MillstreamError
from tests.simulation.history import Broken
from tests.simulation.world import World

TARGET = "again"


class Replays:
    """Each letter arrives once, whatever happens to the broker in the middle of a replay."""

    def __init__(self, world: World, topic: str) -> None:
        self.name = f"replays of {topic}.dlq"
        self.published = True
        self._world = world
        self._topic = topic

    async def start(self) -> None:
        async with aio.connect(
            self._world.machine.address, client_id="admin", timeout_s=60, stay_awake=False
        ) as client:
            await client.create_topic(TARGET, if_missing=True)
        self._world.act("operator", self._replay_now_and_then)

    async def _replay_now_and_then(self, client: aio.Client) -> None:
        random = self._world.random
        while not self._world.calm.is_set():
            await asyncio.sleep(random.expovariate(1 / 5))
            replay = await client.dead_letters.replay(topic=self._topic, target=TARGET, rate=random.choice((None, 2.0)))
            self._world.history.note("replay", replay.info)
            if random.random() < 0.2:
                await asyncio.sleep(random.expovariate(1))
                self._world.history.note("abort", (await replay.abort()).status)

    async def drained(self) -> bool:
        """The operator is done and so are all replays; then the rest of the letters is sent."""
        letters = self._world.admin.dead_letters
        if not all(replay.is_over for replay in await letters.replays()):
            return False
        left = await letters.list(topic=self._topic)
        self._world.history.note("letters", len(left))
        if left:
            try:
                await letters.replay(topic=self._topic, target=TARGET)
            except MillstreamError as error:
                self._world.history.note("not yet", error)
        return not left

    async def check(self) -> None:
        letters = {message.id for message in await self._world.read(f"{self._topic}.dlq")}
        sent = [str(message.headers["millstream-replayed-from"]) for message in await self._world.read(TARGET)]
        if len(sent) != len(set(sent)):
            raise Broken(f"letters were sent twice: {sorted(one for one in set(sent) if sent.count(one) > 1)}")
        if letters != set(sent):
            raise Broken(f"letters and what was sent differ: {sorted(letters ^ set(sent))}")
