"""Queues: all queue groups of the broker, their consumers, and the way of every LEASE and SETTLE.

A group is a topic and a name.  Which groups exist is written down by registry.py; what has become of each message is in
the journals beside the partitions, one ledger for each group and partition (part.py).  LEASE and SETTLE are plain
calls, like publish and fetch, and answer through a callback.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from millstream.access.rights import Access
from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.queues.consumers import Consumer, LeaseHandle, LeaseReply, SettleReply
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.keeper import PartitionKeeper
from millstream.broker.queues.part import ROUTE_SHIFT, ROUTES_MAX, QueuePart, route_of
from millstream.broker.queues.registry import QueueRegistry
from millstream.broker.queues.source import LogWindows
from millstream.broker.queues.steady_time import SteadyTime
from millstream.broker.registry import Topic
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.transfer import Target
from millstream.clock import Clock
from millstream.dead_letters import DEAD_LETTER_GROUP
from millstream.errors import (
    ConnectionLost,
    GroupNotFound,
    InternalError,
    InvalidArgument,
    MillstreamError,
    QuotaExceeded,
    SubscriptionNotFound,
    TopicNotFound,
)
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.queues.moment import Moment
from millstream.queues.records import INVALID, REFUSED, Outcome, Result
from millstream.wire.leases import LeasePart, LeaseRequest, Settle, SettleEntry, SettleResults, messages_in

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Queues"]

T = TypeVar("T")

_log = structlog.get_logger("millstream.queues")

#: More messages than this in one lease would make bitmaps and answers unwieldy.
_WANT_MAX: Final = 50_000
#: Partitions that are looked at before others get their turn.
_LOOKED_AT_A_TIME: Final = 8
#: What takes hardly any time; more of them are opened while others are served.
_OPENED_AT_ONCE: Final = 32
#: Consumers of one connection; who needs more has lost some.
_CONSUMERS_MAX: Final = 1_000
#: What a consumer calls itself is kept with every message that it fails.
_NAME_LETTERS_MAX: Final = 256
#: What changes something that a restart remembers.
_LASTING: Final = frozenset((Settle.ACK, Settle.NACK, Settle.REJECT))
#: When to try again what could not be written down.
_RETRY_S: Final = 1.0
#: Each part is swept about every so many rounds, and not too many of them in one; partitions likewise.
_SWEEP_ROUNDS: Final = 5
_SWEEP_SHARE_MAX: Final = 500
_SWEEPS_MAX: Final = 50


class Queues:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(
        self,
        topics: Topics,
        log: StateLog,
        *,
        clock: Clock,
        patience: PatientClock,
        metrics: Metrics,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        flush_s: float,
        recorder: Recorder,
    ) -> None:
        self.recorder = recorder
        self.topics = topics
        self.metrics = metrics
        self.rng = rng
        self.loop = loop
        self.registry = QueueRegistry(self, log, clock)
        #: Told where dead letters were stored: the partition, their first and their next offset.
        self.on_letters: Callable[[Target, int, int], None] = lambda *_: None
        self._time = SteadyTime(clock)
        self._patience = patience
        self._flush_s = flush_s
        self._windows = LogWindows()
        self._keepers: dict[int, PartitionKeeper] = {}  # by the uid of the partition
        self._routes: dict[int, QueuePart] = {}
        self._consumers: dict[int, Consumer] = {}
        self._by_key: dict[str, Consumer] = {}
        self._of_session: dict[Session, dict[int, Consumer]] = {}
        self._consumer_number = 0
        self._touched: dict[QueuePart, None] = {}
        #: Parts whose facts could not be recorded when it was last tried, and why.
        self.failing: dict[QueuePart, Exception] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Keys of topics that are being opened, and of those where that has failed.
        self._opening: set[str] = set()
        self._unopenable: set[str] = set()
        #: How many parts, and how many partitions, the next sweep passes over.
        self._swept = 0
        self._tidied = 0

    # --- life ----------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return self._time.now_us()

    def behind_us(self) -> int:
        """How far the clock, which says when messages were stored and expire, is behind `now_us`; < 0: ahead."""
        return self._time.behind_us

    def moment(self, now_us: int) -> Moment:
        """The same time by the clock, and what of it does not count yet because somebody has set it ahead."""
        _, held_us, since_us = self._patience.moment()
        return Moment(now_us - self._time.behind_us, held_us, since_us)

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something run in the background; it ends at the latest when the broker does."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.error("background work failed", work=repr(task.get_coro()), exc_info=problem)

    async def close(self, error: MillstreamError) -> None:
        """The broker stops: answer who waits, finish what can be finished, remember the rest."""
        for consumer in self._consumers.values():
            for handle in list(consumer.waiting):
                handle.answer(error)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        for task in self._tasks:
            task.cancel()
        for keeper in self._keepers.values():
            if keeper.journal.partition.failed is None:
                keeper.remember()
        self.flush()
        for part in self._routes.values():
            part.close()

    async def sweep(self) -> None:
        """Expire what nobody asks for.  Called about once a second, for some of the parts each time."""
        parts, self._swept = _next_share(list(self._routes.values()), self._swept)
        now_us = self.now_us()
        for part in parts:
            sweeps = 0
            while not part.closed and part.sweep(now_us) and sweeps < _SWEEPS_MAX:
                sweeps += 1
                await asyncio.sleep(0)  # a backlog that expires all at once is nobody's emergency
        keepers, self._tidied = _next_share(list(self._keepers.values()), self._tidied)
        for keeper in keepers:
            # Without a group nobody needs to know any of them; the next one has them looked for again.
            end = keeper.partition.high_watermark
            keeper.forget_below(min((part.ledger.committed for part in keeper.parts), default=end))

    def warn_of_removed(self) -> None:
        """Say what retention has taken from groups that were not done with it; called after each round of cleanup."""
        removed: dict[QueueGroup, int] = {}
        for part in list(self._routes.values()):
            count = part.take_removed() if part.group.opened else 0
            if count:
                self.touched(part)
                removed[part.group] = removed.get(part.group, 0) + count
        for group, count in removed.items():
            _log.warning(
                "retention removed messages before a queue group had settled them",
                namespace=group.topic.namespace,
                topic=group.topic.name,
                group=group.name,
                messages=count,
                advice="with cleanup=settled on the topic, retention waits for its queue groups",
            )

    # --- parts ---------------------------------------------------------------------------------------------------

    def part(self, topic: Topic, group: str, number: int) -> QueuePart:
        """A group on one partition; the group is made, in memory only, if nobody has opened it yet."""
        return self.registry.implicit(topic, group).part(number)

    def open_part(self, group: QueueGroup, number: int) -> QueuePart:
        topic = group.topic
        partition = self.topics.partition_of(topic, number)
        keeper = self._keepers.get(partition.uid)
        if keeper is None:
            journal = self.topics.journal(topic, number)
            keeper = self._keepers[partition.uid] = PartitionKeeper(self, partition, journal, self._windows)
        route = self._free_route(route_of(partition.uid, group.name))
        part = self._routes[route] = QueuePart(self, group, number, keeper, route)
        return part

    def _free_route(self, route: int) -> int:
        """This one, or the next that no part has."""
        while route in self._routes:
            route = route % ROUTES_MAX + 1
        return route

    def forget_part(self, part: QueuePart) -> None:
        self._routes.pop(part.route, None)
        self._touched.pop(part, None)
        self.failing.pop(part, None)
        part.close()

    def forget_topic(self, topic: Topic) -> None:
        for uid in topic.partition_uids:
            keeper = self._keepers.pop(uid, None)
            if keeper is not None:
                keeper.close()

    def touched(self, part: QueuePart) -> None:
        """A part has decided something that is to be recorded soon."""
        self._touched[part] = None
        if self._flush_timer is None:
            self._flush_timer = self.loop.call_later(self._flush_s, self.flush)

    def flush(self) -> None:
        """Hand what was decided to the journals, and what they have to the operating system."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        touched, self._touched = self._touched, {}
        journals = dict.fromkeys(part.keeper.journal for part in touched)
        self.failing = {}
        for part in touched:
            try:
                part.record()
            except Exception as error:  # whatever it is, the facts of others are written, and these are tried again
                place = {"topic": part.group.topic.name, "partition": part.number, "group": part.group.name}
                _log.error("what a queue has decided cannot be recorded", **place, exc_info=error)
                self.failing[part] = error
        for journal in journals:
            journal.flush()
        if self.failing:
            self._touched.update(dict.fromkeys(self.failing))
            self._flush_timer = self.loop.call_later(_RETRY_S, self.flush)

    def log_rewritten(self, partition: Partition) -> None:
        """Compaction took messages out: what was read before must not be delivered any more."""
        keeper = self._keepers.get(partition.uid)
        if keeper is not None:
            keeper.source.forget()
            for part in keeper.parts:
                part.ledger.rewritten()

    # --- what others ask -----------------------------------------------------------------------------------------

    async def open(self, topic: Topic) -> None:
        """Open what `depth` and `waiting_since_us` look at, a little at a time."""
        groups = self.registry.on_topic(topic)
        for group in groups:
            await group.open()
        for number in range(0 if groups else len(topic.partitions)):
            if not self.topics.is_untouched(topic, number):
                self.topics.partition_of(topic, number)
            if number % _LOOKED_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def opens_soon(self, topic: Topic) -> bool:
        """Whether so much of it has to be opened that it goes on in the background, and begins now if need be."""
        if topic.key in self._opening:
            return True
        groups, count = self.registry.on_topic(topic), len(topic.partitions)
        if groups:
            unopened = sum(count - len(group.open_parts()) for group in groups)
        else:
            unopened = topic.partitions.count(None)
            if unopened > _OPENED_AT_ONCE:
                unopened -= sum(self.topics.is_untouched(topic, number) for number in range(count))
        if unopened <= _OPENED_AT_ONCE:
            self._unopenable.discard(topic.key)
            return False
        if topic.key in self._unopenable:
            return False  # whoever asks how much waits finds those that are open, and is told what is wrong behind them
        self._opening.add(topic.key)
        self.own(self._open_soon(topic))
        return True

    async def _open_soon(self, topic: Topic) -> None:
        try:
            with suppress(TopicNotFound, GroupNotFound):  # what goes away meanwhile need not be open
                await self.open(topic)
        except MillstreamError as error:
            self._unopenable.add(topic.key)
            _log.warning("what waits cannot be counted", namespace=topic.namespace, topic=topic.name, reason=str(error))
        finally:
            self._opening.discard(topic.key)

    def depth(self, topic: Topic, *, of_open: bool = False) -> int:
        """Messages of a topic that wait to be settled, by the group that has most of them.

        Without a group everything waits: the first one will begin at the start.  `of_open`: only what is open counts.
        """
        groups = self.registry.on_topic(topic)
        if groups:
            return max(group.depth(of_open=of_open) for group in groups)
        waiting = 0
        for number, opened in enumerate(topic.partitions):
            if opened is not None if of_open else not self.topics.is_untouched(topic, number):
                partition = self.topics.partition_of(topic, number)
                waiting += partition.high_watermark - partition.log.start_offset
        return waiting

    async def letters_in(self, topic: Topic) -> int:
        """How many dead letters there are in a topic of them; opens what it looks at, a little at a time."""
        found = 0
        for number in range(len(topic.partitions)):
            if number % _LOOKED_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if topic.deleting:
                return 0
            if not self.topics.is_untouched(topic, number):
                found += self.part(topic, DEAD_LETTER_GROUP, number).depth()
        return found

    def waiting_since_us(self, topic: Topic) -> int | None:
        """When the oldest message was stored that a group has not handed out; None when there is none."""
        times = [part.ready_since_us() for group in self.registry.on_topic(topic) for part in group.parts()]
        return min((time_us for time_us in times if time_us is not None), default=None)

    def evict(self, topic: Topic, number: int, count: int) -> int:
        """Give up the oldest messages that are ready, as the group with the most of them has `count` too many.

        Somebody publishes to partition `number`.  Returns how many, where it was most.
        """
        deepest = self.depth(topic)
        evicted = 0
        for group in self.registry.on_topic(topic):
            # A group with less of a backlog is further from the limit, or has nothing to do with it.
            surplus = count - (deepest - group.depth())
            if surplus > 0:
                evicted = max(evicted, group.evict(number, surplus))
        return evicted

    def settled_below(self, topic: Topic, number: int) -> int | None:
        """The offset below which every group has settled everything; None when there is no group."""
        groups = self.registry.on_topic(topic)
        return min(group.part(number).settled_below for group in groups) if groups else None

    # --- consumers -----------------------------------------------------------------------------------------------

    def add_consumer(self, session: Session, *, name: str, lease_ms: int = 0, detached: bool = False) -> Consumer:
        if lease_ms and not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise InvalidArgument(f"lease_ms must be between {LEASE_MS_MIN} and {LEASE_MS_MAX}, not {lease_ms}")
        if session.closed:  # while it was waited for something; nobody would ever remove its consumer
            raise ConnectionLost("the client is gone")
        if len(self._of_session.get(session, ())) >= _CONSUMERS_MAX:
            raise QuotaExceeded(f"a connection has {_CONSUMERS_MAX} consumers at most")
        self._consumer_number += 1
        number = self._consumer_number
        shown = (name or session.client_id or "consumer")[:_NAME_LETTERS_MAX]
        consumer = Consumer(number, session, name=shown, detached=detached, lease_ms=lease_ms)
        self._consumers[number] = self._by_key[consumer.key] = consumer
        self._of_session.setdefault(session, {})[number] = consumer
        return consumer

    def join(self, consumer: Consumer, group: QueueGroup) -> None:
        """Let a consumer take from a group, also with the requests that it has waiting; not one that has gone."""
        if consumer.number not in self._consumers:
            return
        if group.gone is not None:
            raise group.gone
        group.admit(consumer)

    def leave(self, consumer: Consumer, group: QueueGroup) -> None:
        if consumer.number in group.consumers:
            consumer.groups.remove(group)
            group.dismiss(consumer)

    def withdraw(self, consumer: Consumer, group: QueueGroup) -> None:
        """Have a consumer leave a group that goes on; what it holds goes back at once, unless it is detached."""
        self.leave(consumer, group)
        self._give_back(consumer, group, self.now_us())

    def _give_back(self, consumer: Consumer, group: QueueGroup, now_us: int) -> None:
        if not consumer.detached:
            for part in group.open_parts():
                part.return_from(consumer, now_us)
        group.after_one_left()

    def remove_consumer(self, consumer: Consumer) -> None:
        """End a consumer; what it holds goes back at once, unless it is detached.  To do it twice changes nothing."""
        if self._consumers.pop(consumer.number, None) is None:
            return
        for handle in list(consumer.waiting):
            handle.answer([])
        del self._by_key[consumer.key]
        mine = self._of_session[consumer.session]
        del mine[consumer.number]
        if not mine:
            del self._of_session[consumer.session]
        groups, consumer.groups = consumer.groups, []
        for group in groups:
            group.dismiss(consumer)
        self.registry.forget_consumer(consumer)
        now_us = self.now_us()
        for group in groups:
            self._give_back(consumer, group, now_us)

    def session_closed(self, session: Session) -> None:
        for consumer in list(self._of_session.get(session, {}).values()):
            self.remove_consumer(consumer)

    def consumers_of(self, session: Session) -> list[Consumer]:
        return list(self._of_session.get(session, {}).values())

    def consumer(self, session: Session, number: int) -> Consumer:
        consumer = self._consumers.get(number)
        if consumer is None or consumer.session is not session:
            raise SubscriptionNotFound(f"this connection has no consumer {number}")
        return consumer

    # --- LEASE ---------------------------------------------------------------------------------------------------

    def lease(self, session: Session, request: LeaseRequest, reply: LeaseReply) -> LeaseHandle | None:
        """Answer with messages now, or wait until there are some; the handle cancels the wait."""
        number, want, max_bytes, wait_ms = request
        consumer = self._consumers.get(number)
        if consumer is None or consumer.session is not session:
            consumer = self.consumer(session, number)
        if want < 1:
            raise InvalidArgument("a lease asks for at least one message")
        if consumer.orphaned is not None:
            raise consumer.orphaned
        want = min(want, _WANT_MAX)
        found = self.take(consumer, want, max_bytes, self.now_us())
        if found or wait_ms <= 0:
            reply(found)
            return None
        handle = LeaseHandle(consumer, want, max_bytes, reply)
        handle.timer = self.loop.call_later(wait_ms / 1000, handle.answer, [])
        handle.park()
        return handle

    def take(self, consumer: Consumer, want: int, max_bytes: int, now_us: int) -> list[LeasePart]:
        """What there is for a consumer, from all of its groups."""
        found = consumer.take(want, max_bytes, now_us)
        if found:
            messages = messages_in(found)
            consumer.delivered += messages
            self.metrics.leases_granted += len(found)
            self.metrics.messages_leased += messages
            if consumer.auto_ack:
                self._ack_sent(consumer, found, now_us)
        return found

    def _ack_sent(self, consumer: Consumer, sent: Sequence[LeasePart], now_us: int) -> None:
        """Settle what goes to a consumer that will not; before it goes, so that nobody gets it again."""
        for given in sent:
            part = self._routes[given.nonce >> ROUTE_SHIFT]
            lease = part.ledger.lease_of(given.nonce)
            assert lease is not None, "it was granted a moment ago"
            bits = lease.bits
            part.ack_sent(given.nonce)
            self.metrics.messages_acked += bits.bit_count()
            consumer.acked += bits.bit_count()
            if self.recorder.cares(part, lease):
                self.recorder.acked(part, lease, bits, now_us)

    # --- SETTLE --------------------------------------------------------------------------------------------------

    def settle(self, session: Session, entries: Sequence[SettleEntry], reply: SettleReply) -> None:
        """Carry out settles in their order.  Answered at once, unless something must be on disk first."""
        now_us = self.now_us()
        results = SettleResults()
        awaited: list[Awaitable[None]] = []
        synced: dict[QueuePart, None] = {}
        for entry in entries:
            part = self.routed(entry.nonce)
            outcome = INVALID if part is None else self.settle_one(part, entry, session, now_us)
            results.append(outcome.result)
            if entry.kind == Settle.EXTEND and outcome.result is Result.DONE:
                results.lasting_ms.append(outcome.lasting_ms)
            if part is not None:
                if outcome.dead:
                    awaited.append(part.burials.bury(outcome.dead))
                lasts = entry.kind in _LASTING and outcome.result not in REFUSED
                if lasts and part.group.policy.ack_durability == "sync":
                    synced[part] = None
        awaited += [part.record_durably() for part in synced]
        if awaited:
            self.own(_answer_when_done(awaited, results, reply))
        else:
            reply(results)

    def refuse(self, access: Access, error: MillstreamError) -> None:
        """Answer every LEASE that waits for somebody with these rights."""
        waiting = [
            handle
            for session, consumers in self._of_session.items()
            if session.access is access
            for consumer in consumers.values()
            for handle in consumer.waiting
        ]
        for handle in waiting:
            handle.answer(error)

    def routed(self, nonce: int) -> QueuePart | None:
        """The part that a nonce belongs to."""
        return self._routes.get(nonce >> ROUTE_SHIFT)

    def settle_one(self, part: QueuePart, entry: SettleEntry, session: Session, now_us: int) -> Outcome:
        if part.group.topic.namespace != session.namespace:
            return INVALID
        part.follow_log()  # what is gone is held by nobody any more
        lease = part.ledger.lease_of(entry.nonce)
        if lease is None:
            outcome = part.settle(entry, now_us)
            self.metrics.settles_refused += outcome.result in REFUSED
            return outcome
        consumer = self._by_key.get(lease.consumer)
        if consumer is not None and consumer.session is not session and not consumer.by_receipt:
            self.metrics.settles_refused += 1
            return INVALID
        before = lease.bits
        outcome = part.settle(entry, now_us)
        if outcome.result in REFUSED:
            self.metrics.settles_refused += 1
        else:
            settled = before ^ lease.bits
            self._count(part, entry.kind, settled.bit_count(), consumer, now_us - lease.granted_us)
            if entry.kind == Settle.ACK and self.recorder.cares(part, lease) and settled:
                self.recorder.acked(part, lease, settled, now_us)
            if consumer is not None and consumer.on_settled is not None:
                consumer.on_settled()
        return outcome

    def _count(self, part: QueuePart, kind: int, messages: int, consumer: Consumer | None, took_us: int) -> None:
        metrics = self.metrics
        if kind == Settle.ACK:
            metrics.messages_acked += messages
            metrics.latency.processing.observe(took_us, messages)
            if consumer is not None:
                consumer.acked += messages
                consumer.busy_us += messages * took_us
        elif kind == Settle.RELEASE:
            metrics.messages_released += messages
        elif kind != Settle.EXTEND:
            if kind == Settle.NACK:
                metrics.messages_nacked += messages
                part.group.nacked += messages
            else:
                metrics.messages_rejected += messages
                part.group.rejected += messages
            if consumer is not None:
                consumer.failed += messages


def _next_share(things: list[T], place: int) -> tuple[list[T], int]:
    """Some of them, from a place on, and the place for the next round."""
    size = min(-(-len(things) // _SWEEP_ROUNDS), _SWEEP_SHARE_MAX)
    place %= max(len(things), 1)
    share = things[place : place + size]
    share += things[: size - len(share)]
    return share, place + size


async def _answer_when_done(awaited: Sequence[Awaitable[None]], results: SettleResults, reply: SettleReply) -> None:
    outcomes = await asyncio.gather(*awaited, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, MillstreamError):
            reply(outcome)
            return
        if isinstance(outcome, BaseException):
            reply(InternalError(f"what was settled cannot be written down: {outcome!r}"))
            raise outcome
    reply(results)
