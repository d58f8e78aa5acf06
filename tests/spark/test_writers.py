"""Writes without Spark around them: everything once, whoever fails at whatever moment."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import InvalidArgument, StageLost
from millstream.spark import outlets, writing
from millstream.spark.connection import connect
from millstream.spark.encoding import BatchEncoder
from millstream.spark.faults import VARIABLE
from millstream.spark.options import SinkOptions, Target
from millstream.spark.source import MillstreamSource
from millstream.testing.broker import BrokerProcess
from millstream.wire.stage_calls import AbortStages, ListStages, QueryInfo
from tests.spark.reading import read, schema_of
from tests.spark.world import World
from tests.spark.written import Writing, batch_of

_queries = itertools.count(1)


@pytest.fixture
def query() -> str:
    """An id as Spark draws one."""
    return f"00000000-0000-0000-0000-{next(_queries):012}"


def sink(world: World, topic: str | None, **more: Any) -> dict[str, str]:
    chosen = {} if topic is None else {"topic": topic}
    return {"bootstrap.servers": world.broker.address, **chosen, **more}


def values(world: World, topic: str) -> list[bytes]:
    return [row["value"] for row in read(world.options(topic))]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# --- once --------------------------------------------------------------------------------------------------------


def test_what_tasks_have_staged_is_seen_when_the_batch_is_committed_and_not_before(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic(partitions=3)
    write = Writing(monkeypatch, sink(world, topic))
    said = [
        write.task([batch_of(numbers(500, 1000 * n)), batch_of(numbers(500, 1000 * n + 500))], query=query, number=n)
        for n in range(3)
    ]
    assert values(world, topic) == []
    write.commit(said)
    assert sorted(values(world, topic), key=int) == numbers(3000)


def test_a_batch_that_spark_repeats_changes_nothing(world: World, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic()
    for _ in range(2):
        write = Writing(monkeypatch, sink(world, topic))
        write.commit([write.task([batch_of(numbers(10))], query=query, batch=7)])
    assert values(world, topic) == numbers(10)
    write.commit([write.task([batch_of([b"next"])], query=query, batch=8)])
    assert values(world, topic) == [*numbers(10), b"next"]


def test_a_repetition_that_was_staged_before_anybody_knew_changes_nothing(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic))
    first = write.task([batch_of([b"a"])], query=query)
    second = write.task([batch_of([b"a"])], query=query, attempt=1)
    write.commit([first])
    write.commit([second])
    assert values(world, topic) == [b"a"]


def test_only_the_attempt_that_spark_counts_is_published(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic))
    write.task([batch_of([b"speculative"])], query=query, attempt=0)
    chosen = write.task([batch_of([b"chosen"])], query=query, attempt=1)
    write.commit([chosen])
    assert values(world, topic) == [b"chosen"]
    assert (
        connect(SinkOptions.of(sink(world, topic)).target).call(ListStages(query=query), list[QueryInfo])[0].stages
        == []
    )


def test_an_abort_after_a_commit_that_succeeded_and_then_raised_takes_nothing_back(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic))
    said = [write.task([batch_of(numbers(5))], query=query)]
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "after_publish").write_text("raise")
    with pytest.raises(RuntimeError, match="after_publish"):
        write.commit(said)
    write.abort(said)
    assert values(world, topic) == numbers(5)
    again = Writing(monkeypatch, sink(world, topic))
    again.commit([again.task([batch_of(numbers(5))], query=query)])
    assert values(world, topic) == numbers(5)


def test_what_was_aborted_is_never_seen(world: World, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic))
    said = write.task([batch_of([b"x"])], query=query)
    write.abort([said, None])
    assert (
        connect(SinkOptions.of(sink(world, topic)).target).call(ListStages(query=query), list[QueryInfo])[0].stages
        == []
    )
    with pytest.raises(StageLost):
        write.commit([said])
    assert values(world, topic) == []


def staged(world: World, query: str) -> list[int]:
    """The tasks that have stages."""
    known = connect(Target((world.broker.address,))).call(ListStages(query=query), list[QueryInfo])
    return [stage.task for each in known for stage in each.stages]


@pytest.mark.parametrize("stream", [True, False])
def test_a_task_that_fails_leaves_no_stage_behind(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic, transactionalId=query), stream=stream)
    monkeypatch.setattr(writing, "_GATHERED_BYTES", 1)

    def rows() -> Iterator[pa.RecordBatch]:
        yield batch_of([b"x"])
        assert staged(world, name) == [0, 1]
        raise RuntimeError("the next row cannot be read")

    name = f"{query}@{query}"
    good = write.task([batch_of([b"y"])], query=query)
    with pytest.raises(RuntimeError, match="the next row"):
        write.task(rows(), query=query, number=1)
    assert staged(world, name) == [0], "those of others stay"
    write.commit([good])
    assert values(world, topic) == [b"y"]


def test_a_batch_job_of_which_no_task_has_said_anything_leaves_no_stage_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writing(monkeypatch, sink(world, world.topic()), stream=False)
    write.task([batch_of([b"x"])])  # its executor is lost before it can say so
    name = write._writer._drawn
    assert staged(world, name) == [0]
    write.abort([None])
    assert staged(world, name) == []


def test_an_abort_without_a_broker_does_not_hide_what_went_wrong(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writing(monkeypatch, sink(world, world.topic()))
    said = write.task([batch_of([b"x"])], query=query)
    gone = Writing(monkeypatch, {"bootstrap.servers": "127.0.0.1:1", "topic": "t", "timeout": "100ms"})
    gone.abort([said])


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_to_write_is_no_mistake(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic), stream=stream)
    write.commit([])
    write.commit([write.task([], query=query), write.task([batch_of([])], query=query, number=1)])
    assert values(world, topic) == []


# --- batch writes ------------------------------------------------------------------------------------------------


def test_a_batch_job_is_published_as_a_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic()
    for turn in range(2):
        write = Writing(monkeypatch, sink(world, topic), stream=False)
        said = [write.task([batch_of(numbers(3))], number=n) for n in range(2)]
        assert len(values(world, topic)) == 6 * turn
        write.commit(said)
    assert sorted(values(world, topic)) == sorted(4 * numbers(3))


def test_a_batch_job_with_a_name_is_published_once_however_often_it_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    topic = world.topic()
    for _ in range(2):
        write = Writing(monkeypatch, sink(world, topic, transactionalId=f"backfill-{query}"), stream=False)
        write.commit([write.task([batch_of(numbers(3))])])
    assert values(world, topic) == numbers(3)


def test_in_foreach_batch_a_name_makes_each_micro_batch_happen_once(
    world: World, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    topic = world.topic()
    for number in (0, 0, 1, 1):
        for name in ("good", "bad"):
            write = Writing(monkeypatch, sink(world, topic, transactionalId=name), stream=False)
            write.commit([write.task([batch_of([b"%s %d" % (name.encode(), number)])], query=query, batch=number)])
    assert values(world, topic) == [b"good 0", b"bad 0", b"good 1", b"bad 1"]


def test_a_new_checkpoint_is_a_new_query_whatever_its_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic()
    for number in range(2):
        write = Writing(monkeypatch, sink(world, topic, transactionalId="mine"))
        write.commit([write.task([batch_of([b"%d" % number])], query=f"{topic}-{number}", batch=0)])
    assert values(world, topic) == [b"0", b"1"]


def test_at_least_once_publishes_at_once(world: World, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic(partitions=2)
    write = Writing(monkeypatch, sink(world, topic, delivery="at_least_once"))
    said = write.task([batch_of(numbers(5000))], query=query)
    assert sorted(values(world, topic), key=int) == numbers(5000)
    write.commit([said])
    write.abort([said])
    assert len(values(world, topic)) == 5000


# --- columns -----------------------------------------------------------------------------------------------------


def test_every_column_arrives(world: World, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = world.topic(partitions=4), world.topic()
    made = datetime(2026, 5, 4, 3, 2, 1, 999, tzinfo=UTC)
    later = datetime.now(UTC) + timedelta(days=1)
    headers = pa.array(
        [[{"key": "trace", "value": b"1"}], None, None],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    rows = batch_of(
        [b"a", None, b"later"],
        key=pa.array(["k", None, "k"]),
        headers=headers,
        topic=pa.array([one, other, one]),
        partition=pa.array([3, None, 2], pa.int32()),
        priority=pa.array(["critical", None, None]),
        deliverAt=pa.array([None, None, later], pa.timestamp("us", tz="UTC")),
        timestamp=pa.array([made, made, made], pa.timestamp("us", tz="UTC")),
    )
    ddl = (
        "value binary, key string, headers array<struct<key:string,value:binary>>, topic string, partition int, "
        "priority string, deliverAt timestamp, timestamp timestamp"
    )
    write = Writing(monkeypatch, sink(world, None), ddl=ddl)
    write.commit([write.task([rows], query=query)])
    more = {"includeHeaders": "true", "includePriority": "true"}
    (row,) = read(
        world.options(one, **more),
        "key binary, value binary, partition int not null, timestamp timestamp not null, priority int not null",
    )
    assert row == {"key": b"k", "value": b"a", "partition": 3, "timestamp": made, "priority": 0}
    assert [row["value"] for row in read(world.options(other))] == [None]
    (waiting,) = world.client.schedules.list(one)
    assert (waiting.partition, waiting.key) == (2, b"k")


@pytest.mark.parametrize(
    ("ddl", "options", "sentence"),
    [
        ("value binary, valeu binary", {}, "column 'valeu' cannot be written; did you mean 'value'?"),
        ("value int", {}, "column 'value' is int32, but must be binary or string"),
        ("value binary, deliverAt string", {}, "column 'deliverAt' is string, but must be timestamp"),
        ("key binary", {}, "there is no column 'value'"),
        ("value binary", {"topic": ""}, "where to? There is neither a column 'topic' nor an option"),
    ],
)
@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_columns_that_cannot_be_written_are_told_before_anything_runs(
    kind: str, ddl: str, options: dict[str, str], sentence: str
) -> None:
    source = MillstreamSource({"bootstrap.servers": "127.0.0.1:1", "topic": "orders", **options})
    with pytest.raises(InvalidArgument) as told:
        getattr(source, kind)(schema_of(ddl), False)
    assert sentence in str(told.value)


def test_a_topic_is_not_overwritten() -> None:
    source = MillstreamSource({"bootstrap.servers": "127.0.0.1:1", "topic": "orders"})
    with pytest.raises(InvalidArgument, match="use mode append"):
        source.writer(schema_of("value binary"), True)


# --- lost connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_when_connections_are_lost_all_of_a_task_arrives_once(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch, delivery: str
) -> None:
    """Every few batches the connection is gone, with some that were confirmed, and some that were not."""
    topic = world.topic(partitions=2)
    options = sink(world, topic, delivery=delivery)
    connection = connect(SinkOptions.of(options).target)
    encode = BatchEncoder.encode
    turns: list[int] = []

    def cutting(self: BatchEncoder, rows: pa.RecordBatch, *, now_us: int) -> Any:
        for encoded in encode(self, rows, now_us=now_us):
            yield encoded
            turns.append(encoded.messages)
            if len(turns) % 7 == 3:
                connection.link()._sock.close()  # which is noticed when something is sent
            elif len(turns) % 7 == 6:
                connection.link().goaway = True  # which is noticed before that

    monkeypatch.setattr(BatchEncoder, "encode", cutting)
    monkeypatch.setattr("millstream.spark.writing._GATHERED_BYTES", 4_000)
    write = Writing(monkeypatch, options)
    said = write.task([batch_of(numbers(100, 100 * n)) for n in range(60)], query=query)
    write.commit([said])
    assert sorted(values(world, topic), key=int) == numbers(6000)


def test_no_more_is_on_its_way_than_fits_the_window(world: World, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "_WINDOW_BYTES", 1)
    topic = world.topic()
    write = Writing(monkeypatch, sink(world, topic))
    write.commit([write.task([batch_of([bytes(700_000)] * 5)], query=query)])
    assert len(values(world, topic)) == 5


def test_a_stage_that_is_lost_with_something_in_it_fails_the_task(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    target = SinkOptions.of(sink(world, topic)).target
    monkeypatch.setattr("millstream.spark.writing._GATHERED_BYTES", 1)
    monkeypatch.setattr(outlets, "_WINDOW_BYTES", 1)

    def batches() -> Any:
        yield batch_of([b"a"])
        yield batch_of([b"b"])
        connect(target).call(AbortStages(query=query, batch=0))
        yield batch_of([b"c"])
        yield batch_of([b"d"])

    with pytest.raises(StageLost):
        Writing(monkeypatch, sink(world, topic)).task(batches(), query=query)


def test_a_stage_that_is_lost_before_anything_is_in_it_is_opened_again(
    world: World, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    target = SinkOptions.of(sink(world, topic)).target
    opened = outlets.StageOutlet._open
    turns: list[int] = []

    def losing(self: outlets.StageOutlet) -> bool:
        result = opened(self)
        if not turns:
            connect(target).call(AbortStages(query=query, batch=0))
        turns.append(1)
        return result

    monkeypatch.setattr(outlets.StageOutlet, "_open", losing)
    write = Writing(monkeypatch, sink(world, topic))
    write.commit([write.task([batch_of(numbers(10))], query=query)])
    assert (values(world, topic), len(turns)) == (numbers(10), 2)


def test_a_broker_that_is_killed_while_a_task_stages_is_waited_for(
    tmp_path: Path, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = BrokerProcess(tmp_path / "data").start()
    options = {"bootstrap.servers": broker.address, "topic": "orders"}
    port = int(broker.address.rpartition(":")[2])
    again = BrokerProcess(tmp_path / "data", port=port)
    monkeypatch.setattr("millstream.spark.writing._GATHERED_BYTES", 1)
    starts: list[threading.Thread] = []

    def batches() -> Any:
        for n in range(30):
            if n == 15:
                broker.kill()
                starts.append(threading.Thread(target=again.start))
                starts[0].start()
            yield batch_of(numbers(100, 100 * n))

    write = Writing(monkeypatch, options)
    try:
        said = write.task(batches(), query=query)
        starts[0].join()
        again.kill()
        again.start()
        write.commit([said])
        write.commit([said])
        rows = read({"bootstrap.servers": broker.address, "subscribe": "orders"})
        assert sorted((row["value"] for row in rows), key=int) == numbers(3000)
    finally:
        again.stop()
