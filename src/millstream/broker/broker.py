"""The broker: publish, fetch and everything else that can be asked of it.  Every door calls this and nothing below.

Publish and fetch are plain calls that answer through a callback, because they run once per batch and a task per batch
would cost more than the batch.  Everything else is a coroutine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from millstream.access.rights import EVERYTHING, Access
from millstream.broker.access.audit import Audit
from millstream.broker.access.control import AccessControl
from millstream.broker.access.quotas import Quotas
from millstream.broker.answers import FetchAnswer, FetchHandle, FetchReply, PublishReply
from millstream.broker.committer import Rounds
from millstream.broker.groups import Groups
from millstream.broker.handlers import Handler, call_handlers
from millstream.broker.health import Health
from millstream.broker.letters.letters import Letters
from millstream.broker.letters.replays import Replays
from millstream.broker.life import Life
from millstream.broker.messages.messages import Messages
from millstream.broker.metrics import Metrics
from millstream.broker.mqtt.mqtt import Mqtt
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.pipelines import Pipelines
from millstream.broker.queues.consumers import LeaseHandle, LeaseReply, SettleReply
from millstream.broker.queues.queues import Queues
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.sessions import Session
from millstream.broker.stages.stages import Stages
from millstream.broker.stats.stats import Stats
from millstream.broker.topic_calls import check_is_there
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.traces.spans import Spans
from millstream.broker.traffic.flow import Flow
from millstream.broker.traffic.inboxes import Inboxes
from millstream.broker.traffic.modes import ModeKeeper
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.broker.webhooks.webhooks import Webhooks
from millstream.clock import Clock, SystemClock
from millstream.config import Settings
from millstream.errors import BatchDamaged, MillstreamError, ShuttingDown
from millstream.ids import SCHEDULES
from millstream.log.storage import Storage
from millstream.names import AUDIT_TOPIC, STAGE_PREFIX, check_namespace
from millstream.records import HEADER_BYTES, BatchHeader
from millstream.version import VERSION
from millstream.wire.deliveries import Delivery
from millstream.wire.leases import LeaseRequest, SettleEntry
from millstream.wire.messages import FSYNC_POLICIES, FetchRequest, PublishRequest

__all__ = ["Broker", "FetchAnswer", "FetchHandle", "LeaseHandle", "Session"]

_log = structlog.get_logger("millstream.broker")

#: What a client calls itself is kept as long as it is there; more is cut off.
_CLIENT_ID_LETTERS_MAX: Final = 256


class Broker:
    """One node.  All methods are called on its event loop."""

    access: AccessControl
    audit: Audit
    flow: Flow
    groups: Groups
    health: Health
    inboxes: Inboxes
    letters: Letters
    messages: Messages
    modes: ModeKeeper
    mqtt: Mqtt
    pipelines: Pipelines
    queues: Queues
    quotas: Quotas
    recorder: Recorder
    replays: Replays
    schedules: Schedules
    stages: Stages
    stats: Stats
    subscriptions: Subscriptions
    topics: Topics
    webhooks: Webhooks

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
        self.epoch = 0  # see node.py
        self._clock = clock or SystemClock()
        #: For what takes something away for good.
        self.patience = PatientClock(self._clock, wait_ms=settings.storage.clock_wait_ms)
        self._rng = rng or random.SystemRandom()
        self._fsync = settings.storage.fsync
        self._to_flush: list[Partition] = []
        self._sessions: dict[Session, None] = {}
        self._handlers: dict[type, Handler] = {}
        self.spans: Spans | None = None
        #: Where each setting came from, and who changes the level of the log; said by whoever starts the broker.
        self.setting_sources: Mapping[str, str] = {}
        self.on_log_level: Callable[[str], None] = lambda _: None
        self._life = Life(
            self,
            storage,
            clock=self._clock,
            rng=self._rng,
            rounds=rounds,
            sessions=self.sessions,
            flush_later=self._to_flush.append,
        )

    async def start(self, *, quiet: bool = False) -> None:
        """Recover what is stored, then take requests; where it is `quiet`, nothing happens but what they ask for."""
        await self._life.open()
        self._handlers = call_handlers(self, self._life, clock=self._clock)
        if not quiet:
            self._life.begin()

    async def stop(self) -> None:
        """Put everything on disk and leave a note that the next start can trust it."""
        await self._life.stop()

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
        instead_of: Session | None = None,
    ) -> Session:
        """Admit a client.  What it may do is said by `access`, which comes from `access.authenticate`.

        `instead_of` is a connection to the same namespace that the caller will end at once: quotas do not count it.
        """
        access = access or self.access.anonymous
        check_namespace(namespace)
        access.require("any", namespace)
        self.quotas.admit_connection(namespace, leaving=int(instead_of in self._sessions))
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
        """These rights were taken away: end the connections that have them, and refuse their requests that wait."""
        for session in [session for session in self._sessions if session.access is access]:
            if session.end is not None:
                session.end(why)
        self.queues.refuse(access, why)

    def sessions(self) -> list[Session]:
        """All who are connected."""
        return list(self._sessions)

    def connections_in(self, namespace: str) -> int:
        return sum(session.namespace == namespace for session in self._sessions)

    def session_closed(self, session: Session) -> None:
        session.close()
        self._sessions.pop(session, None)
        self._life.holds.session_closed(session)
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
        """Write or copy everything published since the last call, so that the caller may reuse its buffers."""
        to_flush = self._to_flush
        try:
            while to_flush:
                to_flush.pop().flush_in_time()
        finally:
            if to_flush:  # one raised; the others must not keep views of a borrowed buffer
                self.flush()

    def fetch(self, session: Session, request: FetchRequest, reply: FetchReply) -> FetchHandle | None:
        """Read batches from an offset on, waiting for some if there are none; the handle cancels the wait."""
        self.check_serving()
        if session.access is not EVERYTHING:
            session.access.require("read", session.namespace, request.topic)
        partition = self.topics.partition(session.namespace, request.topic, request.partition)
        return partition.fetch(request.offset, request.max_bytes, request.wait_ms, reply)

    def check_serving(self) -> None:
        if self._life.stopping.is_set():
            raise ShuttingDown("the broker is shutting down")
        if (refusal := self.modes.serve_refusal) is not None:
            raise refusal

    # --- queues --------------------------------------------------------------------------------------------------

    def lease(self, session: Session, request: LeaseRequest, reply: LeaseReply) -> LeaseHandle | None:
        """Hand out messages of a queue, waiting for some if there are none; the handle cancels the wait."""
        self.check_serving()
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
