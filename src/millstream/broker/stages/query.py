"""One query: its stages, the log they are in, and what it has published.

The document says what is published and is the only authority: it is recorded before a batch is moved to its topics, and
again when all of it is there.  The log holds staged batches, each as the value of one message whose key says where it
belongs; whatever is in it of published batches is of no more use, and is removed when there is nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import msgspec

from millstream.broker.answers import PublishReply
from millstream.broker.partition import LABEL_DISK, Partition
from millstream.broker.stages.stage import Stage, Staged
from millstream.broker.state import all_batches
from millstream.errors import DataDamaged, MillstreamError, NewerData, StageLost, StorageFailed
from millstream.records import Batch, BatchHeader, encode_batch
from millstream.wire.stage_calls import QueryInfo, StagedOffsets, StagePart

__all__ = ["Publication", "Query", "QueryDocument"]

#: What is of no use any more stays in the log up to this size, so that small batches do not each cost a file.
_TRIM_BYTES: Final = 8 * 1024 * 1024
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder().decode


class Publication(msgspec.Struct, kw_only=True):
    """A batch that is to be published, whatever happens."""

    batch: int
    #: Those that count, in the order in which their messages are published.
    stages: list[str]


class QueryDocument(msgspec.Struct, kw_only=True):
    """What is remembered of a query."""

    #: Of the directory of its log.
    number: int
    namespace: str
    query: str
    used_ms: int
    published: int = -1
    published_ms: int = 0
    messages: int = 0
    lost: int = 0
    offsets: list[StagedOffsets] = []
    publishing: Publication | None = None
    #: The identity that moved messages have, and the next sequence for each target, by `target_key`.
    producer: int = 0
    sequences: dict[str, int] = {}

    @property
    def key(self) -> str:
        return f"query/{self.namespace}/{self.query}"


class Query:
    """See the module."""

    def __init__(self, document: QueryDocument, open_log: Callable[[], Partition]) -> None:
        self.document = document
        self.stages: dict[str, Stage] = {}
        #: One publication or abort at a time.
        self.turn = asyncio.Lock()
        #: Held while stages are opened, or files removed.
        self.files = asyncio.Lock()
        #: A publication could not be recorded; whether it is on disk, the next start will find out.
        self.in_doubt = False
        #: Why the stages that an earlier process has left are not known.
        self.unread: Exception | None = None
        self._open_log = open_log
        self._log: Partition | None = None

    @property
    def log(self) -> Partition:
        if self._log is None:
            self._log = self._open_log()
        return self._log

    @property
    def open_log(self) -> Partition | None:
        """The log, if it is open."""
        return self._log

    @property
    def staged_bytes(self) -> int:
        return sum(stage.bytes for stage in self.stages.values())

    @property
    def is_idle(self) -> bool:
        return not (self.stages or self.unread or self.document.publishing is not None or self.turn.locked())

    def info(self, ttl_ms: int) -> QueryInfo:
        document = self.document
        return QueryInfo(
            query=document.query,
            published=document.published,
            published_ms=document.published_ms,
            publishing=document.publishing.batch if document.publishing is not None else -1,
            messages=sum(stage.messages for stage in self.stages.values()),
            bytes=self.staged_bytes,
            stages=[stage.info(ttl_ms) for stage in self.stages.values()],
        )

    # --- the log -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Find the stages that an earlier process has left."""
        self.stages.clear()
        for stored in all_batches(self.log.log):
            (key,) = stored.keys() or (None,)
            assert key is not None
            self._replay(_unpack(key), stored.base_offset, stored.append_time_us // 1000)
        self._forget([stage for stage in self.stages.values() if stage.batch <= self.document.published])

    def _replay(self, fact: list[Any], offset: int, now_ms: int) -> None:
        kind, *rest = fact
        if kind == "open":
            stage_id, batch, task, attempt = rest
            self.stages[stage_id] = Stage(stage_id, batch, task, attempt, now_ms)
        elif kind == "put":
            stage_id, topic, partition, messages, size = rest
            stage = self.stages.get(stage_id)
            if stage is not None:  # otherwise it was dropped while this was on its way
                stage.store(Staged(offset, topic, partition, messages, size), now_ms=now_ms)
        elif kind == "drop":
            for stage_id in rest[0]:
                self.stages.pop(stage_id, None)
        else:
            raise NewerData(
                f"a query has a fact {kind!r}, which this version of Millstream does not know: "
                "use the version that wrote it or a newer one"
            )

    def open(self, stage: Stage, *, now_us: int) -> None:
        """Add a stage.  It is certain to be there after a power cut as soon as something in it is."""

        def written(error: MillstreamError | None, _label: int, _offset: int, _time_us: int, _again: bool) -> None:
            if error is not None:
                stage.fail(error)  # what is put there would belong to no stage after a restart

        fact = ["open", stage.id, stage.batch, stage.task, stage.attempt]
        self._write(fact, now_us=now_us, reply=written)
        self.stages[stage.id] = stage

    def put(
        self,
        stage: Stage,
        place: tuple[str, int],
        header: BatchHeader,
        batch: memoryview,
        reply: PublishReply | None,
        *,
        now_us: int,
    ) -> bool:
        """Write a batch into a stage; answered when it is on disk.  False when it came before."""
        first = stage.receive(header, reply)
        if first is None:
            return False
        staged_of = partial(Staged, topic=place[0], partition=place[1], messages=header.count, bytes=len(batch))

        def confirmed(error: MillstreamError | None, _label: int, offset: int, time_us: int, _again: bool) -> None:
            if error is not None:
                stage.fail(error)
            else:
                stage.store(staged_of(offset), now_ms=time_us // 1000)
            if reply is not None:
                reply(error, LABEL_DISK, first, time_us, False)

        fact = ["put", stage.id, *place, header.count, len(batch)]
        try:
            self._write(fact, batch, now_us=now_us, fsync="group", reply=confirmed)
        except MillstreamError as error:
            stage.fail(error)
            raise
        return True

    def drop(self, stages: Iterable[Stage], *, now_us: int) -> None:
        """Forget stages that were not published."""
        dropped = [stage.id for stage in stages]
        if dropped:
            self._write(["drop", dropped], now_us=now_us)
            for stage_id in dropped:
                del self.stages[stage_id]

    def _write(
        self,
        fact: list[Any],
        value: memoryview | None = None,
        *,
        now_us: int,
        fsync: str = "never",
        reply: PublishReply | None = None,
    ) -> None:
        # A copy of it is made anyway, and one is enough.
        written = encode_batch([cast("bytes | None", value)], keys=[_pack(fact)], base_timestamp_us=now_us)
        self.log.publish(memoryview(written), fsync=fsync, max_message_bytes=len(written), reply=reply)

    async def read(self, staged: Staged) -> bytearray:
        """A staged batch as its task has sent it."""
        await self.log.warm(staged.offset)
        chunk = self.log.log.read(staged.offset, 1, before=staged.offset + 1)
        if not chunk.buffers:
            raise DataDamaged(f"a staged batch of query {self.document.query!r} cannot be read any more")
        stored = Batch.parse(chunk.buffers[0], verify=False)
        start = stored.sections.values
        return bytearray(memoryview(stored.block)[start : start + stored.sections.value_bytes])

    # --- publishing ----------------------------------------------------------------------------------------------

    def chosen(self, batch: int, parts: Iterable[StagePart]) -> Iterator[Stage]:
        """The stages of a batch that is to be published, each with all that was put there.  Raises StageLost."""
        for part in parts:
            stage = self.stages.get(part.stage)
            if stage is None:
                raise StageLost(f"query {self.document.query!r} has no stage {part.stage!r}, or not any more")
            if stage.batch != batch:
                raise StageLost(f"stage {part.stage!r} belongs to batch {stage.batch}, not to {batch}")
            if (len(stage.staged), stage.messages) != (part.batches, part.messages):
                raise StageLost(
                    f"stage {part.stage!r} has {stage.messages} messages in {len(stage.staged)} batches, not "
                    f"{part.messages} in {part.batches}"
                )
            yield stage

    def published(self) -> None:
        """A batch is published: its stages, and those of batches before it, are of no more use."""
        self._forget([stage for stage in self.stages.values() if stage.batch <= self.document.published])

    def _forget(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            del self.stages[stage.id]
            stage.fail(StageLost(f"stage {stage.id!r} is gone: its batch is published"))
        if not self.stages and self._log is not None and self._log.log.size_bytes > _TRIM_BYTES:
            _trim(self._log)

    def closed(self) -> Partition | None:
        """Let go of the log, which the caller closes."""
        log, self._log = self._log, None
        return log


def _trim(partition: Partition) -> None:
    """Remove everything that is in a log."""
    partition.flush()
    if partition.failed is None:
        with suppress(StorageFailed):  # it is tried again with the next batch
            partition.log.delete_before(partition.log.next_offset)
