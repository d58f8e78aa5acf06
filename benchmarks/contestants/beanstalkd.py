"""beanstalkd with its binlog, through greenstalk."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

if TYPE_CHECKING:
    import greenstalk

__all__ = ["Beanstalkd"]

_FSYNC_MS = 50  # beanstalkd's own default


@dataclass(frozen=True, slots=True)
class Beanstalkd:
    name: str = "beanstalkd"
    client: str = "greenstalk"

    def missing(self) -> str | None:
        if shutil.which("beanstalkd") is None:
            return "apt-get install beanstalkd"
        return None if importlib.util.find_spec("greenstalk") else "pip install greenstalk"

    def version(self) -> str:
        return output_of("beanstalkd", "-v").rpartition(" ")[2]

    def promise(self, level: Level) -> str:
        if level is Level.FSYNC:
            return "fsync before confirm (-f 0)"
        return f"OS; fsync every {_FSYNC_MS} ms"

    def start(self, directory: Path, level: Level) -> Server:
        server = Server(free_port())
        fsync_ms = 0 if level is Level.FSYNC else _FSYNC_MS
        command = ["beanstalkd", "-l", "127.0.0.1", "-p", str(server.port), "-b", str(directory)]
        launch(server, [*command, "-f", str(fsync_ms)], directory / "beanstalkd.log")
        return server

    def declare(self, port: int, queue: str) -> None:
        """A tube exists from its first job on."""

    def connect(self, port: int, queue: str) -> _Client:
        import greenstalk

        return _Client(greenstalk.Client(("127.0.0.1", port), encoding=None, use=queue, watch=queue))


class _Client:
    """greenstalk has no pipelining, so many and each are the same here."""

    def __init__(self, connection: greenstalk.Client[bytes]) -> None:
        self._connection = connection

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        self.publish_each(bodies)

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self._connection.put(body)

    def publish_paced(self, schedule: Schedule) -> None:
        self.publish_each(schedule)

    def consume(self, sink: Sink) -> None:
        waiting: list[bytes] = []
        wanted = True
        while wanted:
            job = self._connection.reserve()
            waiting.append(job.body)
            self._connection.delete(job)
            if len(waiting) >= sink.chunk:
                wanted = sink(waiting)
                waiting = []

    def close(self) -> None:
        self._connection.close()
