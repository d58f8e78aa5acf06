"""The dead letters of one partition: which are still there, reading them, and letting go of them.

A letter is there as long as it is not settled in the queue group `dlq`.  One that is just being replayed or purged is
*claimed*, so that nobody else takes it meanwhile; claims are in memory, because a settle that is not on disk has not
happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from millstream.broker.journal import Fact
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.broker.transfer import Target
from millstream.dead_letters import DEAD_LETTER_GROUP, DeadLetter
from millstream.queues.facts import settled_fact
from millstream.queues.leases import leased_among
from millstream.queues.letters import Place, StoredMessage, read_letter, stored_messages
from millstream.queues.ranges import pack
from millstream.slicing import batches_of

if TYPE_CHECKING:
    from millstream.broker.queues.part import QueuePart
    from millstream.broker.queues.queues import Queues

__all__ = ["LetterBox"]

#: Read at a time, and letters looked at before others get their turn: a millisecond or two.
_READ_BYTES: Final = 64 * 1024
_AT_A_TIME: Final = 100
#: Settled letters farther apart than this are noted apart: a bitmap over nothing is larger than a number.
_GAP_MAX: Final = 512


class LetterBox:
    """See the module.  All methods are called on the event loop."""

    def __init__(self, topic: Topic, number: int, topics: Topics, queues: Queues) -> None:
        self.topic = topic
        self.number = number
        self._place = Place(topic.name, number, topic.partition_uids[number])
        self._topics = topics
        self._queues = queues
        self._claimed: set[int] = set()
        #: The batch that was read last: its messages are mostly asked for one after the other.
        self._near: dict[int, StoredMessage] = {}

    @property
    def _partition(self) -> Partition:
        return self._topics.partition_of(self.topic, self.number)

    @property
    def _part(self) -> QueuePart:
        return self._queues.part(self.topic, DEAD_LETTER_GROUP, self.number)

    # --- which are there -----------------------------------------------------------------------------------------

    def is_open(self, offset: int) -> bool:
        return offset not in self._part.ledger.settled and offset not in self._claimed

    def leased(self, offsets: Iterable[int]) -> set[int]:
        """Those of some letters that a consumer of the group has right now."""
        return leased_among(self._part.ledger.leases(), sorted(offsets))

    @contextmanager
    def claim(self, offsets: Iterable[int]) -> Iterator[None]:
        """Nobody else replays or purges these letters within the block."""
        mine = set(offsets)
        assert mine.isdisjoint(self._claimed), "look with is_open first"
        self._claimed |= mine
        try:
            yield
        finally:
            self._claimed -= mine

    # --- reading -------------------------------------------------------------------------------------------------

    async def scan(
        self, first: int, *, since_us: int = 0, end: int | None = None
    ) -> AsyncIterator[tuple[list[DeadLetter], int]]:
        """The letters that are there from an offset on, a few at a time, each time with where to go on."""
        partition = self._partition
        # A letter is appended after it died, so nothing before this time is as young as that.
        offset = max(first, partition.log.offset_at_time(since_us)) if since_us else first
        while True:
            offset = self._part.ledger.settled.next_out(max(offset, partition.log.start_offset))
            limit = partition.high_watermark if end is None else min(end, partition.high_watermark)
            if offset >= limit:
                return
            await partition.warm(offset)
            if offset < partition.log.start_offset:
                continue  # retention was faster
            messages, following = self._read(partition, offset, _READ_BYTES)
            if following <= offset:
                return
            letters: list[DeadLetter] = []
            for message in messages:
                if offset <= message.offset < limit and self.is_open(message.offset):
                    letters.append(self._letter(message))
                    if len(letters) == _AT_A_TIME:  # a batch can hold thousands
                        yield letters, message.offset + 1
                        letters = []
            offset = min(following, limit)
            yield letters, offset

    async def read(self, offset: int) -> DeadLetter | None:
        """The letter at an offset, there or not; None when the log does not have it."""
        if offset not in self._near:
            partition = self._partition
            await partition.warm(offset)
            if not partition.log.start_offset <= offset < partition.high_watermark:
                return None
            messages, _ = self._read(partition, offset, 1)
            self._near = {message.offset: message for message in messages}
        found = self._near.get(offset)
        return None if found is None else self._letter(found)

    def read_stored(self, first: int, end: int) -> list[DeadLetter]:
        """Letters that were stored just now, in one batch."""
        messages, _ = self._read(self._partition, first, 1)
        return [self._letter(message) for message in messages if first <= message.offset < end]

    def _read(self, partition: Partition, offset: int, max_bytes: int) -> tuple[Iterator[StoredMessage], int]:
        """Messages of one read of the log, at least of one batch, and where the next read begins."""
        chunk = partition.log.read(offset, max_bytes, before=partition.high_watermark)
        return _messages_of(chunk.buffers), chunk.next_offset

    def _letter(self, message: StoredMessage) -> DeadLetter:
        letter = read_letter(message, self._place)
        if self.topic.config.retention_ms:
            letter.kept_until_ms = message.append_us // 1000 + self.topic.config.retention_ms
        return letter

    # --- letting go ----------------------------------------------------------------------------------------------

    async def settle(self, offsets: Sequence[int]) -> None:
        """Remove letters, durably.  Raises StorageFailed; then they are still there."""
        if offsets:
            fact = self._fact(offsets)
            await self._part.keeper.journal.record_durably((self._part.entity, fact))
            _settled(self._part, fact)

    async def move(self, offsets: Sequence[int], target: Target, batch: bytearray) -> int:
        """Append a batch to another partition and settle the letters it was made of, both or neither.

        Returns its first offset there.  No consumer has them, and none gets one before that is certain.
        """
        part, fact = self._part, self._fact(offsets)
        transfer = self._topics.transfer(self.topic, self.number)
        with ExitStack() as until_recorded:
            until_recorded.enter_context(part.halt())

            def recorded() -> None:
                _settled(part, fact)
                until_recorded.close()

            return await transfer.move(target, batch, [(part.entity, fact)], on_recorded=recorded)

    def _fact(self, offsets: Sequence[int]) -> Fact:
        self._part.record()  # what was decided before stands in the journal before
        return settled_fact("acked", _spans(sorted(offsets)))


def _settled(part: QueuePart, fact: Fact) -> None:
    part.ledger.apply(fact)
    part.wake()  # one of them may have held up its key, or all that came after it


def _messages_of(buffers: Iterable[bytes]) -> Iterator[StoredMessage]:
    for batch in batches_of(buffers):
        yield from stored_messages(batch)


def _spans(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sorted offsets as (base, bits), none of them with long empty stretches."""
    start = 0
    for place in range(1, len(offsets) + 1):
        if place == len(offsets) or offsets[place] - offsets[place - 1] > _GAP_MAX:
            part = offsets[start:place]
            yield part[0], pack(part[0], part)
            start = place
