"""Client processes and what they cost: each producer or consumer runs alone in a process and reports back.

A process prepares (imports, connection, bodies, a first warm-up exchange), says it is ready, waits for the
word, then works.  Only the work is measured.  Times are CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import traceback
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from benchmarks.bodies import NUMBER, Schedule, make_bodies
from benchmarks.contestants import Client, ConcurrentClient, Contestant, QueueClient

__all__ = ["Consume", "Job", "Publish", "Report", "Worker", "WorkerFailed", "declare"]

_CLIENT_MODULES = (
    "benchmarks.measure",
    "redis",
    "hiredis",
    "nats",
    "pika",
    "rstream",
    "confluent_kafka",
    "gmqtt",
)
_SILENT_SECONDS_MAX = 180.0

# Forked from a server that has imported the clients already: sixteen producers start in no time, and
# none inherits a connection or a thread from the main process.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["millstream", *_CLIENT_MODULES])


class WorkerFailed(Exception):
    """A client process ended with an error or fell silent."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish `count` bodies after `warm_up` ones that are not measured."""

    count: int
    size: int
    warm_up: int
    each: bool = False  # one at a time instead of pipelined
    rate: int = 0  # bodies a second, 0 for as fast as it goes
    abreast: int = 0  # one at a time from so many producers of one program

    def run(self, client: Client, pipe: Connection) -> Report:
        self._publish(client, make_bodies(self.warm_up, self.size), rate=self.rate)
        bodies = make_bodies(self.count, self.size, first=self.warm_up)
        pipe.send("ready")
        pipe.recv()
        started_ns, cpu_ns = time.monotonic_ns(), _own_cpu_ns()
        self._publish(client, bodies, rate=self.rate)
        return Report(self.count, started_ns, time.monotonic_ns(), _own_cpu_ns() - cpu_ns)

    def _publish(self, client: Client, bodies: Sequence[bytes], *, rate: int = 0) -> None:
        if rate:
            client.publish_paced(Schedule(bodies, rate))
        elif self.abreast:
            assert isinstance(client, ConcurrentClient)
            client.publish_abreast(bodies, self.abreast)
        elif self.each:
            client.publish_each(bodies)
        else:
            client.publish_many(bodies)


@dataclass(frozen=True, slots=True)
class Consume:
    """Receive `warm_up` and then `count` bodies; measured from the last of the warm-up on."""

    count: int
    warm_up: int
    chunk: int
    latencies: bool = False
    leased: bool = False  # as a worker of a queue, with an acknowledgement for each message

    def run(self, client: Client, pipe: Connection) -> Report:
        tally = _Tally(self, pipe)
        if self.leased:
            assert isinstance(client, QueueClient)
            client.work(tally)
        else:
            client.consume(tally)
        return tally.report()


Job = Publish | Consume


@dataclass(frozen=True, slots=True)
class Report:
    """What one client process did."""

    count: int
    started_ns: int
    ended_ns: int
    cpu_ns: int
    disorder: int = 0  # chunks that did not begin with the number that was due: loss, repetition or reordering
    latencies_ns: array[int] = field(default_factory=lambda: array("q"))


class _Tally:
    """The sink of a measured consumer: counts, checks the order of chunks, and notes latencies if asked."""

    def __init__(self, job: Consume, pipe: Connection) -> None:
        self.chunk = job.chunk
        self._job = job
        self._pipe = pipe
        self._seen = 0
        self._disorder = 0
        self._measured_from = 0
        self._started_ns = self._ended_ns = self._cpu_ns = 0
        self._latencies_ns: array[int] = array("q")

    def __call__(self, bodies: Sequence[bytes]) -> bool:
        now_ns = time.monotonic_ns()
        if self._job.latencies:
            if self._started_ns:
                self._latencies_ns.extend([now_ns - NUMBER.unpack_from(body)[0] for body in bodies])
        elif NUMBER.unpack_from(bodies[0])[0] != self._seen:
            self._disorder += 1
        self._seen += len(bodies)
        if not self._started_ns and self._seen >= self._job.warm_up:
            self._started_ns, self._cpu_ns, self._measured_from = now_ns, _own_cpu_ns(), self._seen
            self._pipe.send("ready")
        self._ended_ns = now_ns
        return self._seen < self._job.warm_up + self._job.count

    def report(self) -> Report:
        cpu_ns = _own_cpu_ns() - self._cpu_ns
        count = self._seen - self._measured_from
        return Report(count, self._started_ns, self._ended_ns, cpu_ns, self._disorder, self._latencies_ns)


class Worker:
    """One client process as the main process sees it."""

    def __init__(
        self, contestant: Contestant, port: int, queue: str, job: Job, *, processors: Set[int] = frozenset()
    ) -> None:
        """Start it, confined to `processors` if there are any."""
        self._who = f"{contestant.name} {type(job).__name__.lower()}"
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_work, args=(contestant, port, queue, job, processors, theirs))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self._receive()

    def go(self) -> None:
        self._pipe.send("go")

    def report(self) -> Report:
        report = self._receive()
        assert isinstance(report, Report)
        return report

    def _receive(self) -> object:
        try:
            if not self._pipe.poll(_SILENT_SECONDS_MAX):
                raise WorkerFailed(f"{self._who}: nothing heard for {_SILENT_SECONDS_MAX:.0f} s")
            answer = self._pipe.recv()
        except EOFError:
            raise WorkerFailed(f"{self._who}: the process ended") from None
        if isinstance(answer, _Failure):
            raise WorkerFailed(f"{self._who}:\n{answer.text}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.join(0 if error else 10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def declare(contestant: Contestant, port: int, queue: str) -> None:
    """Create a queue from a process of its own, so that no client code runs in the main process."""
    process = _processes.Process(target=contestant.declare, args=(port, queue))
    process.start()
    process.join(60)
    if process.exitcode != 0:
        process.kill()
        raise WorkerFailed(f"{contestant.name}: could not create {queue}")


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _work(contestant: Contestant, port: int, queue: str, job: Job, processors: Set[int], pipe: Connection) -> None:
    try:
        if processors:
            os.sched_setaffinity(0, processors)  # before the client starts threads, which inherit it
        client = contestant.connect(port, queue)
        report = job.run(client, pipe)
        pipe.send(report)
        client.close()
    except Exception:  # whatever a client library raises is the main process's to judge
        pipe.send(_Failure(traceback.format_exc()))


def _own_cpu_ns() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e9)
