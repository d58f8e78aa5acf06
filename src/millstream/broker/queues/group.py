"""One queue group on one topic: who consumes it, who waits, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from millstream.broker.queues.part import QueuePart
from millstream.errors import MillstreamError
from millstream.policies import QueuePolicy
from millstream.queues.dealing import rounds, share
from millstream.queues.poison import fails_too_often
from millstream.wire.leases import LeasePart, bytes_in, messages_in

if TYPE_CHECKING:
    from millstream.broker.queues.consumers import Consumer, LeaseHandle
    from millstream.broker.queues.queues import Queues
    from millstream.broker.registry import Topic

__all__ = ["QueueGroup"]

#: Parts that are opened before others get their turn; each takes about a millisecond.
_OPENED_AT_A_TIME: Final = 8


class QueueGroup:
    """A group's state is in its parts, one for each partition, opened when first needed."""

    def __init__(self, host: Queues, topic: Topic, name: str, policy: QueuePolicy, *, opened: bool) -> None:
        self.topic = topic
        #: Whether anybody asked for it; otherwise the broker uses it for itself.
        self.opened = opened
        self.name = name
        self.policy = policy
        #: Which of the groups that have had this name it is; 0 where that was not written down.
        self.made_us = 0
        #: While it is being made: what retention has removed before is not its loss.
        self.is_new = False
        #: Why nobody can have anything of it any more; said to who was waiting to open it.
        self.gone: MillstreamError | None = None
        self.consumers: dict[int, Consumer] = {}
        #: LEASE requests that wait: first come, first served, and who was served goes to the end.
        self.waiting: dict[LeaseHandle, None] = {}
        #: Parts that may have something, and the consumers that were told since that there is nothing for them.  The
        #: part that gave last is the last one to be asked again.
        self._ready: dict[QueuePart, set[int]] = {}
        #: Its consumers that have other groups too; each of them knows which of its groups may have something.
        self._roaming: dict[Consumer, None] = {}
        #: Messages since the broker started.
        self.delivered = 0
        self.redelivered = 0
        self.nacked = 0
        self.rejected = 0
        self.timed_out = 0
        self._host = host
        self._parts: list[QueuePart | None] = []

    @property
    def key(self) -> str:
        """The key of its fact in the state log."""
        return f"queue/{self.topic.namespace}/{self.topic.name}/{self.name}"

    @property
    def is_ordered(self) -> bool:
        """Whether settling one message can make another one ready."""
        return self.policy.ordering != "none"

    def part(self, number: int) -> QueuePart:
        """The group on one partition, opened now if need be."""
        parts = self._parts
        if number >= len(parts):
            parts += [None] * (number + 1 - len(parts))
        part = parts[number]
        if part is None:
            if self.gone is not None:
                raise self.gone
            part = parts[number] = self._host.open_part(self, number)
            self._may_have_some(part)
            part.changed(self._host.now_us())
        return part

    async def open(self) -> None:
        """Open all parts before somebody needs them at once: there may be thousands, and others want to be served.

        Raises TopicNotFound or GroupNotFound when it goes away meanwhile.
        """
        opened = 0
        for number in range(len(self.topic.partitions)):
            if number >= len(self._parts) or self._parts[number] is None:
                self.part(number)
                opened += 1
                if not opened % _OPENED_AT_A_TIME:
                    await asyncio.sleep(0)
        self.is_new = False

    def parts(self) -> Iterator[QueuePart]:
        """All of them, also of partitions that nobody has asked for yet."""
        for number in range(len(self.topic.partitions)):
            yield self.part(number)

    def open_parts(self) -> list[QueuePart]:
        return [part for part in self._parts if part is not None]

    def take_over(self, gone: QueueGroup) -> None:
        """Have the parts of a group that is gone, with all they know of messages; it has none any more."""
        self._parts, gone._parts = gone._parts, []
        for part in self.open_parts():
            part.move(self)

    def depth(self, *, of_open: bool = False) -> int:
        """Messages that are not settled; `of_open`: in the parts that are open."""
        return sum(part.depth() for part in (self.open_parts() if of_open else self.parts()))

    def tally(self) -> dict[str, int]:
        """What it has done since the broker started, as the totals of its topic name it."""
        counted = [(part, part.counts()) for part in self.open_parts()]
        return {
            "consumed": self.delivered,
            "acked": sum(part.settled_since(counts, "acked") for part, counts in counted),
            "failed": self.nacked + self.rejected + self.timed_out,
            "dead": sum(part.settled_since(counts, "dead") for part, counts in counted),
        }

    def evict(self, number: int, count: int) -> int:
        """Give up messages that are ready, the oldest first, on whichever partition they are; returns how many.

        Of partitions that cannot be read right now nobody knows how old they are; then `number` has to do.
        """
        evicted = 0
        parts = list(self.parts())
        while evicted < count:
            ages = [(since_us, part.number) for part in parts if (since_us := part.ready_since_us()) is not None]
            some = self.part(min(ages)[1] if ages else number).evict(count - evicted)
            if not some:
                break
            evicted += some
        return evicted

    def configure(self, policy: QueuePolicy) -> None:
        self.policy = policy
        for part in self.open_parts():
            part.configure()

    # --- who consumes it -----------------------------------------------------------------------------------------

    def admit(self, consumer: Consumer) -> None:
        """Let a consumer take from the group, also with the requests that it has waiting."""
        if consumer.number not in self.consumers:
            self.consumers[consumer.number] = consumer
            consumer.groups.append(self)
            for handle in consumer.waiting:
                self.waiting[handle] = None
            if len(consumer.groups) > 1:
                for group in (consumer.groups[0], self):
                    group._have_roaming(consumer)
        # Where there was nothing for anybody there is something for who comes now only if it is kept from the others.
        for part in self.parts():
            if part not in self._ready and part.ledger.ready_again:
                self._may_have_some(part)
        self.serve()

    def _have_roaming(self, consumer: Consumer) -> None:
        self._roaming[consumer] = None
        if self._ready:
            consumer.ready[self] = None

    def dismiss(self, consumer: Consumer) -> None:
        """A consumer takes nothing from the group any more; what it holds is another matter."""
        self.consumers.pop(consumer.number, None)
        self._roaming.pop(consumer, None)
        consumer.ready.pop(self, None)
        for handle in consumer.waiting:
            self.waiting.pop(handle, None)
        for refused in self._ready.values():
            refused.discard(consumer.number)

    def after_one_left(self) -> None:
        """A consumer left.  If only one is left, it may have the messages that were kept for others than it."""
        if len(self.consumers) == 1:
            for part in self.open_parts():
                if part.ledger.ready_again and not part.closed:
                    self._may_have_some(part)
            self.serve()

    # --- whose turn it is ----------------------------------------------------------------------------------------

    def take(self, consumer: Consumer, want: int, room: int, *, first: bool, now_us: int) -> list[LeasePart]:
        """Messages for a consumer from the parts that have some, each in its turn; see QueuePart.lease."""
        found: list[LeasePart] = []
        ready = self._ready
        if not ready or self.policy.paused:
            return found
        alone = len(self.consumers) <= 1
        for part in list(ready):
            refused = ready[part]
            if consumer.number in refused:
                continue
            got, is_full = part.lease(consumer, want, room, alone=alone, first=first and not found, now_us=now_us)
            if not got and not is_full:
                refused.add(consumer.number)
                # Where nothing is kept for others there is nothing for anybody, and thousands may be waiting.
                if not part.ledger.ready_again or len(refused) >= len(self.consumers):
                    del ready[part]
                continue
            del ready[part]
            ready[part] = refused
            found += got
            messages = messages_in(got)
            self.delivered += messages
            want -= messages
            room -= bytes_in(got)
            if want <= 0 or room <= 0 or is_full:
                break
        return found

    def woken(self, part: QueuePart) -> None:
        """A part may have something now, also for those who were refused before."""
        self._may_have_some(part)
        self.serve()

    def _may_have_some(self, part: QueuePart) -> None:
        if not self._ready:
            for consumer in self._roaming:
                consumer.ready[self] = None
        self._ready[part] = set()

    @property
    def is_ready(self) -> bool:
        """Whether any part may have something."""
        return bool(self._ready)

    def serve(self) -> None:
        """Deal to those who wait, in their order, as long as there is something."""
        if not self.waiting or not self._ready or self.policy.paused:
            return
        now_us = self._host.now_us()
        if len(self.consumers) == 1:
            self._give(list(self.waiting), now_us)
            return
        lines = [list(self.waiting)]
        if self.policy.poison:
            # Consumers that fail with most of what they get are served after all others.
            lines = [[handle for handle in self.waiting if _fails(handle) == last] for last in (False, True)]
        for line in lines:
            for asked in rounds(line, _whose):
                if not self._ready:
                    return
                if len(asked) > 1:
                    self._deal(asked, now_us)
                else:
                    self._give(asked, now_us)

    def _give(self, line: Sequence[LeaseHandle], now_us: int) -> None:
        """Serve the requests of one consumer: there is nobody to share with."""
        for handle in line:
            if not self._ready:
                return
            self._answer(handle, handle.want, now_us)

    def _deal(self, asked: Sequence[LeaseHandle], now_us: int) -> None:
        """Serve one request of each consumer; where there is not enough for all, each has its share."""
        ready = self._available(sum(handle.want for handle in asked))
        for left, handle in zip(range(len(asked), 0, -1), asked, strict=True):
            if not self._ready:
                return
            given = self._answer(handle, min(handle.want, share(ready, left)), now_us)
            if given:
                ready -= given
                self._to_the_end(handle.consumer)

    def _answer(self, handle: LeaseHandle, want: int, now_us: int) -> int:
        """Give what there is for a request that waits; how much that was."""
        if handle not in self.waiting:
            return 0  # answered meanwhile
        found = self._host.take(handle.consumer, want, handle.max_bytes, now_us)
        if not found:
            return 0
        handle.answer(found)
        return messages_in(found)

    def _available(self, enough: int) -> int:
        """About how many messages could be handed out now; if they are enough, how many more does not matter."""
        found = 0
        for part in self._ready:
            found += part.available()
            if found >= enough:
                break
        return found

    def _to_the_end(self, consumer: Consumer) -> None:
        """Move a consumer that was served, with all of its waiting requests, to the end of the line."""
        for handle in consumer.waiting:
            if handle in self.waiting:
                del self.waiting[handle]
                self.waiting[handle] = None


def _whose(handle: LeaseHandle) -> Consumer:
    return handle.consumer


def _fails(handle: LeaseHandle) -> bool:
    return fails_too_often(handle.consumer.failed, handle.consumer.delivered)
