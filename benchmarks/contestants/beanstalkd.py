"""beanstalkd with its binlog, through a client of our own: the published ones cannot pipeline."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bodies import Schedule
from benchmarks.contestants.contract import Level, Sink
from benchmarks.servers import Server, free_port, launch, output_of

__all__ = ["Beanstalkd"]

_FSYNC_MS = 50  # beanstalkd's own default
_PIPELINE = 500
_LEASE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Beanstalkd:
    name: str = "beanstalkd"
    client: str = "own, pipelined"
    leases: bool = True

    def missing(self) -> str | None:
        return "apt-get install beanstalkd" if shutil.which("beanstalkd") is None else None

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
        return _Client(port, queue)


class _Client:
    """Commands go out many at a time; beanstalkd answers them in order."""

    def __init__(self, port: int, queue: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb", buffering=256 * 1024)
        self._socket.sendall(b"use %s\r\nwatch %s\r\n" % (queue.encode(), queue.encode()))
        self._expect(b"USING")
        self._expect(b"WATCHING")

    def publish_many(self, bodies: Sequence[bytes]) -> None:
        for start in range(0, len(bodies), _PIPELINE):
            some = bodies[start : start + _PIPELINE]
            self._socket.sendall(b"".join(map(_put, some)))
            for _ in some:
                self._expect(b"INSERTED")

    def publish_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self._socket.sendall(_put(body))
            self._expect(b"INSERTED")

    def publish_abreast(self, bodies: Sequence[bytes], producers: int) -> None:
        self._socket.sendall(b"".join(map(_put, bodies[:producers])))
        for body in bodies[producers:]:
            self._expect(b"INSERTED")
            self._socket.sendall(_put(body))
        for _ in bodies[:producers]:
            self._expect(b"INSERTED")

    def publish_paced(self, schedule: Schedule) -> None:
        self.publish_each(schedule)

    def consume(self, sink: Sink) -> None:
        self.work(sink)  # deleting a job is the only acknowledgement there is

    def work(self, sink: Sink) -> None:
        ask = min(_PIPELINE, sink.chunk)
        deletes: list[bytes] = []
        wanted, wait = True, False
        while wanted:
            # The first may wait for a job, the others must not: what is pipelined behind one that waits, waits too.
            reserves = b"reserve-with-timeout %d\r\n" % wait + b"reserve-with-timeout 0\r\n" * (ask - 1)
            self._socket.sendall(b"".join(deletes) + reserves)
            for _ in deletes:
                self._expect(b"DELETED")
            bodies: list[bytes] = []
            deletes = []
            for _ in range(ask):
                answer = self._answers.readline()
                if answer.startswith(b"RESERVED "):
                    _, job, size = answer.split()
                    bodies.append(self._answers.read(int(size) + 2)[:-2])
                    deletes.append(b"delete %s\r\n" % job)
                elif answer != b"TIMED_OUT\r\n":
                    raise RuntimeError(f"beanstalkd answered {answer!r}")
            wait = not bodies
            if bodies:
                wanted = sink(bodies)
        self._socket.sendall(b"".join(deletes))
        for _ in deletes:
            self._expect(b"DELETED")

    def close(self) -> None:
        self._socket.close()

    def _expect(self, what: bytes) -> None:
        answer = self._answers.readline()
        if not answer.startswith(what):
            raise RuntimeError(f"beanstalkd answered {answer!r} instead of {what!r}")


def _put(body: bytes) -> bytes:
    return b"put 0 0 %d %d\r\n%s\r\n" % (_LEASE_SECONDS, len(body), body)
