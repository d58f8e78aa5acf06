"""The workloads, each run on one contestant's running broker with a fresh queue.

| | |
|---|---|
| W1 | publish, confirmed, pipelined: one producer, as fast as its client goes |
| W2 | consume a backlog, acknowledging durably |
| W3 | both at once: a producer process and a consumer process |
| W4 | end-to-end latency at a fixed rate, not waiting for confirmations |
| W5 | one confirmed publish at a time; W5a and W5s: client and broker pinned apart, or to one processor |
| W6 | one confirmed publish at a time from sixteen programs, each confirmed after an fsync |
| W6c | the same from sixteen producers of one program |
| W6p | sixteen programs that do not wait for each message, each confirmed after an fsync |
| W2q, W3q | W2 and W3 as a work queue: every message is leased, and acknowledged by itself |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count as counter
from typing import Final

from benchmarks.contestants import Contestant, Level
from benchmarks.machine import settle_machine
from benchmarks.measure import Consume, Publish, Report, Worker, declare
from benchmarks.servers import Server

__all__ = ["WORKLOADS", "Outcome", "Placement", "Scale", "Workload", "measure_workload"]

_CHUNK = 1000
_PRODUCERS = 16
_LATENCY_WARM_UP = 50
_EACH_WARM_UP = 20
_BODY_BYTES_MAX = 600_000_000  # what a producer process may hold prepared
_COUNT_MAX = 2_000_000
_queue_numbers = counter()


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    seconds: float = 2.0
    latency_seconds: float = 5.0
    rate: int = 1000
    trial_share: float = 1.0  # of a workload's trial messages
    warm_up: int = _CHUNK  # messages a pipelined producer sends before the clock starts


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one workload."""

    count: int
    seconds: float
    broker_cpu_ns: int
    rss_bytes: int
    anonymous_bytes: int
    producer_cpu_ns: int | None = None
    consumer_cpu_ns: int | None = None
    disorder: int = 0
    latency_us: dict[str, float] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class _Setting:
    contestant: Contestant
    server: Server
    size: int
    client_processors: Set[int] = frozenset()  # none: wherever the scheduler likes

    def fresh_queue(self) -> str:
        # No short names: the Kafka client misreads metadata answers of few bytes.
        queue = f"bench-{self.size}-{next(_queue_numbers):04d}"
        declare(self.contestant, self.server.port, queue)
        return queue

    def worker(self, queue: str, job: Publish | Consume) -> Worker:
        return Worker(self.contestant, self.server.port, queue, job, processors=self.client_processors)


def _publish_pipelined(setting: _Setting, count: int, scale: Scale) -> Outcome:
    return _publish(setting, Publish(count, setting.size, warm_up=scale.warm_up))


def _publish_each(setting: _Setting, count: int, _scale: Scale) -> Outcome:
    return _publish(setting, Publish(count, setting.size, warm_up=_EACH_WARM_UP, each=True))


def _publish_each_of_many(setting: _Setting, count: int, _scale: Scale) -> Outcome:
    job = Publish(count // _PRODUCERS, setting.size, warm_up=_EACH_WARM_UP, each=True)
    return _publish(setting, job, producers=_PRODUCERS)


def _publish_each_abreast(setting: _Setting, count: int, _scale: Scale) -> Outcome:
    return _publish(setting, Publish(count, setting.size, warm_up=_PRODUCERS * _EACH_WARM_UP, abreast=_PRODUCERS))


def _publish_pipelined_by_many(setting: _Setting, count: int, scale: Scale) -> Outcome:
    job = Publish(count // _PRODUCERS, setting.size, warm_up=scale.warm_up)
    return _publish(setting, job, producers=_PRODUCERS)


def _publish(setting: _Setting, job: Publish, *, producers: int = 1) -> Outcome:
    queue = setting.fresh_queue()
    with ExitStack() as stack:
        workers = [stack.enter_context(setting.worker(queue, job)) for _ in range(producers)]
        for worker in workers:
            worker.wait_until_ready()
        before = setting.server.usage()
        for worker in workers:
            worker.go()
        reports = [worker.report() for worker in workers]
        after = setting.server.usage()
    return Outcome(
        count=job.count * producers,
        seconds=_span_seconds(*reports),
        producer_cpu_ns=sum(report.cpu_ns for report in reports),
        broker_cpu_ns=after.cpu_ns - before.cpu_ns,
        rss_bytes=after.rss_bytes,
        anonymous_bytes=after.anonymous_bytes,
    )


def _consume_backlog(setting: _Setting, count: int, _scale: Scale, *, leased: bool = False) -> Outcome:
    queue = setting.fresh_queue()
    with setting.worker(queue, Publish(count, setting.size, warm_up=_CHUNK)) as producer:
        producer.wait_until_ready()
        producer.go()
        producer.report()
    with setting.worker(queue, Consume(count, warm_up=_CHUNK, chunk=_CHUNK, leased=leased)) as consumer:
        consumer.wait_until_ready()
        before = setting.server.usage()
        report = consumer.report()
        after = setting.server.usage()
    return Outcome(
        count=report.count,
        seconds=_span_seconds(report),
        consumer_cpu_ns=report.cpu_ns,
        broker_cpu_ns=after.cpu_ns - before.cpu_ns,
        rss_bytes=after.rss_bytes,
        anonymous_bytes=after.anonymous_bytes,
        disorder=report.disorder,
    )


def _both_at_once(setting: _Setting, count: int, _scale: Scale, *, leased: bool = False) -> Outcome:
    publish = Publish(count, setting.size, warm_up=_CHUNK)
    return _through(setting, publish, Consume(count, warm_up=_CHUNK, chunk=_CHUNK, leased=leased))


def _work_off_backlog(setting: _Setting, count: int, scale: Scale) -> Outcome:
    return _consume_backlog(setting, count, scale, leased=True)


def _publish_and_work(setting: _Setting, count: int, scale: Scale) -> Outcome:
    return _both_at_once(setting, count, scale, leased=True)


def _latency(setting: _Setting, _count: int, scale: Scale) -> Outcome:
    count = int(scale.latency_seconds * scale.rate)
    publish = Publish(count, setting.size, warm_up=_LATENCY_WARM_UP, each=True, rate=scale.rate)
    return _through(setting, publish, Consume(count, warm_up=_LATENCY_WARM_UP, chunk=1, latencies=True))


def _through(setting: _Setting, publish: Publish, consume: Consume) -> Outcome:
    queue = setting.fresh_queue()
    with setting.worker(queue, consume) as consumer, setting.worker(queue, publish) as producer:
        producer.wait_until_ready()
        consumer.wait_until_ready()
        before = setting.server.usage()
        producer.go()
        sent, received = producer.report(), consumer.report()
        after = setting.server.usage()
    return Outcome(
        count=publish.count,
        seconds=(received.ended_ns - sent.started_ns) / 1e9,
        producer_cpu_ns=sent.cpu_ns,
        consumer_cpu_ns=received.cpu_ns,
        broker_cpu_ns=after.cpu_ns - before.cpu_ns,
        rss_bytes=after.rss_bytes,
        anonymous_bytes=after.anonymous_bytes,
        disorder=received.disorder,
        latency_us=_percentiles_us(received),
    )


def _span_seconds(*reports: Report) -> float:
    return (max(report.ended_ns for report in reports) - min(report.started_ns for report in reports)) / 1e9


def _percentiles_us(report: Report) -> dict[str, float]:
    ordered = sorted(report.latencies_ns)
    points = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    last = len(ordered) - 1
    return {name: ordered[round(point * last)] / 1000 for name, point in points.items()} if ordered else {}


class Placement(Enum):
    """Where client and broker run.

    Waking a process on another processor costs far more than switching to it on this one (measured: five
    times the rate with beanstalkd), so a closed loop of one client left to the scheduler is a toss of a coin.
    Pinned runs show both sides of it.  On two processors they leave a broker of many threads only one.
    """

    FREE = auto()
    APART = auto()
    SHARED = auto()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    run: Callable[[_Setting, int, Scale], Outcome]
    trial_count: int  # messages of the first, unmeasured run; 0 where the count is fixed
    level: Level = Level.NORMAL
    placement: Placement = Placement.FREE
    leases: bool = False  # only for contestants that have them


WORKLOADS: Final = (
    # Latency first: the bulk workloads leave a disk busy for a while, which only those who sync would pay for.
    Workload("W4", "end-to-end latency at a fixed rate", _latency, 0),
    Workload("W5", "one confirmed publish at a time", _publish_each, 3_000),
    Workload("W5a", "W5 with client and broker apart", _publish_each, 3_000, placement=Placement.APART),
    Workload("W5s", "W5 with client and broker on one processor", _publish_each, 3_000, placement=Placement.SHARED),
    Workload("W6", "16 programs, fsync before confirm", _publish_each_of_many, 8_000, Level.FSYNC),
    Workload("W6c", "16 producers of one program, fsync before confirm", _publish_each_abreast, 8_000, Level.FSYNC),
    Workload("W6p", "16 programs that pipeline, fsync before confirm", _publish_pipelined_by_many, 32_000, Level.FSYNC),
    Workload("W1", "publish, confirmed, pipelined", _publish_pipelined, 20_000),
    Workload("W2", "consume a backlog", _consume_backlog, 20_000),
    Workload("W3", "publish and consume at once", _both_at_once, 20_000),
    Workload("W2q", "lease and acknowledge each of a backlog", _work_off_backlog, 20_000, leases=True),
    Workload("W3q", "publish, lease and acknowledge each at once", _publish_and_work, 20_000, leases=True),
)


def measure_workload(workload: Workload, contestant: Contestant, server: Server, size: int, scale: Scale) -> Outcome:
    """Run a trial that warms the broker and finds out how many messages fill the time, then measure."""
    settle_machine()
    everywhere = os.sched_getaffinity(0)
    if workload.placement is Placement.FREE or len(everywhere) < 2:
        return _measure(workload, _Setting(contestant, server, size), scale)
    client = {max(everywhere)}
    server.place(client if workload.placement is Placement.SHARED else everywhere - client)
    try:
        return _measure(workload, _Setting(contestant, server, size, client), scale)
    finally:
        server.place(everywhere)


def _measure(workload: Workload, setting: _Setting, scale: Scale) -> Outcome:
    if not workload.trial_count:
        return workload.run(setting, 0, scale)
    trial = workload.run(setting, int(workload.trial_count * scale.trial_share), scale)
    count = min(int(trial.per_second * scale.seconds), _COUNT_MAX, _BODY_BYTES_MAX // setting.size)
    # Whole chunks, and an equal share for each producer.
    step = _CHUNK if workload.trial_count >= _CHUNK * 10 else _PRODUCERS * 10
    return workload.run(setting, max(count // step, 1) * step, scale)
