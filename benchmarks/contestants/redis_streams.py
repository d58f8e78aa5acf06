"""Redis streams with an append-only file, through redis-py with the hiredis parser."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bodies import Schedule
from benchmarks.contestants.abreast import publish_by_tasks, run_fast
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

if TYPE_CHECKING:
    import redis

__all__ = ["RedisStreams"]

# Larger pipelines gain nothing and cost memory on both sides; smaller ones pay for round trips.
_PIPELINE = 500
_READ_COUNT = 1000
_READ_BLOCK_MS = 1000
_GROUP = "bench"


@dataclass(frozen=True, slots=True)
class RedisStreams:
    name: str = "Redis streams"
    client: str = "redis"
    leases: bool = True

    def missing(self) -> str | None:
        if shutil.which("redis-server") is None:
            return "apt-get install redis-server"
        return None if importlib.util.find_spec("redis") else "pip install redis hiredis"

    def version(self) -> str:
        return output_of("redis-server", "--version").partition("v=")[2].split()[0]

    def promise(self, level: Level) -> str:
        return "fsync before confirm (appendfsync always)" if level is Level.FSYNC else "OS; AOF fsync every second"

    def start(self, directory: Path, level: Level) -> Server:
        server = Server(free_port())
        policy = "always" if level is Level.FSYNC else "everysec"
        command = ["redis-server", "--port", str(server.port), "--bind", "127.0.0.1", "--dir", str(directory)]
        command += ["--appendonly", "yes", "--appendfsync", policy, "--save", "", "--daemonize", "no"]
        launch(server, command, directory / "redis.log")
        return server

    def declare(self, port: int, queue: str) -> None:
        with _connection(port) as connection:
            connection.xgroup_create(queue, _GROUP, id="0", mkstream=True)

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(port, queue)


def _connection(port: int) -> redis.Redis:
    import redis

    # RESP2: entries arrive as plain lists, which is the cheaper shape to take apart.
    return redis.Redis(port=port, protocol=2)


class _Client:
    def __init__(self, port: int, queue: str) -> None:
        self._port = port
        self._connection = _connection(port)
        self._queue = queue

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        pipeline = self._connection.pipeline(transaction=False)
        for start in range(0, len(bodies), _PIPELINE):
            for body in bodies[start : start + _PIPELINE]:
                pipeline.xadd(self._queue, {b"b": body})
            pipeline.execute()

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self._connection.xadd(self._queue, {b"b": body})

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        run_fast(self._publish_abreast(bodies, producers))

    async def _publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        import redis.asyncio

        # Its pool opens a connection for each task.  Measured: a quarter faster than as many threads.
        async with redis.asyncio.Redis(port=self._port, protocol=2) as connection:
            await publish_by_tasks(lambda body: connection.xadd(self._queue, {b"b": body}), bodies, producers)

    def publish_paced(self, schedule: Schedule) -> None:
        self.publish_each(schedule)

    def consume(self, sink: Sink) -> None:
        read_ids: list[bytes] = []
        wanted = True
        while wanted:
            # One round trip settles the last read and asks for the next.
            pipeline = self._connection.pipeline(transaction=False)
            if read_ids:
                pipeline.xack(self._queue, _GROUP, *read_ids)
            pipeline.xreadgroup(_GROUP, "c", {self._queue: ">"}, count=_READ_COUNT, block=_READ_BLOCK_MS)
            answer: Any = pipeline.execute()[-1]
            entries = answer[0][1] if answer else []
            read_ids = [entry_id for entry_id, _ in entries]
            if entries:
                wanted = sink([fields[b"b"] for _, fields in entries])
        self._connection.xack(self._queue, _GROUP, *read_ids)

    def work(self, sink: Sink) -> None:
        self.consume(sink)  # a group of a stream knows no other way: every id is acknowledged

    def close(self) -> None:
        self._connection.close()
