"""What a stream has handed out, what of it is finished, and which partitions it reads.  Shared by both kinds of stream.

A message counts as finished when the next one is asked for; commits never go beyond that.  One attribute is written per
message (`_last`), everything else is worked out from it when somebody wants to know.
"""

from __future__ import annotations

import operator
import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from millstream.client.membership import Membership
from millstream.client.messages import Message, TopicPartition
from millstream.client.metadata import FETCH_WAIT_MS, Place, offsets_call
from millstream.client.ownership import Changes
from millstream.client.positions import Handout, Position, Positions
from millstream.client.settings import StreamSettings
from millstream.errors import InvalidArgument, PartitionNotFound
from millstream.wire import calls

__all__ = ["Reading", "Resolve"]

_NOTHING: Final[tuple[Message, ...]] = ()
#: A call to make, and the type of its answer.
Resolve = tuple[calls.Call, Any]


class Reading:
    """The state of one stream."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        me = weakref.ref(self)

        def commit_message(message: Message) -> object:
            stream = me()
            if stream is None:
                raise InvalidArgument("the stream of this message is gone")
            return stream.commit(message)

        self._positions = Positions(
            max_bytes=settings.max_bytes,
            wait_ms=FETCH_WAIT_MS,
            jitter=random.random,
            tolerate_missing=settings.group is not None,
            skip_damage=settings.on_damage == "skip",
            commit=commit_message if settings.group is not None else None,
        )
        self._uids: dict[str, list[int]] = {}
        self._ready: deque[Handout] = deque()
        #: What is left of the handout the user is working on.
        self._pending: Iterator[Message] = iter(_NOTHING)
        self._current: Handout | None = None
        #: The message in the user's hands; None when the whole handout was handed over at once, or is finished.
        self._last: Message | None = None
        #: Set by others when the stream has to look at something before it hands out the next message.
        self._attention = False
        self._membership: Membership | None = None
        self._looked_up_s = 0.0
        self._epoch = 0
        self._closed = False

    def commit(self, message: Message | None = None) -> object:
        raise NotImplementedError

    # --- progress ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The user asks for more, so what it has is done."""
        current = self._current
        if current is None:
            return
        last = self._last
        if not operator.length_hint(self._pending):
            current.position.handed = current.position.finished = current.next_offset
            self._current = None
        elif last is not None:
            current.position.handed = current.position.finished = last.offset + 1
        self._last = None

    def _begin(self, handout: Handout) -> None:
        handout.position.queued = False
        self._current = handout
        self._pending = iter(handout.messages)
        self._last = None

    def _drop_current(self) -> None:
        self._current = None
        self._pending = iter(_NOTHING)
        self._last = None

    def finished(self) -> dict[TopicPartition, int]:
        """What may be committed.  Called from other threads: what it says is true or a little old."""
        offsets = {position.place: position.finished for position in self._positions}
        last = self._last
        if last is not None and last.source.place in offsets:
            place = last.source.place
            offsets[place] = max(offsets[place], last.offset)
        return offsets

    def _handed_out(self) -> dict[TopicPartition, int]:
        """The offset after the last message handed out, per partition."""
        offsets = {position.place: position.handed for position in self._positions}
        last, current = self._last, self._current
        if current is not None and current.position.place in offsets:
            if not operator.length_hint(self._pending):
                offsets[current.position.place] = current.next_offset
            elif last is not None:
                offsets[current.position.place] = last.offset + 1
        return offsets

    def _note_commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """What the user committed is finished: the next automatic commit must not take it back."""
        for place, offset in offsets.items():
            position = self._positions.get(place)
            if position is not None:
                position.finished = max(position.finished, offset)

    def _to_commit(self, message: Message | None) -> dict[TopicPartition, int]:
        if self._settings.group is None:
            raise InvalidArgument("only a stream with a group has progress to commit")
        if message is None:
            return self._handed_out()
        return {message.source.place: message.offset + 1}

    # --- looking -------------------------------------------------------------------------------------------------

    def position(self) -> dict[TopicPartition, int]:
        """The offset that will be handed out next, per partition."""
        return self._handed_out()

    def assignment(self) -> list[TopicPartition]:
        """The partitions that this stream reads now."""
        return sorted(self._positions.places)

    def lag(self) -> dict[TopicPartition, int]:
        """How many messages are still to be handed out, as far as is known from the last fetch."""
        handed = self._handed_out()
        return {
            position.place: max(0, position.high_watermark - handed[position.place])
            for position in self._positions
            if position.high_watermark is not None and position.place in handed
        }

    def pause(self, partitions: Iterable[TopicPartition | tuple[str, int]] | None = None) -> None:
        """Hand out nothing of these partitions (or of all) until `resume`; they stay assigned."""
        for position in self._chosen(partitions):
            position.paused = True
            self._give_back(position)
        self._attention = True

    def resume(self, partitions: Iterable[TopicPartition | tuple[str, int]] | None = None) -> None:
        for position in self._chosen(partitions):
            position.paused = False
        self._attention = True

    def _chosen(self, partitions: Iterable[TopicPartition | tuple[str, int]] | None) -> list[Position]:
        if partitions is None:
            return list(self._positions)
        return [self._known(TopicPartition(*place)) for place in partitions]

    def _known(self, place: TopicPartition) -> Position:
        position = self._positions.get(place)
        if position is None:
            raise InvalidArgument(f"{place} is not assigned to this stream")
        return position

    def _give_back(self, position: Position) -> None:
        """Forget what was fetched of a partition but not handed out; it will be fetched again."""
        offset = self._handed_out()[position.place]
        self._ready = deque(handout for handout in self._ready if handout.position is not position)
        if self._current is not None and self._current.position is position:
            # The message in hand stays in hand: it is finished when the next one is asked for.
            self._pending = iter(_NOTHING)
            self._current = self._current._replace(next_offset=offset)
        self._positions.rewind(position, offset)

    def _move(self, position: Position, offset: int, *, explicit: bool) -> None:
        self._ready = deque(handout for handout in self._ready if handout.position is not position)
        if self._current is not None and self._current.position is position:
            self._drop_current()
        self._positions.move(position, offset, explicit=explicit)
        self._attention = True

    def _remove(self, place: TopicPartition) -> None:
        position = self._positions.remove(place)
        if position is not None:
            self._ready = deque(handout for handout in self._ready if handout.position is not position)
            if self._current is not None and self._current.position is position:
                self._drop_current()

    # --- where to begin ------------------------------------------------------------------------------------------

    def _lookups(self, places: Iterable[TopicPartition]) -> list[Resolve]:
        """Calls whose answers say where these partitions begin, in the order `_starts` wants them."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in sorted(places):
            by_topic.setdefault(topic, []).append(partition)
        wanted: list[Resolve] = []
        if self._settings.group is not None:
            call = calls.CommittedOffsets(group=self._settings.group, topics=list(by_topic))
            wanted.append((call, list[calls.OffsetEntry]))
        start = self._settings.start
        at: Literal["earliest", "latest"] | datetime = "earliest"
        if start == "latest" or isinstance(start, datetime):
            at = start  # type: ignore[assignment]
        wanted += [
            (offsets_call(topic, at, partitions), list[calls.OffsetEntry]) for topic, partitions in by_topic.items()
        ]
        return wanted

    def _starts(
        self, places: Iterable[TopicPartition], answers: list[list[calls.OffsetEntry]]
    ) -> dict[TopicPartition, tuple[int, bool, int | None]]:
        """Per partition: offset, whether the user gave it, and what is committed."""
        committed: dict[TopicPartition, int] = {}
        if self._settings.group is not None:
            first, *answers = answers
            committed = {TopicPartition(entry.topic, entry.partition): entry.offset for entry in first}
        found = {TopicPartition(entry.topic, entry.partition): entry.offset for answer in answers for entry in answer}
        start = self._settings.start
        starts: dict[TopicPartition, tuple[int, bool, int | None]] = {}
        for place in places:
            if place in committed:
                starts[place] = (committed[place], False, committed[place])
            elif isinstance(start, Mapping):
                starts[place] = (start.get(place.partition, found[place]), place.partition in start, None)
            elif type(start) is int:
                starts[place] = (start, True, None)
            else:
                starts[place] = (found[place], False, None)
        return starts

    def _restart(self, answers: list[list[calls.OffsetEntry]]) -> None:
        """Go on from the start for partitions whose offset is gone; raises if the user named that offset."""
        for position in self._positions:
            if position.out_of_range is not None and position.explicit:
                raise position.out_of_range
        for entry in [entry for answer in answers for entry in answer]:
            position_now = self._positions.get(TopicPartition(entry.topic, entry.partition))
            if position_now is not None and position_now.out_of_range is not None:
                self._move(position_now, entry.offset, explicit=False)

    def _out_of_range(self) -> list[TopicPartition]:
        return [position.place for position in self._positions if position.out_of_range is not None]

    def _seek_lookup(self, place: TopicPartition, to: Place) -> Resolve | None:
        self._known(place)
        if type(to) is int:
            if to < 0:
                raise InvalidArgument(f"an offset is 0 or more, not {to}")
            return None
        return offsets_call(place.topic, to, [place.partition]), list[calls.OffsetEntry]  # type: ignore[arg-type]

    # --- following the group -------------------------------------------------------------------------------------

    def _look_up_group(self) -> Changes | None:
        """What the group wants from us now."""
        self._attention = False
        membership = self._membership
        if membership is None:
            return None
        if membership.failure is not None:
            raise membership.failure
        changes = membership.changes(self._positions.places, self._epoch)
        self._epoch = changes.epoch
        return changes

    def _lose(self, places: set[TopicPartition]) -> None:
        for place in places:
            self._remove(place)
        if self._membership is not None:
            self._membership.dropped(places, lost=True)

    def _release(self, places: set[TopicPartition]) -> None:
        for place in places:
            self._remove(place)
        if self._membership is not None:
            self._membership.dropped(places)

    # --- topics --------------------------------------------------------------------------------------------------

    def _metadata_lookup(self, topics: Iterable[str]) -> Resolve:
        return calls.Metadata(topics=list(topics)), list[calls.TopicMetadata]

    def _learn(self, found: list[calls.TopicMetadata]) -> None:
        for topic in found:
            self._uids[topic.name] = topic.partition_uids

    def _all_places(self, topics: Iterable[str]) -> list[TopicPartition]:
        """What a stream without a group reads."""
        wanted = self._settings.partitions
        places = []
        for topic in topics:
            count = len(self._uids[topic])
            for number in range(count) if wanted is None else wanted:
                if not 0 <= number < count:
                    raise PartitionNotFound(f"topic {topic!r} has partitions 0 to {count - 1}, not {number}")
                places.append(TopicPartition(topic, number))
        return places

    def _unknown_topics(self, places: Iterable[TopicPartition]) -> list[str]:
        return sorted({at.topic for at in places if at.partition >= len(self._uids.get(at.topic, ()))})

    def _add(self, starts: dict[TopicPartition, tuple[int, bool, int | None]]) -> None:
        for place, (offset, explicit, committed) in starts.items():
            uids = self._uids.get(place.topic, ())
            uid = uids[place.partition] if place.partition < len(uids) else 0
            self._positions.add(place, uid, offset, explicit=explicit, committed=committed)
