"""Pub/sub: messages of matching topics, sent to whoever is connected and subscribed, as soon as they are visible.

A subscriber gets whole stored batches; the same bytes go to all of them.  Nothing is kept for anybody: a client that
does not read fast enough misses messages, is told how many, and slows down nobody else.  Work goes through one line, a
few hundred deliveries per turn of the event loop, so that a topic with ten thousand subscribers does not hold up the
rest of the broker either.

While a namespace has no subscribers its partitions do not even know that this room exists.  When it has, each of them
remembers its own subscribers until some pattern comes or goes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.errors import InvalidArgument, MillstreamError, QuotaExceeded, SubscriptionNotFound
from millstream.names import check_pattern
from millstream.traffic.patterns import PatternTrie
from millstream.wire.deliveries import Delivery
from millstream.wire.subscription_calls import CloseSubscription, OpenSubscription, Subscribed

__all__ = ["Subscriber", "Subscription", "Subscriptions"]

_log = structlog.get_logger("millstream.subscriptions")

#: Per client, over all of its subscriptions; an inbox counts as one.
PATTERNS_MAX: Final = 1_000
_CHUNK_BYTES: Final = 1024 * 1024
#: Deliveries per turn of the event loop.
_AT_A_TIME: Final = 256
#: Batches that wait for their turn may hold this much; beyond it subscribers miss messages.
_WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
#: What one of them takes beside its bytes.
_JOB_BYTES: Final = 512


class Subscriber(Protocol):
    """A session, as far as this room is concerned."""

    namespace: str
    client_id: str

    def deliver(self, delivery: Delivery, /) -> bool:
        """Send messages, or say that the client has not read enough of what it has got.

        Whoever refuses owes a call of `drained` when there is room again.
        """


@dataclass(eq=False, slots=True)
class Subscription:
    """One `sub.open` of a client."""

    id: int
    session: Subscriber
    patterns: tuple[str, ...]
    on_closed: Callable[[Subscription], None] | None
    #: Messages not delivered and not told about yet.
    missed: int = 0
    closed: bool = False


class _Feed:
    """A partition's link to its subscribers: called when more of it becomes visible."""

    __slots__ = ("_room", "_topic", "_trie", "_version", "missing", "number", "partition", "subscribers")

    def __init__(
        self, room: Subscriptions, trie: PatternTrie[Subscription], topic: str, number: int, partition: Partition
    ) -> None:
        self._room = room
        self._trie = trie
        self._topic = topic
        self._version = -1
        self.number = number
        self.partition = partition
        self.subscribers: Sequence[Subscription] = ()
        #: Where messages that nobody gets are counted, while that is in the line for the same subscribers.
        self.missing: _Job | None = None

    def __call__(self, before: int, after: int) -> None:
        if self._version != self._trie.version:
            self._version = self._trie.version
            # In the order in which they came: a set has another one in every process.
            self.subscribers = sorted(self._trie.match(self._topic), key=lambda subscription: subscription.id)
            self.missing = None
        if self.subscribers:
            self._room.advance(self._topic, self, before, after)


@dataclass(slots=True)
class _Job:
    """Messages of one partition on their way to those who were subscribed when they became visible.

    Without messages: only the number that was missed is on its way.
    """

    topic: str
    number: int
    partition: Partition
    messages: int
    buffers: Sequence[bytes]
    waiting: Iterator[Subscription]
    #: Messages that went out, over all subscribers.
    sent: int = 0
    begun: bool = False
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.buffers)) + _JOB_BYTES if self.buffers else 0


class Subscriptions:
    """All subscriptions of a broker."""

    def __init__(self, topics: Topics, *, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        self._topics = topics
        self._loop = loop
        self._metrics = metrics
        self._tries: dict[str, PatternTrie[Subscription]] = {}
        self._by_session: dict[Subscriber, dict[int, Subscription]] = {}
        self._last_id = 0
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._working = False
        #: They missed what the line did not take.  No client was slow, so nobody will say that there is room again.
        self._untold: dict[Subscription, None] = {}
        topics.on_opened = self._opened

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {OpenSubscription: self._open, CloseSubscription: self._close}

    # --- who is subscribed ---------------------------------------------------------------------------------------

    async def _open(self, session: Subscriber, call: OpenSubscription) -> Subscribed:
        patterns = tuple(dict.fromkeys(map(check_pattern, call.patterns)))
        if not patterns:
            raise InvalidArgument("a subscription needs at least one pattern")
        self.check_room(session, len(patterns))
        return Subscribed(subscription=self.open(session, patterns).id)

    def open(self, session: Subscriber, patterns: tuple[str, ...]) -> Subscription:
        """Subscribe to topics, also to those that appear later."""
        subscription = self.admit(session, patterns)
        trie = self._tries.get(session.namespace)
        if trie is None:
            trie = self._tries[session.namespace] = PatternTrie()
            self._attach(session.namespace, trie)
        for pattern in patterns:
            trie.insert(pattern, subscription)
        self._metrics.patterns += len(patterns)
        return subscription

    def check_room(self, session: Subscriber, wanted: int) -> None:
        """Raises QuotaExceeded when a client may not have so many patterns, or inboxes, more."""
        held = sum(len(held.patterns) or 1 for held in self._by_session.get(session, {}).values())
        if held + wanted > PATTERNS_MAX:
            text = f"a client may have {PATTERNS_MAX} patterns and inboxes, this would make {held + wanted}"
            raise QuotaExceeded(text)

    def count_of(self, session: Subscriber) -> int:
        return len(self._by_session.get(session, ()))

    async def _close(self, session: Subscriber, call: CloseSubscription) -> None:
        subscription = self._by_session.get(session, {}).get(call.subscription)
        if subscription is None:
            raise SubscriptionNotFound(f"this connection has no subscription {call.subscription}")
        self.dismiss(subscription)

    def admit(
        self,
        session: Subscriber,
        patterns: tuple[str, ...] = (),
        on_closed: Callable[[Subscription], None] | None = None,
    ) -> Subscription:
        """A subscription under a number of its own; without patterns nothing comes by itself."""
        self._last_id = self._last_id % 0xFFFF_FFFF + 1
        subscription = Subscription(self._last_id, session, patterns, on_closed)
        self._by_session.setdefault(session, {})[subscription.id] = subscription
        self._metrics.subscriptions += 1
        return subscription

    def dismiss(self, subscription: Subscription) -> None:
        if subscription.closed:
            return
        subscription.closed = True
        session = subscription.session
        held = self._by_session[session]
        del held[subscription.id]
        if not held:
            del self._by_session[session]
        trie = self._tries.get(session.namespace)
        if trie is not None and subscription.patterns:
            for pattern in subscription.patterns:
                trie.remove(pattern, subscription)
            if trie.is_empty:
                del self._tries[session.namespace]
                self._detach(session.namespace)
        self._metrics.patterns -= len(subscription.patterns)
        self._metrics.subscriptions -= 1
        if subscription.on_closed is not None:
            subscription.on_closed(subscription)

    def session_closed(self, session: Subscriber) -> None:
        for subscription in list(self._by_session.get(session, {}).values()):
            self.dismiss(subscription)

    # --- partitions ----------------------------------------------------------------------------------------------

    def _opened(self, topic: Topic, number: int, partition: Partition) -> None:
        trie = self._tries.get(topic.namespace)
        if trie is not None:
            partition.audience = _Feed(self, trie, topic.name, number, partition)

    def _attach(self, namespace: str, trie: PatternTrie[Subscription]) -> None:
        for topic, number, partition in self._open_partitions(namespace):
            partition.audience = _Feed(self, trie, topic.name, number, partition)

    def _detach(self, namespace: str) -> None:
        for _, _, partition in self._open_partitions(namespace):
            partition.audience = None

    def _open_partitions(self, namespace: str) -> Iterator[tuple[Topic, int, Partition]]:
        # An unknown namespace has no topics yet; it may be subscribed to all the same.
        for topic in self._topics.registry.namespaces.get(namespace, {}).values():
            for number, partition in enumerate(topic.partitions):
                if partition is not None:
                    yield topic, number, partition

    # --- deliveries ----------------------------------------------------------------------------------------------

    def advance(self, topic: str, feed: _Feed, before: int, after: int) -> None:
        """Messages have become visible to these subscribers."""
        partition = feed.partition
        while before < after:
            buffers: Sequence[bytes] = ()
            upto = after
            if self._waiting_bytes < _WAITING_BYTES_MAX:
                try:
                    chunk = partition.log.read(before, _CHUNK_BYTES, before=after)
                    buffers, upto = chunk.buffers, max(chunk.next_offset, before + 1)
                except (MillstreamError, OSError) as error:
                    _log.error("messages for subscribers cannot be read", topic=topic, reason=str(error))
            if not buffers and feed.missing is not None and not feed.missing.begun:
                feed.missing.messages += upto - before  # or a line that is full would grow by what it counts
            else:
                job = _Job(topic, feed.number, partition, upto - before, buffers, iter(feed.subscribers))
                self._jobs.append(job)
                self._waiting_bytes += job.size
                if not buffers:
                    feed.missing = job
            before = upto
        if not self._working:
            self._work()

    def _work(self) -> None:
        """Serve the line for a while; what is left then waits until others had their turn."""
        left = _AT_A_TIME
        while self._jobs:
            job = self._jobs[0]
            job.begun = True
            for subscription in job.waiting:
                try:
                    self._hand_over(job, subscription)
                except Exception:  # whoever it is, the others are waiting, and so is whoever has published
                    _log.exception("a subscriber cannot be served", client=subscription.session.client_id)
                left -= 1
                if not left:
                    self._working = True
                    self._loop.call_soon(self._work)
                    return
            self._waiting_bytes -= job.size
            self._jobs.popleft()
            if job.sent:
                job.partition.pushed(job.sent, job.buffers[0])
            if not self._jobs and self._untold:
                self._jobs.append(_Job(job.topic, job.number, job.partition, 0, (), iter(self._untold)))
                self._untold = {}
        self._working = False

    def _hand_over(self, job: _Job, subscription: Subscription) -> None:
        if subscription.closed:
            return
        if job.buffers:
            if self.send(subscription, job.topic, job.number, job.partition.uid, job.buffers, job.messages):
                job.sent += job.messages
        elif job.messages:
            self._miss(subscription, job.messages)
            self._untold[subscription] = None
        else:
            self._tell(subscription)

    def send(
        self, subscription: Subscription, topic: str, number: int, uid: int, buffers: Sequence[bytes], messages: int
    ) -> bool:
        """Deliver batches, unless the client is too slow; then they count as missed.  Says whether they went out."""
        delivery = Delivery(subscription.id, subscription.missed, topic, number, uid, buffers)
        if subscription.session.deliver(delivery):
            subscription.missed = 0
            self._metrics.deliveries += 1
            self._metrics.messages_delivered += messages
            return True
        self._miss(subscription, messages)
        return False

    def _miss(self, subscription: Subscription, messages: int) -> None:
        subscription.missed += messages
        self._metrics.messages_missed += messages

    def _tell(self, subscription: Subscription) -> None:
        """Say what was missed, also if nothing else follows."""
        if subscription.missed:
            notice = Delivery(subscription.id, subscription.missed, "", 0, 0, ())
            if subscription.session.deliver(notice):
                subscription.missed = 0

    def pass_on(self, sender: Subscriber, topic: str, messages: int, make_batch: Callable[[], bytes]) -> bool:
        """Deliver a batch of messages that are not stored to everybody else; says whether there was anybody."""
        trie = self._tries.get(sender.namespace)
        found = [] if trie is None else [it for it in trie.match(topic) if it.session is not sender]
        if found:
            buffers = [make_batch()]
            for subscription in sorted(found, key=lambda subscription: subscription.id):
                self.send(subscription, topic, 0, 0, buffers, messages)
        return bool(found)

    def drained(self, session: Subscriber) -> None:
        """The client has read what it had got: it may know now what it missed."""
        for subscription in self._by_session.get(session, {}).values():
            self._tell(subscription)
