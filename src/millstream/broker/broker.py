"""The broker: publish, fetch and everything else that can be asked of it.  Every door calls this and nothing below.

Publish and fetch are plain calls that answer through a callback, because they run once per batch and a task per batch
would cost more than the batch.  Everything else is a coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from millstream.broker.cleanup import Cleanup
from millstream.broker.committer import Committer
from millstream.broker.groups import Groups
from millstream.broker.metrics import Metrics
from millstream.broker.partition import FetchAnswer, FetchHandle, FetchReply, Partition, PublishReply
from millstream.broker.registry import Registry
from millstream.broker.state import StateLog
from millstream.broker.topics import PartitionOpener, Topics
from millstream.clock import Clock, SystemClock
from millstream.config import Settings
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    ReadOnly,
    ShuttingDown,
)
from millstream.groups.offsets import Bounds
from millstream.groups.records import TopicPartition
from millstream.log.cache import FileCache, TailCache
from millstream.log.storage import Storage
from millstream.names import check_namespace
from millstream.records import read_header
from millstream.version import VERSION
from millstream.wire import calls
from millstream.wire.messages import FSYNC_POLICIES, FetchRequest, PublishRequest

__all__ = ["Broker", "FetchAnswer", "FetchHandle", "Session"]

_log = structlog.get_logger("millstream.broker")

_EXPIRE_INTERVAL_S: Final = 0.25
_DISK_INTERVAL_S: Final = 1.0
_CLEAN_MARKER: Final = "clean"
_STATE_SEGMENT_BYTES: Final = 4 * 1024 * 1024
_SEARCH_BYTES: Final = 4096
_LIST_LIMIT_MAX: Final = 10_000


@dataclass(eq=False, slots=True)
class Session:
    """One client of the broker, whichever door it came through."""

    namespace: str
    client_id: str
    address: str
    #: Sends the client something it did not ask for.
    push: Callable[[object], None]


class Broker:
    """One node.  All methods are called on its event loop."""

    def __init__(
        self, settings: Settings, storage: Storage, *, clock: Clock | None = None, rng: random.Random | None = None
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.software = f"millstream {VERSION}"
        self.node_id = ""
        self.read_only: str | None = None
        self._storage = storage
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._fsync = settings.storage.fsync
        self._started_us = self._clock.now_us()
        self._to_flush: list[Partition] = []
        self._producer_ids: list[int] = []
        self._producer_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[type, Callable[[Session, Any], Awaitable[object]]] = {}
        self._stopping = asyncio.Event()

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover what is stored, then take requests."""
        loop = asyncio.get_running_loop()
        storage_settings = self.settings.storage
        self._committer = Committer(loop, on_round=self._count_sync)
        self._opener = PartitionOpener(
            storage=self._storage,
            settings=self.settings,
            clock=self._clock,
            loop=loop,
            committer=self._committer,
            metrics=self.metrics,
            files=FileCache(limit=storage_settings.open_files_max),
            tail=TailCache(bytes_max=storage_settings.tail_cache_bytes),
            flush_later=self._to_flush.append,
            on_failed=self._partition_failed,
        )
        clean = self._storage.exists(_CLEAN_MARKER)
        if clean:
            self._storage.remove(_CLEAN_MARKER)
            self._storage.sync_directory("")
        self.node_id = self._load_node_id()
        registry = Registry(topics_max=self.settings.topics.max_topics)
        topics_log = self._open_state("state/topics")
        registry.replay(StateLog.replay(topics_log.partition.log))
        self.topics = Topics(
            registry,
            topics_log,
            self._opener,
            draw_uid=lambda: self._rng.getrandbits(32),
            on_deleted=lambda namespace, name: self.groups.forget_topic(namespace, name),
        )
        groups_log = self._open_state("state/groups")
        self.groups = Groups(
            self, groups_log, clock=self._clock, metrics=self.metrics, draw_suffix=lambda: secrets.token_hex(4)
        )
        self.groups.replay(StateLog.replay(groups_log.partition.log))
        self._state_logs = [topics_log, groups_log]
        if not clean:
            self._recover()
        await self.topics.finish_deletions()
        self._handlers = self._call_handlers()
        self._cleanup = Cleanup(self, self._opener, self._state_logs, self._stopping)
        self._tasks = [
            loop.create_task(self._every(_EXPIRE_INTERVAL_S, self.groups.expire)),
            loop.create_task(self._every(storage_settings.fsync_interval_ms / 1000, self._sync_interval)),
            loop.create_task(self._every(storage_settings.cleanup_interval_ms / 1000, self._cleanup.run)),
            loop.create_task(self._every(_DISK_INTERVAL_S, self._cleanup.watch_disk)),
        ]

    async def stop(self) -> None:
        """Put everything on disk and leave a note that the next start can trust it."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        self.flush()
        goodbye = ShuttingDown("the broker is shutting down")
        failed = False
        partitions = [partition for _, partition in self.topics.open_partitions()]
        partitions += [log.partition for log in self._state_logs]
        for partition in partitions:
            partition.cancel_all(goodbye)
            if partition.is_durable and partition.failed is None:
                self._committer.request(partition)
        await self._committer.close()
        for partition in partitions:
            failed = failed or partition.failed is not None
            partition.log.close()
        if not failed:
            self._storage.replace(_CLEAN_MARKER, b"")

    def _recover(self) -> None:
        started_us = self._clock.now_us()
        said_us = started_us

        def progress(done: int) -> None:
            nonlocal said_us
            if self._clock.now_us() - said_us > 2_000_000:
                said_us = self._clock.now_us()
                _log.info("recovering", partitions=done)

        opened = self.topics.recover(progress)
        if opened:
            took_ms = (self._clock.now_us() - started_us) // 1000
            _log.info("recovered after an unclean stop", partitions=opened, took_ms=took_ms)

    def _load_node_id(self) -> str:
        if self._storage.exists("node_id"):
            return self._storage.read_all("node_id").decode().strip()
        node_id = f"{self._rng.getrandbits(64):016x}"
        self._storage.replace("node_id", node_id.encode() + b"\n")
        return node_id

    def _open_state(self, directory: str) -> StateLog:
        partition = self._opener.open(directory, 0, segment_bytes=_STATE_SEGMENT_BYTES)
        return StateLog(partition, self._opener.loop)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again until the broker stops; it is never cut off in the middle."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
            if self._stopping.is_set():
                return
            try:
                await work()
            except MillstreamError as error:
                _log.error("background work failed", work=work.__name__, code=error.code, reason=str(error))
            except Exception:
                _log.exception("background work failed", work=work.__name__)

    async def _sync_interval(self) -> None:
        for _, partition in self.topics.open_partitions():
            if partition.needs_interval_sync and partition.failed is None:
                self._committer.request(partition)

    def _count_sync(self, seconds: float, files: int) -> None:
        self.metrics.sync_rounds += 1
        self.metrics.files_synced += files
        self.metrics.sync_us += int(seconds * 1e6)

    def _partition_failed(self, partition: Partition, reason: str) -> None:
        _log.error("partition stopped accepting messages", directory=partition.log.directory, reason=reason)

    # --- sessions ------------------------------------------------------------------------------------------------

    def open_session(self, *, namespace: str, client_id: str, address: str, push: Callable[[object], None]) -> Session:
        return Session(check_namespace(namespace), client_id, address, push)

    def session_closed(self, session: Session) -> None:
        self.groups.disconnected(session.push)

    # --- publish and fetch ---------------------------------------------------------------------------------------

    def publish(self, session: Session, request: PublishRequest, reply: PublishReply | None) -> None:
        """Store a batch.  The buffer is borrowed until `flush`, which the caller owes before it reuses the buffer.

        Raises MillstreamError when the batch is refused; otherwise `reply` is called once it is as durable as asked.
        """
        if self.read_only is not None:
            raise ReadOnly(self.read_only)
        name, number, _, fsync, batch = request
        registry = self.topics.registry
        topic = registry.find(session.namespace, name) or registry.get(session.namespace, name)
        config = topic.config
        self.topics.partition_of(topic, number).publish(
            batch,
            fsync=FSYNC_POLICIES[fsync] or config.fsync or self._fsync,
            max_message_bytes=config.max_message_bytes,
            reply=reply,
        )

    def flush(self) -> None:
        """Append everything published since the last call: one write per partition."""
        to_flush = self._to_flush
        try:
            while to_flush:
                to_flush.pop().flush()
        finally:
            if to_flush:  # a log raised what it should not; the others must not keep views of a borrowed buffer
                self.flush()

    def fetch(self, session: Session, request: FetchRequest, reply: FetchReply) -> FetchHandle | None:
        """Read batches from an offset on, waiting for some if there are none; the handle cancels the wait."""
        if self._stopping.is_set():
            raise ShuttingDown("the broker is shutting down")
        partition = self.topics.partition(session.namespace, request.topic, request.partition)
        return partition.fetch(request.offset, request.max_bytes, request.wait_ms, reply)

    # --- everything else -----------------------------------------------------------------------------------------

    async def call(self, session: Session, call: object) -> object:
        """Answer one of the control calls (see wire/calls.py) with something that can be written as JSON."""
        return await self._handlers[type(call)](session, call)

    def _call_handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        topics, groups = self.topics, self.groups
        return {
            calls.DescribeBroker: self._describe_broker,
            calls.CreateNamespace: lambda _, call: topics.create_namespace(call.name),
            calls.DeleteNamespace: lambda _, call: topics.delete_namespace(call.name, force=call.force),
            calls.ListNamespaces: self._list_namespaces,
            calls.CreateTopic: self._create_topic,
            calls.DescribeTopic: self._describe_topic,
            calls.ListTopics: self._list_topics,
            calls.AlterTopic: self._alter_topic,
            calls.DeleteTopic: self._delete_topic,
            calls.Metadata: self._metadata,
            calls.ListOffsets: self._list_offsets,
            calls.NewProducer: self._new_producer,
            calls.JoinGroup: self._join_group,
            calls.HeartbeatGroup: lambda session, call: groups.heartbeat(session.namespace, call, push=session.push),
            calls.LeaveGroup: lambda session, call: groups.leave(session.namespace, call),
            calls.CommitOffsets: lambda session, call: groups.commit(session.namespace, call),
            calls.CommittedOffsets: self._committed,
            calls.ListGroups: self._list_groups,
            calls.DescribeGroup: self._describe_group,
            calls.ResetOffsets: lambda session, call: groups.reset(session.namespace, call),
            calls.DeleteGroup: lambda session, call: groups.delete(session.namespace, call.name),
            calls.EvictMember: lambda session, call: groups.evict(session.namespace, call),
        }

    async def _describe_broker(self, session: Session, _: calls.DescribeBroker) -> dict[str, Any]:
        registry = self.topics.registry
        return {
            "software": self.software,
            "node_id": self.node_id,
            "uptime_ms": (self._clock.now_us() - self._started_us) // 1000,
            "mode": "read-only" if self.read_only else "normal",
            "reason": self.read_only,
            "namespace": session.namespace,
            "namespaces": len(registry.namespaces),
            "topics": sum(map(len, registry.namespaces.values())),
            "fsync": self.settings.storage.fsync,
            "metrics": self.metrics.as_dict(),
        }

    async def _list_namespaces(self, _: Session, __: calls.ListNamespaces) -> list[str]:
        return sorted(self.topics.registry.namespaces)

    async def _create_topic(self, session: Session, call: calls.CreateTopic) -> calls.TopicInfo:
        if self.settings.topics.auto_create:
            await self.topics.ensure_namespace(session.namespace)
        info = await self.topics.create(session.namespace, call)
        await self.groups.refresh(session.namespace)
        return info

    async def _describe_topic(self, session: Session, call: calls.DescribeTopic) -> calls.TopicInfo:
        return await self.topics.describe(session.namespace, call.name)

    async def _list_topics(self, session: Session, call: calls.ListTopics) -> list[calls.TopicInfo]:
        if not 1 <= call.limit <= _LIST_LIMIT_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIST_LIMIT_MAX}, not {call.limit}")
        topics = self.topics.registry.matching(session.namespace, call.pattern)
        found = [topic for topic in topics if topic.name > call.after]
        return [self.topics.info(topic) for topic in found[: call.limit]]

    async def _alter_topic(self, session: Session, call: calls.AlterTopic) -> calls.TopicInfo:
        info = await self.topics.alter(session.namespace, call)
        if call.partitions is not None:
            await self.groups.refresh(session.namespace)
        return info

    async def _delete_topic(self, session: Session, call: calls.DeleteTopic) -> None:
        readers = self.groups.readers_of(session.namespace, call.name)
        if readers and not call.force:
            raise InvalidArgument(f"topic {call.name!r} is being read by group {readers[0]!r}; stop it or use force")
        await self.topics.delete(session.namespace, call.name)
        await self.groups.refresh(session.namespace)

    async def _metadata(self, session: Session, call: calls.Metadata) -> list[calls.TopicMetadata]:
        before = len(self.topics.registry.namespaces.get(session.namespace, ()))
        answer = await self.topics.metadata(session.namespace, call)
        if len(self.topics.registry.namespaces.get(session.namespace, ())) != before:
            await self.groups.refresh(session.namespace)
        return answer

    async def _list_offsets(self, session: Session, call: calls.ListOffsets) -> list[calls.OffsetEntry]:
        topic = self.topics.registry.get(session.namespace, call.topic)
        numbers = range(len(topic.partition_uids)) if call.partitions is None else call.partitions
        if call.at == "timestamp" and call.timestamp_ms is None:
            raise InvalidArgument("offsets at a timestamp need timestamp_ms")
        answer = []
        for number in numbers:
            if number in range(len(topic.partitions)) and self.topics.is_untouched(topic, number):
                answer.append(calls.OffsetEntry(topic=call.topic, partition=number, offset=0))
                continue
            await asyncio.sleep(0)  # opening takes a moment; others go first
            partition = self.topics.partition(session.namespace, call.topic, number)
            if call.at == "earliest":
                offset = partition.log.start_offset
            elif call.at == "latest":
                offset = partition.high_watermark
            else:
                assert call.timestamp_ms is not None
                offset = min(partition.log.offset_at_time(call.timestamp_ms * 1000), partition.high_watermark)
            answer.append(calls.OffsetEntry(topic=call.topic, partition=number, offset=offset))
        return answer

    async def _new_producer(self, _: Session, __: calls.NewProducer) -> calls.ProducerIdentity:
        async with self._producer_lock:
            if not self._producer_ids:
                self._producer_ids = list(reversed(await self.topics.new_producer_block()))
            return calls.ProducerIdentity(producer_id=self._producer_ids.pop(), epoch=0)

    async def _join_group(self, session: Session, call: calls.JoinGroup) -> calls.Assignment:
        if call.session_ms > self.settings.groups.session_ms_max:
            raise InvalidArgument(
                f"session_ms is {call.session_ms}, this broker allows {self.settings.groups.session_ms_max}"
            )
        return await self.groups.join(
            session.namespace, call, client_id=session.client_id, address=session.address, push=session.push
        )

    async def _committed(self, session: Session, call: calls.CommittedOffsets) -> list[calls.OffsetEntry]:
        return self.groups.committed(session.namespace, call)

    async def _list_groups(self, session: Session, _: calls.ListGroups) -> list[calls.GroupSummary]:
        return self.groups.summaries(session.namespace)

    async def _describe_group(self, session: Session, call: calls.DescribeGroup) -> calls.GroupInfo:
        return await self.groups.describe(session.namespace, call.name)

    # --- what groups ask (GroupsHost) ----------------------------------------------------------------------------

    def partition_counts(self, namespace: str) -> dict[str, int]:
        return self.topics.registry.partition_counts(namespace)

    def bounds(self, namespace: str, partition: TopicPartition) -> Bounds:
        topic = self.topics.registry.get(namespace, partition.topic)
        if self.topics.is_untouched(topic, partition.partition):
            return Bounds(0, 0)
        running = self.topics.partition_of(topic, partition.partition)
        return Bounds(running.log.start_offset, running.high_watermark)

    def offset_at_time(self, namespace: str, partition: TopicPartition, time_us: int) -> int:
        running = self.topics.partition(namespace, partition.topic, partition.partition)
        return min(running.log.offset_at_time(time_us), running.high_watermark)

    async def append_time_us(self, namespace: str, partition: TopicPartition, offset: int) -> int | None:
        """When the message at an offset was stored, or None when it is not there."""
        running = self.topics.partition(namespace, partition.topic, partition.partition)
        await running.warm(offset)
        if not running.log.start_offset <= offset < running.high_watermark:
            return None
        chunk = running.log.read(offset, _SEARCH_BYTES, before=running.high_watermark)
        return read_header(chunk.buffers[0]).append_time_us if chunk.buffers else None
