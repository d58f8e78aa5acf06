"""Where a stream is in each partition, and what comes back from a fetch.  No sockets.

A partition has at most one fetch under way.  Its answer moves the partition on before it is decoded, so that the next
fetch can be sent first and travels while the messages of this one are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

from millstream.client.backoff import backoff_ms
from millstream.client.messages import Message, TopicPartition, batches_in, messages_of
from millstream.errors import (
    DataDamaged,
    MillstreamError,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from millstream.wire.messages import FetchRequest, FetchResult, decode_fetch_result

__all__ = ["Fetched", "Handout", "Position", "Positions"]

#: Fetches that fail because the topic goes away are repeated rarely: the group will say what becomes of it.
_GONE_RETRY_MS: Final = 1_000
#: With more in an answer its decoding takes longer than the request for the next.
_FEW_BYTES: Final = 16 * 1024


class Position:
    """One partition of a stream."""

    __slots__ = (
        "attempts",
        "committed",
        "doubtful",
        "epoch",
        "explicit",
        "fetch_offset",
        "finished",
        "handed",
        "high_watermark",
        "holding",
        "out_of_range",
        "outstanding",
        "paused",
        "place",
        "queued",
        "retry_at_ms",
        "uid",
    )

    def __init__(
        self, place: TopicPartition, uid: int, offset: int, *, explicit: bool, committed: int | None, holding: int
    ) -> None:
        self.place = place
        self.uid = uid
        #: The number that the membership gave it, 0 without a group.
        self.holding = holding
        #: What is fetched next, handed out next, and committed next.
        self.fetch_offset = self.handed = self.finished = offset
        self.committed = committed
        #: Of the broker, when it was last known what is stored up to here; None until it is connected.
        self.epoch: int | None = None
        #: The broker is in another epoch now: a power cut may have taken what lies before here.
        self.doubtful = False
        #: The offset was given by the user, so it is an error when it does not exist.
        self.explicit = explicit
        self.high_watermark: int | None = None
        self.paused = False
        #: Messages are waiting to be handed out; no more are fetched before they are.
        self.queued = False
        self.outstanding: int | None = None
        self.out_of_range: OffsetOutOfRange | None = None
        self.attempts = 0
        self.retry_at_ms = 0


class Fetched(NamedTuple):
    """An answer whose messages are still to be made, from bytes that are valid only for now."""

    position: Position
    from_offset: int
    result: FetchResult

    @property
    def is_the_latest(self) -> bool:
        """Whether these few messages are all there were: they should not wait for a request for more."""
        return len(self.result.batches) <= _FEW_BYTES and self.result.next_offset >= self.result.high_watermark


class Handout(NamedTuple):
    """Messages of one partition, on their way to the user."""

    position: Position
    messages: list[Message]
    next_offset: int
    #: Raised before the messages are handed out.
    damage: DataDamaged | None
    #: Of the answer, in bytes.
    size: int = 0


class Positions:
    """All partitions of a stream."""

    def __init__(
        self,
        *,
        max_bytes: int,
        wait_ms: int,
        jitter: Callable[[], float],
        tolerate_missing: bool,
        skip_damage: bool,
        commit: Callable[[Message], object] | None,
        on_refused: Callable[[TopicPartition, MillstreamError], None] | None = None,
    ) -> None:
        """`tolerate_missing`: a topic that goes away is somebody else's business (the group's), not an error.

        `on_refused` is told the first time that a partition cannot be read for now.
        """
        self._max_bytes = max_bytes
        self._wait_ms = wait_ms
        self._jitter = jitter
        self._tolerate_missing = tolerate_missing
        self._skip_damage = skip_damage
        self._commit = commit
        self._on_refused = on_refused
        #: Given to every message, for `message.reply`.
        self.reply: Callable[..., object] | None = None
        #: Of the broker that we are connected to.
        self.epoch: int | None = None
        self._by_place: dict[TopicPartition, Position] = {}
        self._outstanding: dict[int, Position] = {}
        self._correlations = itertools.count(1)

    # --- which partitions ----------------------------------------------------------------------------------------

    def __iter__(self) -> itertools.chain[Position]:
        return itertools.chain(list(self._by_place.values()))

    def __len__(self) -> int:
        return len(self._by_place)

    def get(self, place: TopicPartition) -> Position | None:
        return self._by_place.get(place)

    @property
    def places(self) -> set[TopicPartition]:
        return set(self._by_place)

    def add(
        self,
        place: TopicPartition,
        uid: int,
        offset: int,
        *,
        explicit: bool = False,
        committed: int | None = None,
        holding: int = 0,
    ) -> Position:
        position = Position(place, uid, offset, explicit=explicit, committed=committed, holding=holding)
        position.epoch = self.epoch
        self._by_place[place] = position
        return position

    def remove(self, place: TopicPartition) -> Position | None:
        position = self._by_place.pop(place, None)
        if position is not None:
            self._forget_fetch(position)
        return position

    def move(self, position: Position, offset: int, *, explicit: bool) -> None:
        """Go on from another offset; what is on its way is not handed out."""
        self._forget_fetch(position)
        position.queued = False
        position.fetch_offset = position.handed = position.finished = offset
        position.explicit = explicit
        position.out_of_range = None
        position.retry_at_ms = 0
        self.trust(position)

    def rewind(self, position: Position, offset: int) -> None:
        """Fetch again what was fetched but not handed out."""
        self._forget_fetch(position)
        position.queued = False
        position.fetch_offset = position.handed = offset

    def _forget_fetch(self, position: Position) -> None:
        if position.outstanding is not None:
            self._outstanding.pop(position.outstanding, None)
            position.outstanding = None

    @property
    def fetching(self) -> bool:
        return bool(self._outstanding)

    def disconnected(self) -> None:
        """Nothing that is under way will be answered."""
        self.epoch = None
        self._outstanding.clear()
        for position in self._by_place.values():
            position.outstanding = None

    def connected(self, epoch: int | None) -> None:
        """From now on the answers come from a broker in this epoch."""
        self.epoch = epoch
        for position in self._by_place.values():
            if position.epoch is None or epoch is None:
                self.trust(position)
            else:
                position.doubtful = position.epoch != epoch

    def trust(self, position: Position) -> None:
        """What lies before the position is stored."""
        position.doubtful = False
        position.epoch = self.epoch

    @property
    def earliest_epoch(self) -> int | None:
        """The epoch that holds for all of them but the doubtful."""
        return min((it.epoch for it in self if it.epoch is not None and not it.doubtful), default=None)

    @property
    def doubtful(self) -> list[Position]:
        """Those of which nothing is fetched before it is known whether what was read is still there."""
        return [position for position in self._by_place.values() if position.doubtful]

    # --- fetching ------------------------------------------------------------------------------------------------

    def requests(self, now_ms: int) -> list[tuple[int, FetchRequest]]:
        """What to fetch now, with correlation ids."""
        return [
            self._request(position)
            for position in self._by_place.values()
            if position.outstanding is None
            and not position.paused
            and not position.queued
            and not position.doubtful
            and position.retry_at_ms <= now_ms
            and position.out_of_range is None
        ]

    def _request(self, position: Position) -> tuple[int, FetchRequest]:
        correlation = next(self._correlations) & 0x7FFF_FFFF
        position.outstanding = correlation
        self._outstanding[correlation] = position
        topic, partition = position.place
        return correlation, FetchRequest(topic, partition, position.fetch_offset, self._max_bytes, self._wait_ms)

    def next_retry_ms(self, now_ms: int) -> int | None:
        waiting = [position.retry_at_ms for position in self._by_place.values() if position.retry_at_ms > now_ms]
        return min(waiting) - now_ms if waiting else None

    def accept(self, correlation: int, payload: memoryview, now_ms: int) -> Fetched | None:
        """Move on by an answer; None when there is nothing to hand out.  Raises what the user must know."""
        position = self._outstanding.pop(correlation, None)
        if position is None:
            return None  # the partition was given up, or the stream moved elsewhere
        position.outstanding = None
        try:
            result = decode_fetch_result(payload)
        except OffsetOutOfRange as error:
            position.out_of_range = error
            return None
        except MillstreamError as error:
            if error.retriable:
                position.attempts += 1
                position.retry_at_ms = now_ms + backoff_ms(position.attempts, self._jitter())
                if position.attempts == 1 and self._on_refused is not None:
                    self._on_refused(position.place, error)
            elif self._tolerate_missing and isinstance(error, TopicNotFound | PartitionNotFound):
                position.retry_at_ms = now_ms + _GONE_RETRY_MS
            else:
                position.retry_at_ms = now_ms + _GONE_RETRY_MS
                raise
            return None
        position.attempts = 0
        position.explicit = False
        position.high_watermark = result.high_watermark
        if position.paused:
            return None
        from_offset, position.fetch_offset = position.fetch_offset, max(position.fetch_offset, result.next_offset)
        if not len(result.batches) and result.damaged is None:
            if position.handed == from_offset:  # otherwise messages before this gap are still in the user's hands
                position.handed = position.finished = position.fetch_offset
            return None
        return Fetched(position, from_offset, result)

    def decode(self, fetched: Fetched) -> Handout:
        """Make the messages of an answer, which the caller must keep: the position is behind them already.

        Raises BatchDamaged, after which the same messages are fetched again.
        """
        position, from_offset, result = fetched
        messages: list[Message] = []
        try:
            for batch in batches_in(result.batches):
                made = messages_of(batch, position.place, position.uid, self._commit, self.reply, position.holding)
                if made[0].offset < from_offset:
                    made = [message for message in made if message.offset >= from_offset]
                if messages:
                    messages += made
                else:
                    messages = made
        except BaseException:  # damage, or an interrupt of the user's: nothing may be skipped
            self.rewind(position, from_offset)
            raise
        damage = None
        if result.damaged is not None and not self._skip_damage:
            first, after = result.damaged
            damage = DataDamaged(
                f"messages {first} to {after - 1} of {position.place} are damaged and were left out; "
                f"reading goes on behind them"
            )
        return Handout(position, messages, position.fetch_offset, damage, len(result.batches))
