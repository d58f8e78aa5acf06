"""MQTT, as the broker has it: one world for each namespace, and what all of them share."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.broker.journal import Journal
from millstream.broker.mqtt.client import Client, Line
from millstream.broker.mqtt.greeting import Greeting
from millstream.broker.mqtt.halfway import Halfway
from millstream.broker.mqtt.queue_topics import QueueTopics
from millstream.broker.mqtt.retained import Kept, Retained
from millstream.broker.mqtt.session import Session
from millstream.broker.mqtt.shares import give_back
from millstream.broker.mqtt.store import SessionStore
from millstream.broker.mqtt.system_topics import SystemTopics
from millstream.broker.mqtt.wills import LeftWill, Wills
from millstream.broker.mqtt.world import World
from millstream.broker.partition import Partition
from millstream.broker.state import StateLog
from millstream.broker.transfer import Transfer
from millstream.clock import Clock
from millstream.entries import encode_alike
from millstream.errors import QuotaExceeded
from millstream.mqtt.messages import Message
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.stored import entry_of
from millstream.mqtt.topics import SYSTEM_PREFIX
from millstream.records import stamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from millstream.broker.broker import Broker
    from millstream.broker.registry import Topic

__all__ = ["CATCH_ALL", "Mqtt"]

_log = structlog.get_logger("millstream.mqtt")

#: Where messages wait for sessions that are no topic's, because of their name or because nobody wants them stored.
CATCH_ALL: Final = "_mqtt"


class Mqtt:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(
        self,
        broker: Broker,
        retained: StateLog,
        journal: Partition,
        *,
        clock: Clock,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.broker = broker
        self.settings = broker.settings.mqtt
        self.storage_rules = self.settings.storage_rules
        self.clock = clock
        self.loop = loop
        self.catch_all = CATCH_ALL
        #: What a client has published and is not stored yet; beyond it the client is not read from.
        self.held_bytes_max = broker.settings.server.connection_memory_bytes // 4
        self.retained = Retained(retained, self.settings, clock=clock, metrics=broker.metrics, most_of=self._most_of)
        flush_s = broker.settings.storage.ack_flush_interval_ms / 1000
        kept = Journal(journal, clock=clock, loop=loop, flush_s=flush_s)
        moves = Transfer(
            kept,
            resolve=lambda target: broker.topics.partition(*target),
            exists=lambda target: broker.topics.registry.find(target.namespace, target.topic) is not None,
            new_producer=broker.topics.new_producer_id,
        )
        self.store = SessionStore(kept, moves)
        self.wills = Wills(self)
        self.system = SystemTopics(self)
        self.halfway = Halfway()
        self.worlds: dict[str, World] = {}
        #: Sessions whose positions are to be written down.
        self.moved: dict[Session, None] = {}
        self._rng = rng
        self._tasks: set[asyncio.Future[Any]] = set()
        self._sessions = 0
        self._stopping = False

    # --- life ----------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Every session that an earlier run has left; to all of them the connection is lost."""
        now_us = self.clock.now_us()
        for namespace, client_id in list(self.store.known()):
            world = self.world(namespace)
            session = Session(world, client_id, created_ms=now_us // 1000)
            session.lasts = True
            session.replay(self.store.claim(namespace, client_id, session.facts))
            world.sessions[client_id] = session
            self._sessions += 1
            self.broker.metrics.mqtt_subscriptions += len(session.subscriptions)
            for subscription in session.subscriptions.values():
                world.insert(session, subscription)
            self.broker.metrics.mqtt_subscriptions += len(session.queues)
            if not session.ends_us:
                session.ends_us = now_us + session.expiry_s * 1_000_000
                session.record(["left", session.ends_us])

    async def mend(self, *, clean: bool) -> None:
        """After a start, before anything is published: take back what sessions know of messages that are lost."""
        for world in self.worlds.values():
            for session in world.sessions.values():
                if facts := world.reading.take_back(session, clean=clean):
                    _log.warning("the log lost its end; positions beyond it are taken back", client=session.client_id)
                    await session.record_durably(*facts)

    def start(self) -> None:
        """Finish what a crash has interrupted, and see to the wills of those who are not there any more."""
        self.own(asyncio.ensure_future(self.store.transfer.recover()))
        for world in self.worlds.values():
            for session in list(world.sessions.values()):
                self.wills.lost(session)
                if not session.expiry_s:
                    self.end(session)

    async def stop(self) -> None:
        self._stopping = True
        self.wills.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.broker.settings.server.drain_ms / 1000)
        for session in self.moved:
            session.note_positions()
        self.store.journal.flush()

    @property
    def session_count(self) -> int:
        """Sessions of all namespaces, connected or remembered."""
        return self._sessions

    @property
    def logs(self) -> list[Partition]:
        return [self.store.journal.partition]

    def own(self, task: asyncio.Future[Any]) -> None:
        """Keep a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.error("MQTT work failed", exc_info=problem)

    async def sweep(self) -> None:
        """About once a second: sessions end or go on, positions are written down, memory is given back."""
        now_us = self.broker.patience.now_us()
        moved, self.moved = self.moved, {}
        for session in moved:
            session.note_positions()
        for world in list(self.worlds.values()):
            for session in list(world.sessions.values()):
                if session.client is None and 0 < session.ends_us <= now_us:
                    self.end(session)
                elif session.behind and session.outgoing.is_nearly_full:
                    session.go_on(for_few=True)  # its client may confirm no more of them before it gets others
                    await asyncio.sleep(0)
            if world.is_deserted:
                del self.worlds[world.namespace]
        self.system.tick()
        self.halfway.sweep()
        await self.retained.expire(now_us)

    # --- clients and sessions ------------------------------------------------------------------------------------

    def client(self, line: Line, address: str) -> Client:
        """The broker's side of a new connection."""
        return Client(self, line, address)

    def has_any(self, namespace: str) -> bool:
        """Whether there is anything of MQTT in a namespace."""
        return namespace in self.worlds or self.retained.kept_in(namespace)[0] > 0

    def world(self, namespace: str) -> World:
        world = self.worlds.get(namespace)
        if world is None:
            world = self.worlds[namespace] = World(self, namespace)
        return world

    def draw_client_id(self) -> str:
        return f"auto-{self._rng.getrandbits(80):020x}"

    def queue_topics(self, client: Client) -> QueueTopics:
        return QueueTopics(self, client)

    def begin(self, client: Client, namespace: str, greeting: Greeting) -> tuple[Session, bool]:
        """The session of a client that connects, and whether it was there before."""
        world, client_id, packet = self.world(namespace), greeting.client_id, greeting.packet
        session = world.sessions.get(client_id)
        if session is not None and session.client is not None:
            session.client.taken_over()
            session = world.sessions.get(client_id)
        if session is not None and packet.clean_start:
            self.end(session)
            self.store.journal.flush()  # as in `change_expiry`; the new one may not last
            session = None
        present = session is not None
        if session is None:
            if self._sessions >= self.settings.sessions_max:
                raise QuotaExceeded(f"the broker remembers {self.settings.sessions_max} sessions at most")
            if len(world.sessions) >= (most := self._most_of(self.settings.sessions_max)):
                raise QuotaExceeded(f"one namespace has {most} sessions at most, as there are others")
            session = Session(world, client_id, created_ms=self.clock.now_us() // 1000)
            world.sessions[client_id] = session
            self._sessions += 1
        self.wills.returned(session)
        session.attach(client, inflight_max=greeting.inflight_max, receive_maximum=greeting.receive_maximum)
        for share in world.shares_of(session):
            share.returned(session)
        session.will = None if packet.will is None else LeftWill.of(packet.will, greeting.key_id)
        self.change_expiry(session, greeting.expiry_s)
        metrics = self.broker.metrics
        metrics.mqtt_connections += 1
        metrics.mqtt_connected += 1
        metrics.mqtt_connected_max = max(metrics.mqtt_connected_max, metrics.mqtt_connected)
        return session, present

    def _most_of(self, all_in_all: int) -> int:
        """What one namespace may have of something: where there are others, a tenth is left for them."""
        return all_in_all if len(self.broker.topics.registry.namespaces) == 1 else all_in_all - all_in_all // 10

    def change_expiry(self, session: Session, expiry_s: int) -> None:
        """How long it will go on without its client; who lasts once does so until it ends."""
        session.expiry_s = expiry_s
        if session.lasts:
            session.record(session.begun_fact())
            session.record(session.will_fact())
            session.record(["left", 0])
        elif expiry_s:
            session.lasts = True
            self.store.claim(session.world.namespace, session.client_id, session.facts)
            for fact in session.facts():
                session.record(fact)
        if session.lasts:
            self.store.journal.flush()  # what a client is told must not be forgotten with the process

    def left(self, session: Session, client: Client, *, lost: bool) -> None:
        """The client of a session is gone, `lost` if it did not say goodbye."""
        self.broker.metrics.mqtt_connected -= 1
        if session.client is not client:
            return
        session.detach()
        if lost:
            self.wills.lost(session)
        if not session.expiry_s:
            self.end(session)
        elif not self._stopping:
            session.ends_us = self.clock.now_us() + session.expiry_s * 1_000_000
            session.record(["left", session.ends_us])

    def end(self, session: Session) -> None:
        """Nothing is remembered of it any more."""
        world = session.world
        if world.sessions.get(session.client_id) is not session:
            return
        if session.will is not None:
            self.wills.publish(session)
        give_back(session)
        world.forget(session)
        self._sessions -= 1
        if session.lasts:
            session.lasts = False
            self.store.forget(world.namespace, session.client_id)

    async def forget_topic(self, topic: Topic) -> None:
        """A topic is deleted: nobody reads on from where it was in it."""
        if (world := self.worlds.get(topic.namespace)) is not None:
            await world.reading.forget_topic(topic)

    async def forget_namespace(self, namespace: str) -> None:
        """A namespace is deleted: its sessions end, without their wills, and nothing of it is retained any more."""
        world = self.worlds.get(namespace)
        for session in list(world.sessions.values()) if world is not None else ():
            self.wills.returned(session)
            session.will = None  # it would bring its topic back
            if session.client is not None:
                session.client.fail(MqttViolation(Reason.ADMINISTRATIVE_ACTION, "the namespace was deleted"))
            self.end(session)
        await self.retained.forget_namespace(namespace)
        await self.store.journal.sync()

    # --- messages ------------------------------------------------------------------------------------------------

    def kept(self, namespace: str, topic_filter: str, after: str = "") -> Iterator[Kept | None]:
        """What whoever subscribes to a filter gets first; with `after`, from behind a topic on.

        With a None now and then, when others are to have their turn.
        """
        if topic_filter.startswith(SYSTEM_PREFIX):
            found = sorted(self.system.matching(topic_filter), key=lambda kept: kept.message.topic)
            return (kept for kept in found if kept.message.topic > after)
        return self.retained.matching(namespace, topic_filter, after)

    def pass_to_others(self, world: World, name: str, message: Message, payloads: Sequence[bytes]) -> bool:
        """Give messages that are not stored, one like the other, to subscribers of the other doors."""

        def batch() -> bytes:
            now_us = self.clock.now_us()
            entry = entry_of(message, key=None, now_us=now_us)
            head, tail = encode_alike(entry, payloads, base_timestamp_us=now_us)
            data = bytearray(head + tail)
            stamp(memoryview(data), 0, base_offset=0, append_time_us=now_us, leader_epoch=0)
            return bytes(data)

        return self.broker.subscriptions.pass_on(world, name, len(payloads), batch)
