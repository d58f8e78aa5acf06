"""The load generator behind `millstream bench`: worker processes that publish or consume, and what they measured.

Workers are processes, not threads: Python runs one thread at a time, and a benchmark that measures the generator's own
queueing would flatter nobody.  They connect first, meet at a barrier, and only then is time counted.  Times are of the
system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
import resource
import signal
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Final, Literal

from millstream.cli.connection import client_credentials
from millstream.errors import MillstreamError, RequestTimeout, StaleGeneration, UnknownMember

if TYPE_CHECKING:
    from millstream.client import Client

__all__ = ["Measured", "Role", "Work", "run_workers"]

Role = Literal["publish", "publish_one", "publish_paced", "consume", "consume_timed"]

_STAMP: Final = struct.Struct("<q")
_REPORT_EVERY: Final = 4096
_BODIES_MAX: Final = 1000
_BODIES_BYTES_MAX: Final = 64 * 1024 * 1024
_START_TIMEOUT_S: Final = 60.0
_LOOK_UP_S: Final = 0.2  # how often a consumer without messages looks whether the others have had them all
#: A consumer gives up after this silence: something was lost or the producers failed.
SILENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker does."""

    role: Role
    broker: str
    namespace: str
    topic: str
    messages: int
    message_bytes: int
    acks: Literal["none", "leader", "all"] = "leader"
    linger_ms: int = 5
    compression: Literal["lz4", "zstd"] | None = None
    group: str | None = None
    rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one worker saw."""

    role: Role
    messages: int
    payload_bytes: int
    started_s: float
    ended_s: float
    cpu_s: float
    latencies_us: list[int] = field(default_factory=list)


def run_workers(works: Sequence[Work], on_progress: Callable[[int], None]) -> list[Measured]:
    """Run every work in a process of its own and return what they measured, in the same order.

    `on_progress` hears how many messages have moved since it last heard.  A worker's failure is raised here and ends
    the others.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    counters = [context.Value("Q", 0, lock=False) for _ in works]
    barrier = context.Barrier(len(works))
    processes = [
        context.Process(
            target=_work,
            args=(number, work, client_credentials(), barrier, _Counts(number, counters, works), results),
            daemon=True,
        )
        for number, work in enumerate(works)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, counters, results, on_progress)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _collect(
    processes: Sequence[SpawnProcess],
    counters: Sequence[Any],
    results: Any,
    on_progress: Callable[[int], None],
) -> list[Measured]:
    measured: dict[int, Measured] = {}
    seen = 0
    while len(measured) < len(processes):
        try:
            number, outcome = results.get(timeout=0.1)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                raise RequestTimeout("a worker of the benchmark ended without a word") from None
        else:
            if isinstance(outcome, MillstreamError):
                raise outcome
            measured[number] = outcome
        now_at = sum(counter.value for counter in counters)
        on_progress(now_at - seen)
        seen = now_at
    return [measured[number] for number in range(len(processes))]


def _work(
    number: int,
    work: Work,
    credentials: tuple[str | None, str | None],
    barrier: Any,
    counts: _Counts,
    results: Any,
) -> None:
    from millstream import connect

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    try:
        key, ca = credentials
        name = f"bench-{os.getpid()}"
        with connect(work.broker, namespace=work.namespace, client_id=name, key=key, ca=ca) as client:
            results.put((number, _ROLES[work.role](client, work, barrier, counts)))
    except MillstreamError as problem:
        barrier.abort()
        results.put((number, type(problem)(str(problem))))
    except BaseException as problem:
        barrier.abort()
        results.put((number, MillstreamError(f"a worker failed: {type(problem).__name__}: {problem}")))


class _Counts:
    """Messages moved so far: this worker's, written by it alone, and those of all workers in its role."""

    def __init__(self, number: int, counters: Sequence[Any], works: Sequence[Work]) -> None:
        self._mine = counters[number]
        role = works[number].role
        self._same_role = [counter for counter, work in zip(counters, works, strict=True) if work.role == role]

    def moved(self, total: int) -> None:
        self._mine.value = total

    def together(self) -> int:
        return sum(counter.value for counter in self._same_role)


class _Timing:
    """Starts when all workers are ready; ends as a Measured."""

    def __init__(self, barrier: Any) -> None:
        barrier.wait(_START_TIMEOUT_S)
        self._cpu_s = _cpu_s()
        self.started_s = time.monotonic()

    def done(
        self, work: Work, messages: int, latencies_us: list[int] | None = None, *, ended_s: float | None = None
    ) -> Measured:
        return Measured(
            work.role,
            messages,
            messages * work.message_bytes,
            self.started_s,
            time.monotonic() if ended_s is None else ended_s,
            _cpu_s() - self._cpu_s,
            latencies_us or [],
        )


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _values(work: Work) -> list[bytes]:
    """Distinct bodies, half of each random: what repeats forever compresses as no real traffic does."""
    source = random.Random(work.seed)
    size = work.message_bytes
    half = size // 2
    count = max(1, min(_BODIES_MAX, work.messages, _BODIES_BYTES_MAX // max(1, size)))
    return [(source.randbytes(half) + b"%010d" % number * (size // 10 + 1))[:size] for number in range(count)]


def _publish(client: Client, work: Work, barrier: Any, counts: _Counts) -> Measured:
    values = itertools.cycle(_values(work))
    with client.producer(
        work.topic, acks=work.acks, linger_ms=work.linger_ms, compression=work.compression
    ) as producer:
        send = producer.send
        timing = _Timing(barrier)
        for sent in range(0, work.messages, _REPORT_EVERY):
            for value in itertools.islice(values, min(_REPORT_EVERY, work.messages - sent)):
                send(value)
            counts.moved(sent)
        producer.flush()
        counts.moved(work.messages)
        return timing.done(work, work.messages)


def _publish_one(client: Client, work: Work, barrier: Any, counts: _Counts) -> Measured:
    """One at a time, each confirmed before the next: what a request handler sees."""
    values = itertools.cycle(_values(work))
    latencies_us: list[int] = []
    client.publish(work.topic, next(values))  # the first one looks up the topic
    timing = _Timing(barrier)
    for sent, value in enumerate(itertools.islice(values, work.messages), 1):
        before_ns = time.monotonic_ns()
        client.publish(work.topic, value)
        latencies_us.append((time.monotonic_ns() - before_ns) // 1000)
        counts.moved(sent)
    return timing.done(work, work.messages, latencies_us)


def _publish_paced(client: Client, work: Work, barrier: Any, counts: _Counts) -> Measured:
    """At a fixed rate, each message stamped with the time it was *due*.

    A generator that stamps when it gets round to sending hides every stall it was caught in itself.
    """
    body = bytes(max(0, work.message_bytes - _STAMP.size))
    interval_ns = int(1e9 / work.rate)
    with client.producer(work.topic, acks=work.acks, linger_ms=work.linger_ms) as producer:
        timing = _Timing(barrier)
        due_ns = time.monotonic_ns()
        for sent in range(1, work.messages + 1):
            due_ns += interval_ns
            while (early_ns := due_ns - time.monotonic_ns()) > 0:
                time.sleep(early_ns / 1e9)
            producer.send(_STAMP.pack(due_ns) + body)
            counts.moved(sent)
        producer.flush()
        return timing.done(work, work.messages)


def _consume(client: Client, work: Work, barrier: Any, counts: _Counts) -> Measured:
    """Until the members of the group have seen all messages together: nobody knows beforehand who gets how many."""
    count = 0
    with client.stream(work.topic, group=work.group, start="earliest", timeout_s=_LOOK_UP_S) as stream:
        timing = _Timing(barrier)
        heard_s = timing.started_s
        while counts.together() < work.messages and time.monotonic() - heard_s < SILENCE_S:
            for messages in stream.batches():
                for message in messages:
                    message.value  # noqa: B018  what every reader does
                count += len(messages)
                counts.moved(count)
                heard_s = time.monotonic()
                if counts.together() >= work.messages:
                    break
        measured = timing.done(work, count, ended_s=heard_s)
        if work.group is not None:
            # What is in hand is not committed when a stream ends: the others would read, and count, it once more.
            with suppress(StaleGeneration, UnknownMember):
                stream.commit()
        return measured


def _consume_timed(client: Client, work: Work, barrier: Any, counts: _Counts) -> Measured:
    latencies_us: list[int] = []
    with client.stream(work.topic, start="earliest", timeout_s=SILENCE_S) as stream:
        timing = _Timing(barrier)
        for message in stream:
            latencies_us.append((time.monotonic_ns() - _STAMP.unpack_from(message.value or b"")[0]) // 1000)
            counts.moved(len(latencies_us))
            if len(latencies_us) >= work.messages:
                break
        return timing.done(work, len(latencies_us), latencies_us)


_ROLES: Final[dict[Role, Callable[[Client, Work, Any, _Counts], Measured]]] = {
    "publish": _publish,
    "publish_one": _publish_one,
    "publish_paced": _publish_paced,
    "consume": _consume,
    "consume_timed": _consume_timed,
}
