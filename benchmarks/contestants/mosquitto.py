"""Mosquitto, MQTT QoS 1 with a persistent session, through gmqtt."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

__all__ = ["Mosquitto"]

_UNCONFIRMED_MAX = 2000
_SESSION_SECONDS = 3600
_CONFIG = """
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {directory}/
autosave_interval 30
max_queued_messages 0
max_inflight_messages 0
set_tcp_nodelay true
user root
log_type error
"""


@dataclass(frozen=True, slots=True)
class Mosquitto:
    name: str = "Mosquitto QoS 1"
    client: str = "gmqtt"
    leases: bool = False

    def missing(self) -> str | None:
        if _binary() is None:
            return "apt-get install mosquitto"
        return None if importlib.util.find_spec("gmqtt") else "pip install gmqtt"

    def version(self) -> str:
        return output_of(str(_binary()), "-h").split()[2]

    def promise(self, level: Level) -> str | None:
        return None if level is Level.FSYNC else "memory; snapshot every 30 s"

    def start(self, directory: Path, _level: Level) -> Server:
        server = Server(free_port())
        config = directory / "mosquitto.conf"
        config.write_text(_CONFIG.format(port=server.port, directory=directory))
        launch(server, [str(_binary()), "-c", config], directory / "mosquitto.log")
        return server

    def declare(self, port: int, queue: str) -> None:
        # A session that subscribed and left: the broker queues for it from now on.
        with asyncio.Runner() as runner:
            runner.run(_subscribe_and_leave(port, queue))

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


def _binary() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class _Unconfirmed:
    """What was published and not yet confirmed: gmqtt's seam for storage, used here to wait."""

    def __init__(self) -> None:
        self._packets: dict[int, Any] = {}
        self._few = asyncio.Event()
        self._limit = 0

    def push_message(self, mid: int, raw_package: Any) -> None:
        self._packets[mid] = raw_package

    def remove_message_by_mid(self, mid: int) -> None:
        self._packets.pop(mid, None)
        if len(self._packets) <= self._limit:
            self._few.set()

    @property
    def is_empty(self) -> bool:
        return not self._packets

    def get_all(self) -> list[tuple[int, Any]]:
        return list(self._packets.items())

    def clear(self) -> None:
        self._packets.clear()
        self._few.set()

    async def wait_until_at_most(self, limit: int) -> None:
        self._limit = limit
        while len(self._packets) > limit:
            self._few.clear()
            await self._few.wait()

    async def wait_empty(self) -> None:
        await self.wait_until_at_most(0)


async def _open(port: int, name: str, *, clean: bool, storage: _Unconfirmed | None = None) -> Any:
    from gmqtt import Client as Connection

    properties = {} if clean else {"session_expiry_interval": _SESSION_SECONDS}
    connection = Connection(name, clean_session=clean, persistent_storage=storage, **properties)
    await connection.connect("127.0.0.1", port, keepalive=600)
    return connection


async def _subscribe_and_leave(port: int, queue: str) -> None:
    connection = await _open(port, f"consumer-{queue}", clean=False)
    subscribed = asyncio.Event()
    connection.on_subscribe = lambda *_: subscribed.set()
    connection.subscribe(queue, qos=1)
    await subscribed.wait()
    await connection.disconnect(session_expiry_interval=_SESSION_SECONDS)


class _Client:
    def __init__(self, port: int, queue: str) -> None:
        self._port = port
        self._queue = queue
        self._runner = asyncio.Runner()
        self._connection: Any = None
        self._unconfirmed: _Unconfirmed | None = None

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        self._runner.run(self._publish_many(bodies))

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        self._runner.run(self._publish_each(bodies))

    def publish_paced(self, schedule: Schedule) -> None:
        self._runner.run(self._publish_paced(schedule))

    def consume(self, sink: Sink) -> None:
        self._runner.run(self._consume(sink))

    def close(self) -> None:
        if self._connection is not None:
            self._runner.run(self._connection.disconnect())
        self._runner.close()

    async def _publisher(self) -> tuple[Any, _Unconfirmed]:
        if self._unconfirmed is None:
            self._unconfirmed = _Unconfirmed()
            # An empty name: the broker gives each producer its own.
            self._connection = await _open(self._port, "", clean=True, storage=self._unconfirmed)
        return self._connection, self._unconfirmed

    async def _publish_many(self, bodies: Sequence[bytes]) -> None:
        connection, unconfirmed = await self._publisher()
        step = _UNCONFIRMED_MAX // 2
        for start in range(0, len(bodies), step):
            for body in bodies[start : start + step]:
                connection.publish(self._queue, body, qos=1)
            await unconfirmed.wait_until_at_most(step)
        await unconfirmed.wait_empty()

    async def _publish_each(self, bodies: Iterable[bytes]) -> None:
        connection, unconfirmed = await self._publisher()
        for body in bodies:
            connection.publish(self._queue, body, qos=1)
            await unconfirmed.wait_empty()

    async def _publish_paced(self, schedule: Schedule) -> None:
        connection, unconfirmed = await self._publisher()
        async for body in schedule:
            connection.publish(self._queue, body, qos=1)
        await unconfirmed.wait_empty()

    async def _consume(self, sink: Sink) -> None:
        done = asyncio.Event()
        waiting: list[bytes] = []

        def take(_client: Any, _topic: str, body: bytes, _qos: int, _properties: Any) -> int:
            waiting.append(body)
            if len(waiting) >= sink.chunk and not done.is_set():
                if not sink(waiting[:]):
                    done.set()
                waiting.clear()
            return 0

        connection = await _open_consumer(self._port, f"consumer-{self._queue}", take)
        await done.wait()
        await connection.disconnect()


async def _open_consumer(port: int, name: str, take: Any) -> Any:
    from gmqtt import Client as Connection

    connection = Connection(name, clean_session=False, session_expiry_interval=_SESSION_SECONDS, receive_maximum=1000)
    connection.on_message = take  # before connecting: queued messages follow the CONNACK at once
    await connection.connect("127.0.0.1", port, keepalive=600)
    return connection
