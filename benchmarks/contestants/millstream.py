"""Millstream itself, through its SDK."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.bodies import Schedule
from benchmarks.contestants.abreast import publish_by_tasks, run_fast
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch

__all__ = ["Millstream"]

_LINGER_MS = 5
_PREFETCH = 20_000


@dataclass(frozen=True, slots=True)
class Millstream:
    fsync: str = "group"
    visible: str = "confirmed"
    client: str = "millstream"
    leases: bool = True
    partitions: int = 1
    keys: int = 0  # so many different ones, which spread messages over the partitions; 0 for none
    lanes: bool = False  # messages of all five priorities
    ordering: str = "none"
    fair_by: str = ""
    settings: tuple[str, ...] = ()  # of the broker, as KEY=VALUE

    @property
    def name(self) -> str:
        setting = self.visible if self.visible != "confirmed" else "" if self.fsync == "group" else self.fsync
        return f"Millstream {setting}".rstrip()

    def missing(self) -> str | None:
        if _binary() is None or importlib.util.find_spec("millstream") is None:
            return "pip install ."
        import millstream

        return None if hasattr(millstream, "connect") else "its client is not built yet"

    def version(self) -> str:
        return importlib.metadata.version("millstream")

    def promise(self, level: Level) -> str | None:
        if level is Level.FSYNC and (self.fsync, self.visible) != ("group", "confirmed"):
            return None  # where nobody reads, `visible` makes no difference
        if self.fsync != "group":
            return "OS; fsync every second"
        early = "; readers do not wait for it" if self.visible == "written" else ""
        return f"fsync before confirm{early} (group commit)"

    def start(self, directory: Path, _level: Level) -> Server:
        server = Server(free_port())
        command = [str(_binary()), "serve", "--data", str(directory), "--port", str(server.port)]
        command += ["--http-port", "0", "--mqtt-port", "0"]
        for setting in self.settings:
            command += ["--set", setting]
        launch(server, command, directory.with_suffix(".log"))
        return server

    def declare(self, port: int, queue: str) -> None:
        import millstream

        with millstream.connect(f"127.0.0.1:{port}") as client:
            client.create_topic(
                queue, partitions=self.partitions, config={"fsync": self.fsync, "visible": self.visible}
            )

    def connect(self, port: int, queue: str) -> _Client:
        return _Client(f"127.0.0.1:{port}", queue, self)


def _binary() -> str | None:
    return shutil.which("millstream", path=str(Path(sys.executable).parent)) or shutil.which("millstream")


class _Client:
    def __init__(self, address: str, topic: str, style: Millstream) -> None:
        import millstream

        self._address = address
        self._connection: Any = millstream.connect(address)
        self._topic = topic
        self._style = style
        self._keys = [b"%d-key" % number for number in range(style.keys)]

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        with self._connection.producer(self._topic, linger_ms=_LINGER_MS, acks="leader") as producer:
            send = producer.send
            if self._keys:
                for body, key in zip(bodies, cycle(self._keys), strict=False):
                    send(body, key=key)
            elif self._style.lanes:
                for body, priority in zip(bodies, cycle(range(5)), strict=False):
                    send(body, priority=priority)
            else:
                for body in bodies:
                    send(body)
            producer.flush()

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self._connection.publish(self._topic, body)

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        run_fast(self._publish_abreast(bodies, producers))

    async def _publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        from millstream import aio

        async with aio.connect(self._address) as client:
            await publish_by_tasks(partial(client.publish, self._topic), bodies, producers)

    def publish_paced(self, schedule: Schedule) -> None:
        with self._connection.producer(self._topic, linger_ms=0, acks="leader") as producer:
            for body in schedule:
                producer.send(body)
            producer.flush()

    def consume(self, sink: Sink) -> None:
        messages = iter(self._connection.stream(self._topic, group="bench", start="earliest"))
        while sink([message.value for message in islice(messages, sink.chunk)]):
            pass

    def work(self, sink: Sink) -> None:
        options = {"ordering": self._style.ordering, "fair_by": self._style.fair_by}
        messages = iter(self._connection.queue(self._topic, group="bench", prefetch=_PREFETCH, **options))
        wanted = True
        while wanted:
            bodies = []
            for message in islice(messages, sink.chunk):
                bodies.append(message.value)
                message.ack()
            wanted = sink(bodies)

    def close(self) -> None:
        self._connection.close()
