"""The broker: publish, fetch and everything else that can be asked of it.  Every door calls this and nothing below.

Publish and fetch are plain calls that answer through a callback, because they run once per batch and a task per batch
would cost more than the batch.  Everything else is a coroutine.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from millstream.access.rights import EVERYTHING, Access
from millstream.broker.access.audit import Audit
from millstream.broker.access.control import AccessControl
from millstream.broker.access.quotas import MEASURE_S, Quotas
from millstream.broker.administration import Administration
from millstream.broker.answers import FetchAnswer, FetchHandle, FetchReply
from millstream.broker.background import every
from millstream.broker.cleanup import Cleanup
from millstream.broker.committer import Committer, Rounds
from millstream.broker.cut_moves import CutMoves
from millstream.broker.group_calls import GroupCalls
from millstream.broker.group_topics import GroupTopics
from millstream.broker.groups import Groups
from millstream.broker.health import Health
from millstream.broker.holds import Holds
from millstream.broker.journal import SEGMENT_BYTES
from millstream.broker.letters.letters import Letters
from millstream.broker.letters.replays import Replays
from millstream.broker.messages.messages import Messages
from millstream.broker.messages.summaries import Summaries
from millstream.broker.metrics import Metrics
from millstream.broker.mqtt.mqtt import Mqtt
from millstream.broker.mqtt.views import MqttViews
from millstream.broker.node import TOPICS_STATE, check_data, close_all, load_node_id, take_clean_marker
from millstream.broker.partition import Partition, PublishReply
from millstream.broker.pipelines import Pipelines
from millstream.broker.queues.claims import Claims
from millstream.broker.queues.consumers import LeaseHandle, LeaseReply, SettleReply
from millstream.broker.queues.queues import Queues
from millstream.broker.queues.text_leases import TextLeases
from millstream.broker.queues.views import QueueViews
from millstream.broker.queues.why import Why
from millstream.broker.registry import Registry, Topic
from millstream.broker.rounds import open_rounds
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.sessions import Session
from millstream.broker.stages.stages import Stages
from millstream.broker.state import StateLog
from millstream.broker.stats.stats import SAMPLE_S as STATS_S
from millstream.broker.stats.stats import Stats
from millstream.broker.topic_calls import TopicCalls, check_is_there
from millstream.broker.topics import PartitionOpener, Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.traces.spans import Spans, open_provider
from millstream.broker.traces.store import TraceStore
from millstream.broker.traces.traces import Traces
from millstream.broker.traffic.flow import SAMPLE_S, Flow
from millstream.broker.traffic.inboxes import Inboxes
from millstream.broker.traffic.modes import WATCH_S, ModeKeeper, resident_bytes
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.broker.webhooks.sender import Sender
from millstream.broker.webhooks.webhooks import Webhooks
from millstream.clock import Clock, SystemClock
from millstream.config import Settings
from millstream.errors import BatchDamaged, MillstreamError, ShuttingDown
from millstream.ids import SCHEDULES
from millstream.log.cache import FileCache, TailCache
from millstream.log.storage import Storage
from millstream.names import AUDIT_TOPIC, STAGE_PREFIX, check_namespace
from millstream.records import HEADER_BYTES, BatchHeader
from millstream.version import VERSION
from millstream.wire import queue_calls
from millstream.wire.deliveries import Delivery
from millstream.wire.leases import LeaseRequest, SettleEntry
from millstream.wire.messages import FSYNC_POLICIES, FetchRequest, PublishRequest

__all__ = ["Broker", "FetchAnswer", "FetchHandle", "LeaseHandle", "Session"]

_log = structlog.get_logger("millstream.broker")

#: What a client calls itself is kept as long as it is there; more is cut off.
_CLIENT_ID_LETTERS_MAX: Final = 256
_EXPIRE_INTERVAL_S: Final = 0.25
_SWEEP_INTERVAL_S: Final = 1.0
_CLOCK_INTERVAL_S: Final = 1.0
_ACCESS_INTERVAL_S: Final = 0.5
_NOTE_INTERVAL_S: Final = 1.0
_MQTT_INTERVAL_S: Final = 1.0
_STATE_SEGMENT_BYTES: Final = 4 * 1024 * 1024


class Broker:
    """One node.  All methods are called on its event loop."""

    access: AccessControl
    audit: Audit
    quotas: Quotas

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
        self._to_flush: list[Partition] = []
        self._state_logs: list[StateLog] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._sessions: dict[Session, None] = {}
        self._handlers: dict[type, Callable[[Session, Any], Awaitable[object]]] = {}
        self.spans: Spans | None = None
        self._stopping = asyncio.Event()
        #: Where each setting came from, and who changes the level of the log; said by whoever starts the broker.
        self.setting_sources: Mapping[str, str] = {}
        self.on_log_level: Callable[[str], None] = lambda _: None

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover what is stored, then take requests."""
        check_data(self._storage)
        loop = asyncio.get_running_loop()
        self._open_storage(loop)
        clean = take_clean_marker(self._storage)
        self.node_id = load_node_id(self._storage, lambda: self._rng.getrandbits(64))
        self._open_topics(loop)
        self._open_queues(loop)
        self._open_access()
        self._open_mqtt(loop)
        self._open_stages()
        self.messages = Messages(self, clock=self._clock, loop=loop)
        if not clean:
            self.topics.recover()
        await self.topics.finish_deletions()
        await self.queues.registry.forget_stale()
        await self.stages.forget_stale()
        await self.groups.mend(clean=clean)
        await self.mqtt.mend(clean=clean)
        self._open_watches(loop)
        self._handlers = self._call_handlers()
        self._begin(loop, clean=clean)

    def _open_storage(self, loop: asyncio.AbstractEventLoop) -> None:
        settings = self.settings.storage
        self._committer = Committer(loop, rounds=self._rounds or open_rounds(loop), on_round=self.metrics.count_sync)
        self._opener = PartitionOpener(
            storage=self._storage,
            settings=self.settings,
            clock=self._clock,
            loop=loop,
            committer=self._committer,
            metrics=self.metrics,
            files=FileCache(limit=settings.open_files_max),
            tail=TailCache(bytes_max=settings.tail_cache_bytes),
            flush_later=self._to_flush.append,
            on_failed=self._partition_failed,
        )

    def _open_topics(self, loop: asyncio.AbstractEventLoop) -> None:
        """Topics, and those who only read them: subscriptions and stream groups."""
        log = self._open_state(TOPICS_STATE)
        limits = self.settings.topics
        registry = Registry(topics_max=limits.max_topics, namespaces_max=limits.max_namespaces)
        registry.replay(log.replay())
        self.topics = Topics(
            registry,
            log,
            self._opener,
            draw_uid=lambda: self._rng.getrandbits(32),
            on_deleted=self._topic_deleted,
        )
        self.subscriptions = Subscriptions(self.topics, loop=loop, metrics=self.metrics)
        self.inboxes = Inboxes(
            self.subscriptions, clock=self._clock, draw_name=lambda: f"{self._rng.getrandbits(128):032x}"
        )
        log = self._open_state("state/groups")
        self.groups = Groups(
            GroupTopics(self.topics),
            log,
            clock=self._clock,
            metrics=self.metrics,
            draw_suffix=lambda: secrets.token_hex(4),
            groups_max=self.settings.groups.max_groups,
        )
        self.groups.replay(log.replay())

    def _open_queues(self, loop: asyncio.AbstractEventLoop) -> None:
        """Queues, who records what happens in them, and everything that moves messages in or out of them."""
        settings = self.settings.traces
        self.recorder = Recorder(self, TraceStore(self._opener, settings), settings, clock=self._clock, loop=loop)
        if settings.enabled and settings.otlp_endpoint:
            provider = open_provider(settings.otlp_endpoint, self.node_id)
            self.spans = Spans(provider, self.recorder, clock=self._clock)
        log = self._open_state("state/queues")
        self.queues = Queues(
            self.topics,
            log,
            clock=self._clock,
            metrics=self.metrics,
            rng=self._rng,
            loop=loop,
            flush_s=self.settings.storage.ack_flush_interval_ms / 1000,
            recorder=self.recorder,
        )
        self.queues.registry.replay(log.replay())
        self.topics.on_changed = self._topic_changed
        self._sender = Sender(loop, clock=self._clock, allow_private=self.settings.webhooks.allow_private)
        self.letters = Letters(self, self._sender, clock=self._clock, loop=loop)
        self.letters.listeners.append(self.recorder.dead_letter)
        log = self._open_state("state/replays")
        self.replays = Replays(self, log, clock=self._clock, rng=self._rng)
        self.replays.replay(log.replay())
        self.schedules = Schedules(self, self._open_state("state/schedules"), clock=self._clock, loop=loop)
        log = self._open_state("state/webhooks")
        self.webhooks = Webhooks(
            self,
            log,
            self._sender,
            clock=self._clock,
            loop=loop,
            draw_id=lambda: f"wh-{self._rng.getrandbits(48):012x}",
            draw_secret=lambda: secrets.token_hex(32),
        )
        self.webhooks.replay(log.replay())

    def _open_access(self) -> None:
        log = self._open_state("state/access")
        documents = log.replay()
        self.audit = Audit(self, clock=self._clock)
        self.access = AccessControl(self, log, self.audit, clock=self._clock, rng=self._rng)
        self.access.replay(documents)
        self.quotas = Quotas(self, log, clock=self._clock)
        self.quotas.replay(documents)
        self.topics.admit = self.quotas.admit_topic

    def _open_mqtt(self, loop: asyncio.AbstractEventLoop) -> None:
        retained = self._open_state("state/retained")
        journal = self._opener.open("state/mqtt", 0, segment_bytes=SEGMENT_BYTES, counted=False)
        self.mqtt = Mqtt(self, retained, journal, clock=self._clock, rng=self._rng, loop=loop)
        self.mqtt.replay()

    def _open_stages(self) -> None:
        """What other systems leave with the broker: batches of queries, and how their pipelines are."""
        draw, stages = (lambda: self._rng.getrandbits(64)), self._open_state("state/stages")
        self.stages = Stages(self, stages, self._opener, clock=self._clock, draw=draw)
        self.stages.replay()
        self.pipelines = Pipelines(self._open_state("state/pipelines"), self.settings.pipelines, clock=self._clock)
        self.pipelines.replay()

    def _open_watches(self, loop: asyncio.AbstractEventLoop) -> None:
        """Who looks after the broker itself: its limits, its figures, its files and its health."""
        self.flow = Flow(self.topics.registry, self.queues, clock=self._clock, loop=loop, metrics=self.metrics)
        self.modes = ModeKeeper(
            self.settings,
            free_bytes=self._storage.free_bytes,
            memory_bytes=resident_bytes,
            state_failure=self._state_failure,
            sessions=lambda: list(self._sessions),
            metrics=self.metrics,
        )
        self.stats = Stats(self, self._opener, clock=self._clock)
        self._cleanup = Cleanup(self, self._opener, self._state_logs, self._stopping)
        self.health = Health(
            self,
            self._opener,
            clock=self._clock,
            connections=lambda: len(self._sessions),
            state_failure=lambda: self._state_failure() or self._mqtt_failure(),
            state_logs=self._state_logs,
        )
        self._holds = Holds(
            self, self._storage, clock=self._clock, loop=loop, draw_id=lambda: f"{self._rng.getrandbits(64):016x}"
        )

    def _begin(self, loop: asyncio.AbstractEventLoop, *, clean: bool) -> None:
        """What goes on by itself from now on."""
        self._cut_moves = CutMoves(self.topics, hidden=not clean)
        sync_s = self.settings.storage.fsync_interval_ms / 1000
        cleanup_s = self.settings.storage.cleanup_interval_ms / 1000
        again_and_again: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (_EXPIRE_INTERVAL_S, self.groups.expire),
            (sync_s, self._sync_interval),
            (cleanup_s, self._cleanup.run),
            (_SWEEP_INTERVAL_S, self.queues.sweep),
            (_ACCESS_INTERVAL_S, self.access.expire),
            (MEASURE_S, self.quotas.measure),
            (WATCH_S, self.modes.watch),
            (SAMPLE_S, self.flow.sample),
            (STATS_S, self.stats.sample),
            (cleanup_s, self.recorder.tidy),
            (_CLOCK_INTERVAL_S, self.schedules.watch),
            (_NOTE_INTERVAL_S, self.replays.note),
            (cleanup_s, self.schedules.tidy),
            (_MQTT_INTERVAL_S, self.mqtt.sweep),
            (cleanup_s, self.stages.sweep),
            (cleanup_s, self.pipelines.sweep),
        ]
        stopping = loop.create_task(self._stopping.wait())
        self._tasks = [loop.create_task(every(seconds, work, stopping)) for seconds, work in again_and_again]
        self._tasks.append(stopping)
        self.schedules.start()
        self.stats.start()
        self.replays.resume()
        self.webhooks.start()
        self.mqtt.start()
        self.stages.resume()
        if self.settings.traces.enabled:
            self._tasks.append(loop.create_task(self.recorder.resume()))
        if not clean:
            self._tasks.append(loop.create_task(self._cut_moves.finish_before(self._stopping)))

    async def stop(self) -> None:
        """Put everything on disk and leave a note that the next start can trust it."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(self.webhooks.stop(), self.replays.stop(), self.letters.stop(), self.stages.stop())
        self._sender.close()
        await self.schedules.stop()
        await self.stats.stop()
        await self._holds.close()
        self.flush()
        goodbye = ShuttingDown("the broker is shutting down")
        await self.mqtt.stop()
        await self.queues.close(goodbye)
        await self.recorder.stop()
        if self.spans is not None:
            await self.spans.close()
        self.topics.flush_journals()
        partitions = list(self.topics.open_logs())
        partitions += [
            *(log.partition for log in self._state_logs),
            *self.health.close(),
            *self.mqtt.logs,
            *self.stages.logs,
        ]
        for partition in partitions:
            partition.cancel_all(goodbye)
            if partition.is_durable and partition.failed is None:
                self._committer.request(partition)
        await self._committer.close()
        self.stats.close()
        self.recorder.store.close()
        settled = not (self._cut_moves.hidden or self.topics.moves_undone or self.topics.unchecked)
        close_all(self._storage, partitions, settled=settled)

    async def _topic_changed(self, topic: Topic) -> None:
        """Made or altered, by a client or by the broker itself."""
        await self.queues.registry.topic_changed(topic)
        await self.groups.refresh(topic.namespace)

    async def _topic_deleted(self, namespace: str, name: str) -> None:
        await self.groups.forget_topic(namespace, name)
        await self.queues.registry.forget_topic(namespace, name)
        self.letters.forget_topic(namespace, name)

    def _open_state(self, directory: str) -> StateLog:
        partition = self._opener.open(directory, 0, segment_bytes=_STATE_SEGMENT_BYTES, counted=False)
        log = StateLog(partition)
        self._state_logs.append(log)
        return log

    async def _sync_interval(self) -> None:
        self._committer.request_waiting()

    def _state_failure(self) -> str | None:
        """Why the broker cannot remember what it decides, if so."""
        return next((log.partition.failed for log in self._state_logs if log.partition.failed is not None), None)

    def _mqtt_failure(self) -> str | None:
        """Why sessions of MQTT cannot be remembered: worth a restart, and no reason to refuse everybody's messages."""
        return next((log.failed for log in self.mqtt.logs if log.failed is not None), None)

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
        door: str = "native",
        access: Access | None = None,
        end: Callable[[MillstreamError], None] | None = None,
    ) -> Session:
        """Who connects; what it may do is for `access.authenticate` to say, nothing where keys are asked for."""
        access = access or self.access.anonymous
        check_namespace(namespace)
        access.require("any", namespace)
        self.quotas.admit_connection(namespace)
        now_ms = self._clock.now_us() // 1000
        client_id = client_id[:_CLIENT_ID_LETTERS_MAX]
        name = f"{self._rng.getrandbits(48):012x}"
        session = Session(namespace, client_id, address, push, deliver, door, now_ms, access, end, id=name)
        self._sessions[session] = None
        session.opened()
        return session

    def own_session(self, namespace: str, client_id: str) -> Session:
        """For a consumer that is the broker's own: no connection, and it may do everything."""
        return Session(namespace, client_id, "", lambda _: None, lambda _: False, access=EVERYTHING)

    def end_access(self, access: Access, why: MillstreamError) -> None:
        """Whoever has these rights has them no longer: end its connections, and answer what waits."""
        for session in [session for session in self._sessions if session.access is access]:
            if session.end is not None:
                session.end(why)
        self.queues.refuse(access, why)

    def connections_in(self, namespace: str) -> int:
        return sum(session.namespace == namespace for session in self._sessions)

    def session_closed(self, session: Session) -> None:
        session.close()
        self._sessions.pop(session, None)
        self._holds.session_closed(session)
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
        if (refusal := self.modes.publish_refusal) is not None:
            raise refusal
        name, number, _, fsync, batch = request
        if name.startswith(STAGE_PREFIX):
            self.stages.put(session, request, reply)
            return
        if session.access is not EVERYTHING or name == AUDIT_TOPIC:
            session.access.require("produce", session.namespace, name)
        if len(batch) < HEADER_BYTES:  # before anybody looks into its header: quotas and limits do
            raise BatchDamaged("the batch is shorter than its header")
        registry = self.topics.registry
        topic = registry.find(session.namespace, name)
        if topic is None:
            if self.inboxes.has(session.namespace, name):
                self.quotas.pass_on(session.namespace, BatchHeader(batch).count, len(batch))
                self.inboxes.publish(session.namespace, name, number, batch, reply)
                return
            topic = registry.get(session.namespace, name)
        if self.quotas.meters:
            self.quotas.publish(session.namespace, batch)
        config = topic.config
        # What is scheduled is in no queue yet.
        if (config.max_depth or config.throttle_lag_ms or config.throttle_depth) and number < SCHEDULES:
            reply = self.flow.admit(session, topic, number, batch, reply)
        if self.modes.delay_ms and reply is not None:
            reply = self.flow.delayed(reply, self.modes.delay_ms)
        durability = FSYNC_POLICIES[fsync] or config.fsync or self._fsync
        if number >= SCHEDULES and durability != "always":
            durability = "group"  # that it has fired must not outlive it: its successor would be taken for fired
        partition = self.topics.partition_of(topic, number)
        if self.spans is not None:
            reply = self.spans.publishing(topic, partition.uid, batch, reply)
        partition.publish(
            batch,
            fsync=durability,
            max_message_bytes=config.max_message_bytes,
            reply=reply,
            dedup_window_ms=config.dedup_window_ms,
        )

    def check_publish(self, session: Session, topic: str) -> None:
        """Raises MillstreamError when this client may not publish there, or nobody may publish now."""
        if (refusal := self.modes.publish_refusal) is not None:
            raise refusal
        if session.access is not EVERYTHING or topic == AUDIT_TOPIC:
            session.access.require("produce", session.namespace, topic)

    def flush(self) -> None:
        """Let go of the buffers of everything published since the last call: one write per partition, or less."""
        to_flush = self._to_flush
        try:
            while to_flush:
                to_flush.pop().flush_in_time()
        finally:
            if to_flush:  # a log raised what it should not; the others must not keep views of a borrowed buffer
                self.flush()

    def fetch(self, session: Session, request: FetchRequest, reply: FetchReply) -> FetchHandle | None:
        """Read batches from an offset on, waiting for some if there are none; the handle cancels the wait."""
        self._check_serving()
        if session.access is not EVERYTHING:
            session.access.require("read", session.namespace, request.topic)
        partition = self.topics.partition(session.namespace, request.topic, request.partition)
        return partition.fetch(request.offset, request.max_bytes, request.wait_ms, reply)

    def _check_serving(self) -> None:
        if self._stopping.is_set():
            raise ShuttingDown("the broker is shutting down")
        if (refusal := self.modes.serve_refusal) is not None:
            raise refusal

    # --- queues --------------------------------------------------------------------------------------------------

    def lease(self, session: Session, request: LeaseRequest, reply: LeaseReply) -> LeaseHandle | None:
        """Hand out messages of a queue, waiting for some if there are none; the handle cancels the wait."""
        self._check_serving()
        if session.access is not EVERYTHING:  # on which topic was asked when the queue was opened
            session.access.require("consume", session.namespace)
        return self.queues.lease(session, request, reply)

    def settle(self, session: Session, entries: Sequence[SettleEntry], reply: SettleReply) -> None:
        """Say what became of leased messages; answered with a result per entry."""
        if session.access is not EVERYTHING:
            session.access.require("consume", session.namespace)
        self.queues.settle(session, entries, reply)

    # --- everything else -----------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """The time by the broker's clock."""
        return self._clock.now_us()

    async def call(self, session: Session, call: object) -> object:
        """Answer one of the control calls (see wire/calls.py) with something that can be written as JSON."""
        try:
            if session.access is EVERYTHING:
                return await self._answer(session, call)
            return await self.access.perform(session, call, self._answer)
        finally:
            if session.closed:  # meanwhile: what the call has opened must not stay open for nobody
                self.session_closed(session)

    async def _answer(self, session: Session, call: object) -> object:
        check_is_there(self, session.namespace, call)
        return await self._handlers[type(call)](session, call)

    def _call_handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            **TopicCalls(self).handlers(),
            **GroupCalls(self.groups, session_ms_max=self.settings.groups.session_ms_max).handlers(),
            queue_calls.Explain: Why(self).explain,
            **QueueViews(self.queues).handlers(),
            **TextLeases(self.queues, self._check_serving).handlers(),
            **Claims(self.queues, self._check_serving).handlers(),
            **self.subscriptions.handlers(),
            **self.inboxes.handlers(),
            **self.flow.handlers(),
            **self.modes.handlers(),
            **self.schedules.handlers(),
            **self.letters.handlers(),
            **self.replays.handlers(),
            **self.stats.handlers(),
            **self.webhooks.handlers(),
            **self.messages.handlers(),
            **Traces(self, self.recorder, clock=self._clock).handlers(),
            **Summaries(self).handlers(),
            **MqttViews(self.mqtt).handlers(),
            **self.stages.handlers(),
            **self.pipelines.handlers(),
            **self.access.handlers(),
            **self.quotas.handlers(),
            **self.audit.handlers(),
            **self.health.handlers(),
            **self._holds.handlers(),
            **Administration(
                self, self._cleanup, self._state_logs, clock=self._clock, sessions=lambda: list(self._sessions)
            ).handlers(),
        }
