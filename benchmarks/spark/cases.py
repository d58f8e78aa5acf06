"""What is measured: scans, writes, micro-batches that have little to do, and a stream at a steady rate."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.spark import scans
from benchmarks.spark.report import Latency, Measured
from benchmarks.spark.scans import Way
from benchmarks.spark.world import World

__all__ = ["job", "micro_batches", "scan", "steady_stream", "write"]

_PARTITIONS: Final = 4
_PATIENCE_S: Final = 120.0
#: Who asks often how far a query is takes processor time from it: Spark writes all its progress down as JSON.
_LOOK_S: Final = 0.1
#: Of a steady stream: what comes until Spark has compiled what it needs does not count.
_WARM_UP_S: Final = 10.0
_ROOT: Final = Path(__file__).resolve().parent.parent.parent


def scan(world: World, way: Way) -> Measured:
    """One more in a session that has done so before."""

    def work() -> None:
        _check(world, scans.scan(world.read(way)))

    return world.measure(world.rows, work)


def job(world: World, way: Way, times: int) -> list[float]:
    """The same again and again in a session of its own, which has done nothing else: rows a second of each."""
    command = [sys.executable, "-m", "benchmarks.spark.scans", way, str(world.directory), str(world.server.port)]
    done = subprocess.run([*command, str(times)], check=True, cwd=_ROOT, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    _check(world, found["rows"])
    return [world.rows / seconds for seconds in found["seconds"]]


def _check(world: World, rows: int) -> None:
    assert rows == world.rows, f"{rows} rows of {world.rows} were read"


def write(world: World, rows: int, number: int, delivery: str | None) -> Measured:
    """Rows of a Parquet file into a topic of four partitions; without a delivery to nowhere, for comparison."""
    frame = world.read("parquet").where(F.col("offset") < rows // _PARTITIONS).select("key", "value")
    count = frame.count()
    if delivery is None:
        return world.measure(count, lambda: frame.write.format("noop").mode("overwrite").save())
    topic = f"written-{number}-{delivery}"
    world.client.create_topic(topic, _PARTITIONS)
    try:
        sink = frame.write.format("millstream").mode("append").options(topic=topic, delivery=delivery, **world.address)
        measured = world.measure(count, sink.save)
        stored = sum(part.high_watermark for part in world.client.topic(topic).partitions)
        assert stored == count, f"{stored} messages of {count} were written"
        return measured
    finally:
        world.client.delete_topic(topic)


def micro_batches(world: World, count: int, number: int) -> list[float]:
    """How long micro-batches with a single message take, in seconds: from topic to topic, exactly once."""
    with _stream(world, f"single-{number}") as (query, topic):
        for each in range(count + 1):
            world.client.publish(topic, b"one")
            _wait(lambda each=each: len(_batches(query)) > each)  # type: ignore[misc]
        # The first one has to start workers.
        return [progress["durationMs"]["triggerExecution"] / 1000 for progress in _batches(query)[1:]]


def steady_stream(world: World, rate: int, seconds: float, number: int) -> Latency:
    """From the time of a message to the end of the micro-batch that has committed it, for every message."""
    with _stream(world, f"steady-{number}") as (query, topic):
        command = [sys.executable, "-m", "benchmarks.spark.feed", str(world.server.port), topic, str(rate)]
        subprocess.run([*command, str(seconds + _WARM_UP_S)], check=True, cwd=_ROOT)
        total = sum(part.high_watermark for part in world.client.topic(topic).partitions)
        _wait(lambda: sum(progress["numInputRows"] for progress in _batches(query)) >= total)
        batches = _batches(query)
    columns = "partition int not null, offset bigint not null, timestamp timestamp not null"
    rows = world.spark.read.format("millstream").schema(columns).options(subscribe=topic, **world.address).load()
    found = rows.selectExpr("partition", "offset", "unix_micros(timestamp) as time_us").toArrow()
    partitions, offsets, times = (found.column(name).to_numpy() for name in ("partition", "offset", "time_us"))
    late = _lateness(topic, batches, partitions, offsets, times)
    warm_us = times.min() + _WARM_UP_S * 1e6
    late = late[times >= warm_us]
    p50, p95, p99 = np.percentile(late, (50, 95, 99)).tolist()
    counted = [progress["durationMs"] for progress in batches if _end_us(progress) >= warm_us]
    slowest = max(counted, key=lambda took: took["triggerExecution"])
    return Latency(len(late) / seconds, p50, p95, p99, float(late.max()), len(batches), slowest)


def _lateness(topic: str, batches: list[dict[str, Any]], partitions: Any, offsets: Any, times: Any) -> Any:
    """Seconds between each message's time and the end of its micro-batch."""
    late = np.full(len(times), np.nan)
    for number in range(_PARTITIONS):
        untils = [_offset(progress, topic, number) for progress in batches]
        ends = np.array([_end_us(progress) for progress in batches])
        those = partitions == number
        late[those] = (ends[np.searchsorted(untils, offsets[those], "right")] - times[those]) / 1e6
    assert not np.isnan(late).any(), "there are messages that no batch has read"
    return late


def _offset(progress: dict[str, Any], topic: str, partition: int) -> int:
    offsets = json.loads(progress["sources"][0]["endOffset"])
    return int(offsets.get(topic, {}).get(str(partition), 0))


def _end_us(progress: dict[str, Any]) -> float:
    started = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).astimezone(UTC)
    return started.timestamp() * 1e6 + progress["durationMs"]["triggerExecution"] * 1000.0


@contextmanager
def _stream(world: World, name: str) -> Iterator[tuple[Any, str]]:
    """A query from one topic to another, and the topic that it reads."""
    source, target = f"{name}-in", f"{name}-out"
    for topic in (source, target):
        world.client.create_topic(topic, _PARTITIONS)
    rows = world.spark.readStream.format("millstream").options(
        subscribe=source, startingOffsets="earliest", **world.address
    )
    writer = rows.load().select("key", "value").writeStream.format("millstream")
    writer = writer.options(topic=target, checkpointLocation=str(world.directory / name), **world.address)
    query = writer.start()
    try:
        yield query, source
        if query.exception() is not None:
            raise query.exception()
    finally:
        query.stop()


def _batches(query: Any) -> list[dict[str, Any]]:
    """Those that had something to do."""
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the stream does not get on")
        time.sleep(_LOOK_S)
