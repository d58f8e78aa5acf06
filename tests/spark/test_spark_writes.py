"""Writes, claims and tables with a real Spark session and a real broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.client import Outgoing
from tests.spark.reading import read, values
from tests.spark.world import World
from tests.waiting import eventually


def sink(world: World, topic: str, **more: str) -> dict[str, str]:
    return {"bootstrap.servers": world.broker.address, "topic": topic, **more}


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# --- batch ---------------------------------------------------------------------------------------------------------


def test_a_frame_becomes_messages(spark: Any, world: World) -> None:
    topic = world.topic(3)
    frame = spark.range(0, 10_000, 1, 4).selectExpr(
        "cast(id % 10 as string) as key",
        "case when id % 7 = 0 then null else cast(id as string) end as value",
        "array(named_struct('key', 'n', 'value', cast(cast(id as string) as binary))) as headers",
        "timestamp_seconds(id) as timestamp",
        "cast(id % 5 as int) as priority",
    )
    frame.write.format("millstream").mode("append").options(**sink(world, topic, compression="zstd")).save()
    found = read(
        world.options(topic, includeHeaders="true", includePriority="true"),
        "key binary, value binary, headers array<struct<key:string,value:binary>>, timestamp timestamp not null, "
        "priority int not null",
    )
    assert Counter(
        (row["key"], row["value"], row["headers"][0]["value"], row["timestamp"].timestamp(), row["priority"])
        for row in found
    ) == Counter(
        (b"%d" % (n % 10), None if n % 7 == 0 else b"%d" % n, b"%d" % n, float(n), n % 5) for n in range(10_000)
    )


def test_rows_that_were_read_can_be_written_as_they_are(spark: Any, world: World) -> None:
    one, other = world.topic(2), world.topic(2)
    world.publish(one, [Outgoing(value=value, key=value) for value in numbers(100)])
    frame = spark.read.format("millstream").options(**world.options(one, includeId="true")).load()
    frame.write.format("millstream").mode("append").options(**sink(world, other)).save()
    wanted = "key binary, value binary, partition int not null, timestamp timestamp not null"
    assert Counter(map(str, read(world.options(other), wanted))) == Counter(map(str, read(world.options(one), wanted)))


def test_a_job_that_fails_in_one_task_publishes_nothing(spark: Any, world: World) -> None:
    topic = world.topic()
    frame = spark.range(0, 1000, 1, 4).selectExpr("cast(if(id = 999, raise_error('no'), id) as string) as value")
    with pytest.raises(Exception, match="no"):
        frame.write.format("millstream").mode("append").options(**sink(world, topic)).save()
    assert values(world.options(topic)) == []


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        ("id as value", "column 'value' is int64, but must be binary or string"),
        ("cast(id as string) as value, id as kee", "column 'kee' cannot be written; did you mean 'key'"),
    ],
)
def test_columns_that_cannot_be_written_are_told(spark: Any, world: World, frame: str, sentence: str) -> None:
    columns = spark.range(3).selectExpr(*frame.split(", "))
    with pytest.raises(Exception, match=sentence):
        columns.write.format("millstream").mode("append").options(**sink(world, world.topic())).save()


# --- streaming -----------------------------------------------------------------------------------------------------


class Pipe:
    """A query from one topic into another, or several runs of it with one checkpoint."""

    def __init__(self, spark: Any, world: World, checkpoint: Path, **options: str) -> None:
        self._spark = spark
        self._world = world
        self._checkpoint = checkpoint
        self._options = options
        self.source, self.target = world.topic(2), world.topic(2)
        self.published = 0

    def publish(self, count: int) -> None:
        self._world.publish(self.source, [Outgoing(value=value, key=value) for value in numbers(count, self.published)])
        self.published += count

    def start(self, *, available_now: bool = True) -> Any:
        options = self._world.options(self.source, startingOffsets="earliest", **self._options)
        rows = self._spark.readStream.format("millstream").options(**options).load().select("key", "value")
        writing = rows.writeStream.format("millstream").options(**sink(self._world, self.target))
        writing = writing.option("checkpointLocation", str(self._checkpoint))
        return (writing.trigger(availableNow=True) if available_now else writing).start()

    def run(self) -> None:
        """Whatever there is, until it is done.  Raises what went wrong."""
        query = self.start()
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()

    def forget_last_commit(self) -> None:
        """As if the driver had died before it wrote down that its last batch was done."""
        commits = self._checkpoint / "commits"
        last = max(int(file.name) for file in commits.iterdir() if file.name.isdecimal())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)

    @property
    def arrived(self) -> list[bytes]:
        return sorted(values(self._world.options(self.target)), key=int)


@pytest.fixture
def pipe(spark: Any, world: World, tmp_path: Path) -> Callable[..., Pipe]:
    return lambda **options: Pipe(spark, world, tmp_path / "checkpoint", **options)


def test_a_batch_that_spark_does_again_is_there_once(pipe: Callable[..., Pipe]) -> None:
    query = pipe()
    query.publish(200)
    query.run()
    query.forget_last_commit()
    query.publish(200)
    query.run()
    assert query.arrived == numbers(400)


@pytest.mark.parametrize(
    ("point", "action"),
    [
        pytest.param("before_stage", "kill", marks=pytest.mark.slow),
        pytest.param("after_stage", "kill", marks=pytest.mark.slow),
        pytest.param("before_publish", "kill", marks=pytest.mark.slow),
        ("after_publish", "kill"),
        pytest.param("after_publish", "raise", marks=pytest.mark.slow),
    ],
)
def test_wherever_a_process_of_spark_fails_everything_is_there_once(
    pipe: Callable[..., Pipe], faults: Path, point: str, action: str
) -> None:
    """`raise` after the publication has Spark abort what it has just committed."""
    query = pipe(maxOffsetsPerTrigger="150")
    query.publish(200)
    (faults / point).write_text(action)
    with pytest.raises(Exception):  # noqa: B017, PT011 - Spark's, about a worker that is gone
        query.run()
    assert not (faults / point).exists()
    query.publish(100)
    query.run()
    assert query.arrived == numbers(300)


# --- claims --------------------------------------------------------------------------------------------------------


def test_a_query_is_a_consumer_of_a_queue_group(pipe: Callable[..., Pipe], world: World) -> None:
    query = pipe(claim="workers", maxOffsetsPerTrigger="80")
    for _ in range(2):
        query.publish(100)
        query.run()
        info = world.client.queues.describe(query.source, "workers")
        assert (info.depth, info.settled) == (0, {"acked": query.published})
    assert query.arrived == numbers(200)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after_claim", marks=pytest.mark.slow),
        pytest.param("after_stage", marks=pytest.mark.slow),
        pytest.param("after_publish", marks=pytest.mark.slow),
        "before_ack",
    ],
)
def test_wherever_a_query_with_claims_fails_everything_is_worked_on_once(
    pipe: Callable[..., Pipe], world: World, faults: Path, point: str
) -> None:
    query = pipe(claim="workers", maxOffsetsPerTrigger="60")
    query.publish(100)
    (faults / point).write_text("kill")
    with pytest.raises(Exception):  # noqa: B017, PT011 - as above
        query.run()
    assert not (faults / point).exists()
    query.run()
    assert query.arrived == numbers(100)
    info = world.client.queues.describe(query.source, "workers")
    assert (info.depth, info.settled) == (0, {"acked": 100})


def test_a_query_that_goes_on_acks_what_is_done_and_leaves_when_it_stops(
    world: World, pipe: Callable[..., Pipe]
) -> None:
    """A batch is acked when it is done, also when no other one follows."""
    query = pipe(claim="workers")
    query.publish(50)
    running = query.start(available_now=False)

    def workers() -> Any:
        listed = world.client.queues.list(query.source)
        return listed[0] if listed else None

    try:
        eventually(lambda: workers() and not workers().depth, within_s=60)
        assert workers().consumers == 1
    finally:
        running.stop()
    eventually(lambda: not workers().consumers, within_s=60)
    assert query.arrived == numbers(50)


# --- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        "dead_letters",
        "topics",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("schedules", "groups", "queues", "passports")),
    ],
)
def test_every_table_is_a_frame(spark: Any, world: World, table: str) -> None:
    topic = world.topic()
    world.client.publish(topic, "bad", key="k", headers={"a": "b"})
    with world.client.queue(topic, timeout_s=5) as queue:
        queue.lease(1, wait="5s")[0].reject("no good")
    frame = spark.read.format("millstream").options(**world.options(table=table)).load()
    rows = frame.collect()
    assert all(set(row.asDict()) == set(frame.columns) for row in rows)
    assert frame.select(frame.columns[-1], frame.columns[0]).count() == len(rows)
    if table == "topics":
        assert frame.where(f"topic = '{topic}'").select("messages").collect() == [(1,)]
