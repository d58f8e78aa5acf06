"""The broker: publish, fetch and everything else that can be asked of it.  Every door calls this and nothing below.

Publish and fetch are plain calls that answer through a callback, because they run once per batch and a task per batch
would cost more than the batch.  Everything else is a coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from millstream.broker.cleanup import Cleanup
from millstream.broker.committer import Committer, Rounds
from millstream.broker.groups import Groups
from millstream.broker.letters.letters import Letters
from millstream.broker.letters.replays import Replays
from millstream.broker.metrics import Metrics
from millstream.broker.partition import FetchAnswer, FetchHandle, FetchReply, Partition, PublishReply
from millstream.broker.queues.consumers import LeaseHandle, LeaseReply, SettleReply
from millstream.broker.queues.queues import Queues
from millstream.broker.queues.views import QueueViews
from millstream.broker.queues.why import Why
from millstream.broker.registry import Registry
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.state import StateLog
from millstream.broker.topics import PartitionOpener, Topics
from millstream.broker.traffic.flow import SAMPLE_S, Flow
from millstream.broker.traffic.inboxes import Inboxes
from millstream.broker.traffic.modes import WATCH_S, ModeKeeper, resident_bytes
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.clock import Clock, SystemClock
from millstream.config import Settings
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    ShuttingDown,
)
from millstream.groups.offsets import Bounds
from millstream.groups.records import TopicPartition
from millstream.ids import SCHEDULES
from millstream.log.cache import FileCache, TailCache
from millstream.log.storage import Storage
from millstream.names import check_namespace
from millstream.records import read_header
from millstream.version import VERSION
from millstream.wire import calls, queue_calls
from millstream.wire.deliveries import Delivery
from millstream.wire.leases import LeaseRequest, SettleEntry
from millstream.wire.messages import FSYNC_POLICIES, FetchRequest, PublishRequest

__all__ = ["Broker", "FetchAnswer", "FetchHandle", "LeaseHandle", "Session"]

_log = structlog.get_logger("millstream.broker")

_EXPIRE_INTERVAL_S: Final = 0.25
_SWEEP_INTERVAL_S: Final = 1.0
_CLOCK_INTERVAL_S: Final = 1.0
_NOTE_INTERVAL_S: Final = 1.0
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
    #: Sends messages of a subscription, unless the client is slow to read; then the answer is False.
    deliver: Callable[[Delivery], bool]


class Broker:
    """One node.  All methods are called on its event loop."""

    def __init__(
        self,
        settings: Settings,
        storage: Storage,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        """`rounds` carries out syncs where there are no threads."""
        self.settings = settings
        self.metrics = Metrics()
        self.software = f"millstream {VERSION}"
        self.node_id = ""
        self._storage = storage
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._rounds = rounds
        self._fsync = settings.storage.fsync
        self._started_us = self._clock.now_us()
        self._to_flush: list[Partition] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions: dict[Session, None] = {}
        self._handlers: dict[type, Callable[[Session, Any], Awaitable[object]]] = {}
        self._stopping = asyncio.Event()

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover what is stored, then take requests."""
        loop = asyncio.get_running_loop()
        storage_settings = self.settings.storage
        self._committer = Committer(loop, on_round=self._count_sync, rounds=self._rounds)
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
            on_deleted=self._topic_deleted,
        )
        self.subscriptions = Subscriptions(self.topics, loop=loop, metrics=self.metrics)
        self.inboxes = Inboxes(
            self.subscriptions, clock=self._clock, draw_name=lambda: f"{self._rng.getrandbits(128):032x}"
        )
        groups_log = self._open_state("state/groups")
        self.groups = Groups(
            self, groups_log, clock=self._clock, metrics=self.metrics, draw_suffix=lambda: secrets.token_hex(4)
        )
        self.groups.replay(StateLog.replay(groups_log.partition.log))
        queues_log = self._open_state("state/queues")
        self.queues = Queues(
            self.topics,
            queues_log,
            clock=self._clock,
            metrics=self.metrics,
            rng=self._rng,
            loop=loop,
            flush_s=storage_settings.ack_flush_interval_ms / 1000,
        )
        self.queues.registry.replay(StateLog.replay(queues_log.partition.log))
        self.topics.on_changed = self.queues.registry.topic_changed
        self.letters = Letters(self, clock=self._clock, loop=loop)
        replays_log = self._open_state("state/replays")
        self.replays = Replays(self, replays_log, clock=self._clock, rng=self._rng)
        self.replays.replay(StateLog.replay(replays_log.partition.log))
        schedules_log = self._open_state("state/schedules")
        self.schedules = Schedules(self, schedules_log, clock=self._clock, loop=loop)
        self._state_logs = [topics_log, groups_log, queues_log, schedules_log, replays_log]
        if not clean:
            self._recover()
        await self.topics.finish_deletions()
        await self.queues.registry.forget_stale()
        if not clean:
            await self.groups.mend()
        self.flow = Flow(registry, self.queues, clock=self._clock, loop=loop, metrics=self.metrics)
        self.modes = ModeKeeper(
            self.settings,
            free_bytes=self._storage.free_bytes,
            memory_bytes=resident_bytes,
            state_failure=self._state_failure,
            sessions=lambda: list(self._sessions),
            metrics=self.metrics,
        )
        self._handlers = self._call_handlers()
        self._cleanup = Cleanup(self, self._opener, self._state_logs, self._stopping)
        self._tasks = [
            loop.create_task(self._every(_EXPIRE_INTERVAL_S, self.groups.expire)),
            loop.create_task(self._every(storage_settings.fsync_interval_ms / 1000, self._sync_interval)),
            loop.create_task(self._every(storage_settings.cleanup_interval_ms / 1000, self._cleanup.run)),
            loop.create_task(self._every(_SWEEP_INTERVAL_S, self.queues.sweep)),
            loop.create_task(self._every(WATCH_S, self.modes.watch)),
            loop.create_task(self._every(SAMPLE_S, self.flow.sample)),
            loop.create_task(self._every(_CLOCK_INTERVAL_S, self.schedules.watch)),
            loop.create_task(self._every(_NOTE_INTERVAL_S, self.replays.note)),
            loop.create_task(self._every(storage_settings.cleanup_interval_ms / 1000, self.schedules.tidy)),
        ]
        self.schedules.start()
        self.replays.resume()
        if not clean:
            self._tasks.append(loop.create_task(self._finish_moves()))

    async def stop(self) -> None:
        """Put everything on disk and leave a note that the next start can trust it."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self.replays.stop()
        self.letters.close()
        await self.schedules.stop()
        self.flush()
        goodbye = ShuttingDown("the broker is shutting down")
        await self.queues.close(goodbye)
        self.topics.flush_journals()
        failed = self.topics.moves_undone > 0
        partitions = list(self.topics.open_logs())
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
            try:
                self._storage.replace(_CLEAN_MARKER, b"")
            except OSError as error:  # everything is on disk; the next start only has to find that out
                _log.warning("the next start will check everything: its note could not be left", reason=str(error))

    async def _topic_deleted(self, namespace: str, name: str) -> None:
        await self.groups.forget_topic(namespace, name)
        await self.queues.registry.forget_topic(namespace, name)

    async def _finish_moves(self) -> None:
        """What a crash has interrupted is taken up in the background; a move is safe as soon as it is recorded."""
        moving = asyncio.ensure_future(self.topics.finish_moves())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((moving, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (moving, stopping):
            task.cancel()
        if moving.done() and not moving.cancelled() and (problem := moving.exception()) is not None:
            _log.error("moves between partitions could not be finished", reason=str(problem))

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
        for partition in self.topics.open_logs():
            if partition.needs_interval_sync and partition.failed is None:
                self._committer.request(partition)

    def _count_sync(self, seconds: float, files: int) -> None:
        self.metrics.sync_rounds += 1
        self.metrics.files_synced += files
        self.metrics.sync_us += int(seconds * 1e6)

    def _state_failure(self) -> str | None:
        """Why the broker cannot remember what it decides, if so."""
        return next((log.partition.failed for log in self._state_logs if log.partition.failed is not None), None)

    def _partition_failed(self, partition: Partition, reason: str) -> None:
        _log.error("partition stopped accepting messages", directory=partition.log.directory, reason=reason)

    # --- sessions ------------------------------------------------------------------------------------------------

    def open_session(
        self,
        *,
        namespace: str,
        client_id: str,
        address: str,
        push: Callable[[object], None],
        deliver: Callable[[Delivery], bool] = lambda _: False,
    ) -> Session:
        session = Session(check_namespace(namespace), client_id, address, push, deliver)
        self._sessions[session] = None
        return session

    def session_closed(self, session: Session) -> None:
        self._sessions.pop(session, None)
        self.groups.disconnected(session.push)
        self.queues.session_closed(session)
        self.subscriptions.session_closed(session)
        self.flow.session_closed(session)

    def session_drained(self, session: Session) -> None:
        """The client was slow to read and has caught up."""
        self.subscriptions.drained(session)

    # --- publish and fetch ---------------------------------------------------------------------------------------

    def publish(self, session: Session, request: PublishRequest, reply: PublishReply | None) -> None:
        """Store a batch.  The buffer is borrowed until `flush`, which the caller owes before it reuses the buffer.

        Raises MillstreamError when the batch is refused; otherwise `reply` is called once it is as durable as asked.
        """
        if self.modes.publish_refusal is not None:
            raise self.modes.publish_refusal
        name, number, _, fsync, batch = request
        registry = self.topics.registry
        topic = registry.find(session.namespace, name)
        if topic is None:
            if self.inboxes.publish(session.namespace, name, number, batch, reply):
                return
            topic = registry.get(session.namespace, name)
        config = topic.config
        # What is scheduled is in no queue yet.
        if (config.max_depth or config.throttle_lag_ms or config.throttle_depth) and number < SCHEDULES:
            reply = self.flow.admit(session, topic, number, batch, reply)
        if self.modes.delay_ms and reply is not None:
            reply = self.flow.delayed(reply, self.modes.delay_ms)
        durability = FSYNC_POLICIES[fsync] or config.fsync or self._fsync
        if number >= SCHEDULES and durability != "always":
            durability = "group"  # that it has fired must not outlive it: its successor would be taken for fired
        self.topics.partition_of(topic, number).publish(
            batch,
            fsync=durability,
            max_message_bytes=config.max_message_bytes,
            reply=reply,
            dedup_window_ms=config.dedup_window_ms,
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
        if self.modes.serve_refusal is not None:
            raise self.modes.serve_refusal
        partition = self.topics.partition(session.namespace, request.topic, request.partition)
        return partition.fetch(request.offset, request.max_bytes, request.wait_ms, reply)

    # --- queues --------------------------------------------------------------------------------------------------

    def lease(self, session: Session, request: LeaseRequest, reply: LeaseReply) -> LeaseHandle | None:
        """Hand out messages of a queue, waiting for some if there are none; the handle cancels the wait."""
        if self._stopping.is_set():
            raise ShuttingDown("the broker is shutting down")
        if self.modes.serve_refusal is not None:
            raise self.modes.serve_refusal
        return self.queues.lease(session, request, reply)

    def settle(self, session: Session, entries: Sequence[SettleEntry], reply: SettleReply) -> None:
        """Say what became of leased messages; answered with a result per entry."""
        self.queues.settle(session, entries, reply)

    # --- everything else -----------------------------------------------------------------------------------------

    async def call(self, session: Session, call: object) -> object:
        """Answer one of the control calls (see wire/calls.py) with something that can be written as JSON."""
        return await self._handlers[type(call)](session, call)

    def _call_handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        topics, groups = self.topics, self.groups
        return {
            calls.DescribeBroker: self._describe_broker,
            calls.CreateNamespace: lambda _, call: topics.create_namespace(call.name),
            calls.DeleteNamespace: self._delete_namespace,
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
            queue_calls.Explain: Why(self).explain,
            **QueueViews(self.queues).handlers(),
            **self.subscriptions.handlers(),
            **self.inboxes.handlers(),
            **self.flow.handlers(),
            **self.modes.handlers(),
            **self.schedules.handlers(),
            **self.letters.handlers(),
            **self.replays.handlers(),
        }

    async def _describe_broker(self, session: Session, _: calls.DescribeBroker) -> dict[str, Any]:
        registry = self.topics.registry
        return {
            "software": self.software,
            "node_id": self.node_id,
            "uptime_ms": (self._clock.now_us() - self._started_us) // 1000,
            "mode": self.modes.mode,
            "reason": self.modes.reason,
            "namespace": session.namespace,
            "namespaces": len(registry.namespaces),
            "topics": sum(map(len, registry.namespaces.values())),
            "fsync": self.settings.storage.fsync,
            "metrics": self.metrics.as_dict(),
        }

    async def _list_namespaces(self, _: Session, __: calls.ListNamespaces) -> list[str]:
        return sorted(self.topics.registry.namespaces)

    async def _delete_namespace(self, _: Session, call: calls.DeleteNamespace) -> None:
        await self.topics.delete_namespace(call.name, force=call.force)
        await self.queues.registry.forget_namespace(call.name)

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
        topic = self.topics.registry.find(session.namespace, call.name)
        readers += [group.name for group in self.queues.registry.on_topic(topic) if group.consumers] if topic else []
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
        return calls.ProducerIdentity(producer_id=await self.topics.new_producer_id(), epoch=0)

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
