"""LEASE and SETTLE for doors that speak text: messages as JSON, each with a receipt that settles it from anywhere.

A lease without a consumer is *detached*: there is no connection whose end would give it back, only its deadline.  A
door that has something of its own to watch, a stream that its client can close, opens a consumer and leases as it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream.broker.background import comes_within
from millstream.broker.queues.consumers import Consumer
from millstream.broker.queues.contents import contents
from millstream.broker.registry import Topic
from millstream.durations import DURATION_MS_MAX
from millstream.errors import InvalidArgument
from millstream.queues.records import Result
from millstream.receipts import ReceiptHandle
from millstream.slicing import batches_of
from millstream.wire import queue_calls
from millstream.wire.leases import LeasePart, LeaseRequest, Scope, Settle, SettleEntry

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["TextLeases"]

_MESSAGES_MAX: Final = 1_000
#: An answer in JSON is a third larger than its values, and must fit into a frame.
_BYTES_MAX: Final = 4 * 1024 * 1024
_WAIT_MS_MAX: Final = 60_000
_REASON_MAX: Final = 1_024
#: A lease that runs out tells nobody; who waits for room looks again this often.
_RECOUNT_S: Final = 1.0
_RESULTS: Final = {
    Result.DONE: "done",
    Result.RETRIED: "retried",
    Result.DEAD: "dead",
    Result.INVALID: "receipt_invalid",
    Result.GONE: "gone",
}
_ACTIONS: Final = {kind.name.lower(): kind for kind in Settle}


class TextLeases:
    """The calls `queue.lease` and `queue.settle`."""

    def __init__(self, queues: Queues, check_serving: Callable[[], None]) -> None:
        """`check_serving` raises when the broker hands out nothing."""
        self._queues = queues
        self._check_serving = check_serving

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {queue_calls.LeaseMessages: self._lease, queue_calls.SettleMessages: self._settle}

    # --- leases --------------------------------------------------------------------------------------------------

    async def _lease(self, session: Session, call: queue_calls.LeaseMessages) -> list[queue_calls.LeasedMessage]:
        if not 1 <= call.max <= _MESSAGES_MAX:
            raise InvalidArgument(f"max must be between 1 and {_MESSAGES_MAX}, not {call.max}")
        if call.max_in_flight < 0:
            raise InvalidArgument(f"max_in_flight must be 0 (no limit) or more, not {call.max_in_flight}")
        self._check_serving()
        if call.consumer:
            parts = await self._ask(session, self._queues.consumer(session, call.consumer), call)
        else:
            parts = await self._ask_detached(session, call)
        now_ms = self._queues.now_us() // 1000
        return [message for part in parts for message in self._leased(session.namespace, part, now_ms)]

    async def _ask_detached(self, session: Session, call: queue_calls.LeaseMessages) -> Sequence[LeasePart]:
        queues = self._queues
        group = await queues.registry.ensure(session.namespace, call.topic, call.group, {})
        consumer = queues.add_consumer(session, name="", lease_ms=call.lease_ms, detached=True)
        consumer.auto_ack = call.auto_ack
        try:
            queues.join(consumer, group)
            return await self._ask(session, consumer, call)
        except asyncio.CancelledError:
            consumer.detached = False  # nobody is there any more for what it may have got a moment ago
            raise
        finally:
            queues.remove_consumer(consumer)

    async def _ask(self, session: Session, consumer: Consumer, call: queue_calls.LeaseMessages) -> Sequence[LeasePart]:
        loop = self._queues.loop
        until_s = loop.time() + min(call.wait_ms, _WAIT_MS_MAX) / 1000
        want = call.max
        if call.max_in_flight:
            want = min(want, await self._room(consumer, call.max_in_flight, until_s))
            if want <= 0:
                return []
        answered: asyncio.Future[Any] = loop.create_future()

        def answer(result: object) -> None:
            if not answered.done():  # nobody waits for it any more
                answered.set_result(result)

        wait_ms = max(0, round((until_s - loop.time()) * 1000))
        max_bytes = min(call.max_bytes, _BYTES_MAX) if call.max_bytes > 0 else _BYTES_MAX
        self._queues.lease(session, LeaseRequest(consumer.number, want, max_bytes, wait_ms), answer)
        parts = await answered
        if isinstance(parts, Exception):
            raise parts
        found: Sequence[LeasePart] = parts
        return found

    async def _room(self, consumer: Consumer, limit: int, until_s: float) -> int:
        """How many more messages a consumer may hold; if none, waits until that changes."""
        loop = self._queues.loop
        while (room := limit - consumer.held()) <= 0 and (left_s := until_s - loop.time()) > 0:
            settled = asyncio.Event()
            consumer.on_settled = settled.set
            try:
                await comes_within(settled, min(left_s, _RECOUNT_S))
            finally:
                consumer.on_settled = None
        return room

    def _leased(self, namespace: str, part: LeasePart, now_ms: int) -> Iterator[queue_calls.LeasedMessage]:
        topic: Topic = self._queues.topics.registry.get(namespace, part.topic)
        uid = topic.partition_uids[part.partition]
        granted = part.granted
        for batch in batches_of(part.batches):
            for offset, content in contents(batch, uid):
                if offset >= part.start and granted >> offset - part.start & 1:
                    handle = ReceiptHandle(topic.name, part.partition, offset, part.delivery, part.nonce)
                    yield queue_calls.LeasedMessage(
                        receipt=str(handle),
                        topic=topic.name,
                        partition=part.partition,
                        offset=offset,
                        delivery=part.delivery,
                        failures=part.failures,
                        deadline_ms=now_ms + part.lease_ms,
                        **content,
                    )

    # --- settles -------------------------------------------------------------------------------------------------

    async def _settle(self, session: Session, call: queue_calls.SettleMessages) -> list[queue_calls.SettleOutcome]:
        for item in call.items:
            _check(item)
        queues = self._queues
        answered: asyncio.Future[Any] = queues.loop.create_future()

        def answer(results: object) -> None:
            if not answered.done():
                answered.set_result(results)

        entries = [self._entry(session.namespace, item) for item in call.items]
        now_ms = queues.now_us() // 1000
        queues.settle(session, entries, answer)
        results = await answered
        if isinstance(results, Exception):
            raise results
        outcomes = []
        lasting_ms = iter(results.lasting_ms)
        for item, result in zip(call.items, results, strict=True):
            outcome = queue_calls.SettleOutcome(receipt=item.receipt, result=_RESULTS[result])  # type: ignore[arg-type]
            if item.action == "extend" and result == Result.DONE:
                outcome.deadline_ms = now_ms + next(lasting_ms)
            outcomes.append(outcome)
        return outcomes

    def _entry(self, namespace: str, item: queue_calls.SettleItem) -> SettleEntry:
        kind = _ACTIONS[item.action]
        try:
            handle = ReceiptHandle.parse(item.receipt)
        except InvalidArgument:
            return SettleEntry(kind, 0)  # refused like every receipt that is not known
        part = self._queues.routed(handle.nonce)
        topic = part.group.topic if part is not None else None
        if part is None or topic is None or (topic.namespace, topic.name, part.number) != (namespace, *handle[:2]):
            return SettleEntry(kind, 0)
        value = -1 if item.delay_ms is None else item.delay_ms
        return SettleEntry(kind, handle.nonce, Scope.ONE, handle.offset, value, reason=item.reason)


def _check(item: queue_calls.SettleItem) -> None:
    if item.delay_ms is not None and not 0 <= item.delay_ms <= DURATION_MS_MAX:
        raise InvalidArgument(f"delay_ms must be between 0 and {DURATION_MS_MAX}, not {item.delay_ms}")
    if item.action == "extend" and item.delay_ms == 0:
        raise InvalidArgument("an extension is more than 0; without delay_ms it is the lease's own length")
    if len(item.reason) > _REASON_MAX:
        raise InvalidArgument(f"a reason has {_REASON_MAX} characters at most, not {len(item.reason)}")
