"""What a stream has handed out, and what of it is finished.  Shared by both kinds of stream, as is following.py.

A message counts as finished when the next one is asked for; commits never go beyond that.  One attribute is written per
message (`_last`), everything else is worked out from it when somebody wants to know.
"""

from __future__ import annotations

import logging
import operator
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from millstream.client.commits import Progress, moved_on
from millstream.client.membership import Membership
from millstream.client.messages import Message, TopicPartition
from millstream.client.metadata import FETCH_WAIT_MS
from millstream.client.positions import Handout, Position, Positions
from millstream.client.settings import StreamSettings
from millstream.errors import InvalidArgument, MillstreamError
from millstream.names import is_pattern

__all__ = ["Reading", "say_refused"]

_log = logging.getLogger("millstream.client")

_NOTHING: Final[tuple[Message, ...]] = ()


def say_refused(place: TopicPartition, error: MillstreamError) -> None:
    """Whoever waits should know what for."""
    _log.warning("stream: %s cannot be read now: %s; trying again", place, error)


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
            tolerate_missing=settings.group is not None or any(map(is_pattern, settings.topics)),
            skip_damage=settings.on_damage == "skip",
            commit=commit_message if settings.group is not None else None,
            on_refused=say_refused,
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
        self._closing = False
        self._closed = False

    def reply_with(self, reply: Callable[..., object]) -> None:
        """Set what `message.reply` does with messages of this stream."""
        self._positions.reply = reply

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

    def _begin(self) -> Handout:
        """Begin with what has waited longest.

        The exception of a signal's handler may come after any call, and then as much is begun as is taken: so there is
        none between the first assignment and the last.
        """
        handout = self._ready[0]
        pending = iter(handout.messages)
        handout.position.queued = False
        self._current = handout
        self._pending = pending
        self._last = None
        del self._ready[0]
        return handout

    def _drop_current(self) -> None:
        self._current = None
        self._pending = iter(_NOTHING)
        self._last = None

    def finished(self) -> dict[TopicPartition, int]:
        """The offsets that may be committed.  Called from other threads, so the answer may be a little old."""
        offsets = {position.place: position.finished for position in self._positions}
        last = self._last
        if last is not None and last.source.place in offsets:
            place = last.source.place
            offsets[place] = max(offsets[place], last.offset)
        return offsets

    def _progress(self) -> Progress:
        """What may be committed.

        The epoch first: what is found to be lost meanwhile must not be taken for what is read later in its place.
        """
        return Progress(self._positions.earliest_epoch, self._certain(self.finished()))

    def _certain(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Without doubtful positions, of which one that cannot be looked up would hold back the others for long."""
        doubtful = {position.place for position in self._positions.doubtful}
        return {place: offset for place, offset in offsets.items() if place not in doubtful} if doubtful else offsets

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
            return self._certain(self._handed_out())
        place = message.source.place
        if self._holdings([place]) != {place: message.source.holding}:
            raise moved_on(self._settings.group, place)
        return {place: message.offset + 1}

    def _epoch_of(self, message: Message | None) -> int | None:
        """In which epoch of the broker this message, or everything that is handed out, was read."""
        return self._positions.earliest_epoch if message is None else message.source.epoch

    def _holdings(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Of those of these partitions that are read, the numbers of their holdings."""
        found = map(self._positions.get, places)
        return {position.place: position.holding for position in found if position is not None}

    # --- looking -------------------------------------------------------------------------------------------------

    def position(self) -> dict[TopicPartition, int]:
        """The offset that will be handed out next, per partition."""
        return self._handed_out()

    def assignment(self) -> list[TopicPartition]:
        """The partitions that this stream reads now."""
        return sorted(self._positions.places)

    def lag(self) -> dict[TopicPartition, int]:
        """How many messages are still to be handed out, per partition, as far as is known from the last fetch."""
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
