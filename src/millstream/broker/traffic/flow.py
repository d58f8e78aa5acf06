"""Back-pressure at run time: depth limits, and publishers that are slowed down while consumers are behind.

Nothing here touches a topic that has no limit; a backlog on disk harms nobody by itself.  A topic with limits is
measured four times a second for as long as somebody publishes to it.  What the controller decides (traffic/flow.py)
takes effect where it is felt: confirmations are delayed, which slows down every producer with a window, and clients
that publish to the topic are told, so that the SDK waits before it sends instead of after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import structlog

from millstream.broker.answers import PublishReply
from millstream.broker.metrics import Metrics
from millstream.broker.registry import Registry, Topic
from millstream.broker.traffic.duplicates import refuse_id
from millstream.clock import Clock
from millstream.errors import GroupNotFound, MillstreamError, QueueFull, Throttled, TopicNotFound
from millstream.records import BatchHeader
from millstream.traffic.flow import FlowController, Level
from millstream.wire.subscription_calls import DescribeFlow, FlowInfo, FlowNotice

__all__ = ["Backlog", "Flow", "Publisher"]

_log = structlog.get_logger("millstream.flow")

SAMPLE_S: Final = 0.25
#: To count what waits in all partitions of a topic takes long where there are many, so for this time what was published
#: since is added to the last count.  Messages that others than publishers bring (schedules, replays) are missed for as
#: long.
_COUNTED_MS: Final = 250
#: Somebody who has not published to a topic for so long is only told when all is well again.
_SILENT_MS: Final = 60_000
#: Publishers are told of another delay when it differs by this much.
_NOTICEABLE: Final = 0.25
#: The level and the delay of a topic whose consumers keep up.  The level may be normal while the delay still falls.
_ALL_IS_WELL: Final = (Level.NORMAL, 0)
#: Bits of the priorities critical, high and normal.
_PREFERRED_LANES: Final = 0b00111


class Publisher(Protocol):
    """A session, as far as this room is concerned."""

    namespace: str

    def push(self, message: object, /) -> None: ...


class Backlog(Protocol):
    """What queues know about a topic (broker/queues/queues.py)."""

    async def open(self, topic: Topic) -> None:
        """Open what the questions below look at, in small steps; they would open it all at once."""

    def opens_soon(self, topic: Topic) -> bool:
        """Whether that takes so long that it goes on in the background, from now on at the latest."""

    def depth(self, topic: Topic, *, of_open: bool = False) -> int:
        """Messages that wait to be settled, in the group that has most of them; `of_open`: in what is open."""

    def waiting_since_us(self, topic: Topic) -> int | None:
        """When the oldest message was stored that a group has not handed out yet; None when there is none."""

    def evict(self, topic: Topic, number: int, count: int) -> int:
        """Give up the oldest messages of a partition that are ready, in every group; how many."""


class _Throttle:
    """One topic with limits that somebody publishes to."""

    __slots__ = ("controller", "heard_ms", "publishers", "told", "topic", "trouble")

    def __init__(self, topic: Topic, controller: FlowController) -> None:
        self.topic = topic
        self.controller = controller
        self.heard_ms = 0
        #: Who publishes, and when last.
        self.publishers: dict[Publisher, int] = {}
        #: What they were told last.
        self.told = _ALL_IS_WELL
        #: Why it cannot be measured.
        self.trouble = ""


class _Depth:
    """How many messages of a topic wait, at most: those that were counted, and those that were published since.

    Or less than at most, where not everything is open yet.
    """

    __slots__ = ("counted_ms", "is_partial", "messages", "topic")

    def __init__(self, topic: Topic, messages: int, counted_ms: int, *, is_partial: bool) -> None:
        self.is_partial = is_partial
        self.topic = topic
        self.messages = messages
        self.counted_ms = counted_ms


class Flow:
    """The limits of all topics."""

    def __init__(
        self,
        registry: Registry,
        backlog: Backlog,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._backlog = backlog
        self._clock = clock
        self._loop = loop
        self._metrics = metrics
        #: By the key of the topic.
        self._throttles: dict[str, _Throttle] = {}
        self._depths: dict[str, _Depth] = {}

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {DescribeFlow: self._describe}

    # --- publishing ----------------------------------------------------------------------------------------------

    def admit(
        self, session: Publisher, topic: Topic, number: int, batch: memoryview, reply: PublishReply | None
    ) -> PublishReply | None:
        """Whom to answer when a batch for a topic with limits is stored.  Raises QueueFull or Throttled."""
        config = topic.config
        if not config.dedup_window_ms:
            refuse_id(batch)  # or another message would have to go for one that is refused
        if config.max_depth:
            self.check_depth(topic, number, BatchHeader(batch).count)
        if not config.throttle_lag_ms and not config.throttle_depth:
            return reply
        throttle = self._throttles.get(topic.key)
        if throttle is None:
            throttle = self._throttles[topic.key] = _Throttle(topic, self._controller(topic))
        now_ms = throttle.heard_ms = self._now_ms()
        heard_ms = throttle.publishers.get(session)
        throttle.publishers[session] = now_ms
        if throttle.told != _ALL_IS_WELL and (heard_ms is None or now_ms - heard_ms > _SILENT_MS):
            session.push(self._notice(throttle))
        controller = throttle.controller
        if controller.level == Level.OVERLOADED and not BatchHeader(batch).priorities & _PREFERRED_LANES:
            self._metrics.publishes_throttled += 1
            raise Throttled(f"topic {topic.name!r} is overloaded and takes no messages of low priority now")
        delay_ms = controller.delay_ms
        if not delay_ms or reply is None:
            return reply
        self._metrics.publishes_throttled += 1
        return self.delayed(reply, delay_ms)

    def delayed(self, reply: PublishReply, delay_ms: int) -> PublishReply:
        """Answers later what went well; what did not is told at once."""

        def answer(
            error: MillstreamError | None, label: int, base_offset: int, append_time_us: int, duplicate: bool
        ) -> None:
            if error is not None:
                reply(error, label, base_offset, append_time_us, duplicate)
            else:
                self._loop.call_later(delay_ms / 1000, reply, None, label, base_offset, append_time_us, duplicate)

        return answer

    def check_depth(self, topic: Topic, number: int, count: int) -> None:
        """Make room for so many messages on a topic that has a max_depth.  Raises QueueFull."""
        limit, now_ms = topic.config.max_depth, self._now_ms()
        known = self._depths.get(topic.key)
        fresh = known is not None and known.topic is topic and now_ms - known.counted_ms < _COUNTED_MS
        if known is not None and known.is_partial and not self._backlog.opens_soon(topic):
            fresh = False
        if known is not None and fresh and known.messages + count <= limit:
            known.messages += count
            return
        # What is on its way to the disk will be in the queue, too: a publisher with a window must not slip past.
        is_partial = self._backlog.opens_soon(topic)
        depth = self._backlog.depth(topic, of_open=is_partial)
        depth += sum(part.invisible for part in topic.partitions if part is not None)
        known = self._depths[topic.key] = _Depth(topic, depth, now_ms, is_partial=is_partial)
        # A batch is taken whole or not at all; one that is larger than the limit, when nothing waits, or never.
        if not depth or depth + count <= limit:
            known.messages += count
            return
        if is_partial and topic.config.overflow == "evict":
            return  # when everything is open, the next one has as many more evicted
        if topic.config.overflow == "evict":
            self._metrics.messages_evicted += self._backlog.evict(topic, number, depth + count - limit)
            return
        self._metrics.publishes_refused += 1
        raise QueueFull(f"topic {topic.name!r} has {depth} messages that wait to be settled; its max_depth is {limit}")

    def session_closed(self, session: Publisher) -> None:
        for throttle in self._throttles.values():
            throttle.publishers.pop(session, None)

    # --- measuring -----------------------------------------------------------------------------------------------

    async def sample(self) -> None:
        """Measure every topic that has limits and traffic; called every SAMPLE_S."""
        now_ms = self._now_ms()
        for key, known in list(self._depths.items()):
            if now_ms - known.counted_ms >= _COUNTED_MS:
                del self._depths[key]
        for throttle in list(self._throttles.values()):
            topic, controller = throttle.topic, throttle.controller
            config = topic.config
            unwatched = not config.throttle_lag_ms and not config.throttle_depth
            idle = now_ms - throttle.heard_ms > _SILENT_MS and controller.at_rest
            if topic.deleting or self._registry.find(topic.namespace, topic.name) is not topic or unwatched or idle:
                del self._throttles[topic.key]
                if throttle.told != _ALL_IS_WELL:
                    self._tell(throttle, FlowNotice(topic=topic.name, level="normal", delay_ms=0), now_ms)
                continue
            controller.lag_limit_ms, controller.depth_limit = config.throttle_lag_ms, config.throttle_depth
            before = controller.level
            try:
                lag_ms, depth = await self._measure(topic)
            except (TopicNotFound, GroupNotFound):  # it is being deleted; the next look finds it gone
                continue
            except MillstreamError as error:  # the others can be
                if throttle.trouble != str(error):
                    throttle.trouble = str(error)
                    _log.error("flow cannot be measured", topic=topic.name, code=error.code, reason=throttle.trouble)
                continue
            throttle.trouble = ""
            controller.sample(now_ms, lag_ms=lag_ms, depth=depth)
            if controller.level != before:
                _log.warning(
                    "flow changed",
                    namespace=topic.namespace,
                    topic=topic.name,
                    now=controller.level.word,
                    lag_ms=lag_ms,
                    depth=depth,
                    delay_ms=controller.delay_ms,
                )
            if self._is_news(throttle):
                throttle.told = (controller.level, controller.delay_ms)
                self._tell(throttle, self._notice(throttle), now_ms)

    def behind(self) -> list[Topic]:
        """Topics whose publishers are told that consumers do not keep up."""
        return [throttle.topic for throttle in self._throttles.values() if throttle.told[0] != Level.NORMAL]

    def level_of(self, topic: Topic) -> tuple[str, int]:
        """How far the consumers of a topic are behind, and by how much that delays its publishers, in ms."""
        throttle = self._throttles.get(topic.key)
        return ("normal", 0) if throttle is None else (throttle.controller.level.word, throttle.controller.delay_ms)

    def _is_news(self, throttle: _Throttle) -> bool:
        level, delay_ms = throttle.told
        now = throttle.controller
        changed = abs(now.delay_ms - delay_ms) > _NOTICEABLE * max(delay_ms, 1) or (not now.delay_ms and delay_ms)
        return now.level != level or bool(changed)

    def _tell(self, throttle: _Throttle, notice: FlowNotice, now_ms: int) -> None:
        """Who is silent holds to what it was told last until it hears that it is over, and is forgotten only then."""
        over = notice.level == "normal" and not notice.delay_ms
        for session, heard_ms in list(throttle.publishers.items()):
            silent = now_ms - heard_ms > _SILENT_MS
            if over or not silent:
                session.push(notice)
            if over and silent:
                del throttle.publishers[session]

    def _notice(self, throttle: _Throttle) -> FlowNotice:
        topic, now = throttle.topic, throttle.controller
        reason = f"the oldest message has waited {now.lag_ms} ms, {now.depth} wait in all"
        return FlowNotice(topic=topic.name, level=now.level.word, delay_ms=now.delay_ms, reason=reason)

    async def _measure(self, topic: Topic) -> tuple[int, int]:
        await self._backlog.open(topic)
        since_us = self._backlog.waiting_since_us(topic)
        lag_ms = 0 if since_us is None else max(0, (self._clock.now_us() - since_us) // 1000)
        return lag_ms, self._backlog.depth(topic)

    async def _describe(self, session: Publisher, call: DescribeFlow) -> FlowInfo:
        topic = self._registry.get(session.namespace, call.topic)
        throttle = self._throttles.get(topic.key)
        controller = self._controller(topic) if throttle is None else throttle.controller
        lag_ms, depth = await self._measure(topic)
        return FlowInfo(
            topic=topic.name,
            level=controller.level.word,
            lag_ms=lag_ms,
            depth=depth,
            pressure=round(controller.pressure, 3),
            trend=controller.trend,
            delay_ms=controller.delay_ms,
            catch_up_ms=controller.catch_up_ms if throttle is not None else None,
            advice=controller.advice,
            throttle_lag_ms=topic.config.throttle_lag_ms,
            throttle_depth=topic.config.throttle_depth,
            measured=throttle is not None,
        )

    def _controller(self, topic: Topic) -> FlowController:
        config = topic.config
        return FlowController(
            lag_limit_ms=config.throttle_lag_ms, depth_limit=config.throttle_depth, now_ms=self._now_ms()
        )

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()
