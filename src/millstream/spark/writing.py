"""What batch and streaming writes have in common.

A task puts its messages into a stage of its own, where nobody sees them, and says which one that is.  When all tasks
are done the driver publishes their stages by a single call, which may come again: the broker knows what is published by
the name of the query and the number of the batch.  What other attempts have staged is forgotten.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millstream.compression import Codec
from millstream.errors import InternalError, MillstreamError, UnavailableError
from millstream.spark.connection import BrokerConnection, connect
from millstream.spark.encoding import BatchEncoder, check_columns
from millstream.spark.faults import reached
from millstream.spark.options import SinkOptions
from millstream.spark.outlets import Identity, Outlet, StageOutlet, TopicOutlet
from millstream.spark.workers import settle
from millstream.wire.calls import Metadata, TopicMetadata
from millstream.wire.stage_calls import AbortStages, ListStages, Published, PublishStages, QueryInfo, StagePart

__all__ = ["Task", "Written", "abort", "check_schema", "publish", "task_now", "write"]

#: Rows are gathered to about this much before they are encoded: Spark sends 10,000 at a time, and a batch for each
#: partition would be made of a fraction of them.
_GATHERED_BYTES: Final = 8 * 1024 * 1024
#: An abort only tidies up, and Spark waits for it before it says what went wrong.
_ABORT_S: Final = 5.0
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class Task(NamedTuple):
    """Which part of a write this is, and by which query."""

    number: int = 0
    attempt: int = 0
    #: Of the streaming query that the task belongs to; empty without one.
    query: str = ""
    batch: int = 0


def task_now() -> Task:
    """The task that this process works on."""
    context = TaskContext.get()
    if context is None:
        raise InternalError("messages are written by tasks of Spark, and this is none")
    query = context.getLocalProperty(_QUERY_ID) or ""
    batch = int(context.getLocalProperty(_BATCH_ID) or 0)
    return Task(context.partitionId(), context.attemptNumber(), query, batch)


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver."""

    #: None: it has published its messages itself.
    identity: Identity | None
    task: int
    #: Empty: there was nothing to stage, or it is published already.
    stage: str = ""
    batches: int = 0
    messages: int = 0


def check_schema(options: SinkOptions, schema: StructType) -> None:
    """Raises InvalidArgument before anything runs if such rows cannot be written."""
    check_columns(to_arrow_schema(schema, timezone="UTC"), topic=options.topic)


# --- tasks -----------------------------------------------------------------------------------------------------------


def write(options: SinkOptions, identity: Identity | None, task: Task, batches: Iterable[pa.RecordBatch]) -> Written:
    """Stage all rows of a task; without an identity to publish them under, publish them."""
    settle()
    connection = connect(options.target)
    encoder = BatchEncoder(
        partitions=_partition_counts(connection),
        topic=options.topic,
        codec=Codec[options.compression.upper()],
        start=task.number,
    )
    if identity is None:
        published = TopicOutlet(connection)
        _put_all(published, encoder, batches)
        return Written(None, task.number, "", published.batches, published.messages)
    staged = StageOutlet(connection, identity, task=task.number, attempt=task.attempt)
    try:
        _put_all(staged, encoder, batches)
    except BaseException:
        if staged.stage:  # nobody will ever publish it, and it would take room for a day
            _forget(options, identity, [staged.stage])
        raise
    return Written(identity, task.number, staged.stage, staged.batches, staged.messages)


def _put_all(outlet: Outlet, encoder: BatchEncoder, batches: Iterable[pa.RecordBatch]) -> None:
    reached("before_stage")
    for rows in _gathered(batches):
        if outlet.closed:
            continue  # the rest is read all the same: a worker that leaves something unread is not used again
        for encoded in encoder.encode(rows, now_us=time.time_ns() // 1000):
            outlet.put(encoded)
    outlet.finish()
    reached("after_stage")


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    some: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        some.append(batch)
        size += batch.nbytes
        if size >= _GATHERED_BYTES:
            yield pa.concat_batches(some)
            some, size = [], 0
    if some:
        yield pa.concat_batches(some)


def _partition_counts(connection: BrokerConnection) -> Callable[[str], int]:
    known: dict[str, int] = {}

    def count(topic: str) -> int:
        if topic not in known:
            (metadata,) = connection.call(Metadata(topics=[topic], create=True), list[TopicMetadata])
            known[topic] = len(metadata.partition_uids)
        return known[topic]

    return count


# --- the driver ------------------------------------------------------------------------------------------------------


def publish(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> Published | None:
    """Publish what the tasks of a batch have staged.  None if there is nothing to do."""
    written = sorted((each for each in messages if isinstance(each, Written)), key=lambda each: each.task)
    identity = next((each.identity for each in written), None)
    if identity is None:
        return None
    parts = [
        StagePart(stage=each.stage, batches=each.batches, messages=each.messages) for each in written if each.stage
    ]
    reached("before_publish")
    published = _publish(connect(options.target), identity, parts)
    if published.lost:
        print(
            f"millstream: {published.lost} messages of {identity} were not published: their topic was deleted",
            file=sys.stderr,
        )
    reached("after_publish")
    return published


def _publish(connection: BrokerConnection, identity: Identity, parts: list[StagePart]) -> Published:
    call = PublishStages(query=identity.query, batch=identity.batch, stages=parts)
    while True:
        try:
            published: Published = connection.call(call, Published)
            return published
        except UnavailableError:
            # What is large takes its time.  Once it has begun nothing stops it, so there is no other way to end.
            known = connection.call(ListStages(query=identity.query), list[QueryInfo])
            if not known or identity.batch not in (known[0].publishing, known[0].published):
                raise


def abort(
    options: SinkOptions, messages: Sequence[WriterCommitMessage | None], otherwise: Identity | None = None
) -> None:
    """Forget what is staged.  Spark also says so after a commit that has succeeded: then the broker ignores it.

    `otherwise` is who we are if no task has got so far as to say it; without it, what is left of them will expire.
    """
    identity = next((each.identity for each in messages if isinstance(each, Written)), otherwise)
    if identity is not None:
        _forget(options, identity)


def _forget(options: SinkOptions, identity: Identity, stages: list[str] | None = None) -> None:
    """Some stages of a batch, or all; without complaint, since something else went wrong before."""
    target = replace(options.target, timeout_s=min(options.target.timeout_s, _ABORT_S))
    with contextlib.suppress(MillstreamError):
        connect(target).call(AbortStages(query=identity.query, batch=identity.batch, stages=stages))
