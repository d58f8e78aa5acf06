"""Which partitions a stream reads: all there are, or what its group lets it have.  Shared by both kinds of stream.

What has to wait is written once, as coroutines over three primitives (`_ask`, `_commit`, `_tell`).  The asynchronous
stream awaits them; the primitives of the synchronous one block and never suspend, so it runs a coroutine to its end.

Following the group is a level, not an edge.  A change only says *when* to look; *what* there is to do comes from
comparing what the group lets us have with what is read.  As long as a look finds a difference, the next one is
due a moment later, so whatever fails half-way (a lookup, a callback of the user's) is tried again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from millstream.client.address import Target
from millstream.client.messages import TopicPartition
from millstream.client.metadata import Place, offsets_call
from millstream.client.ownership import Changes
from millstream.client.positions import Position
from millstream.client.reading import Reading, say_refused
from millstream.client.settings import StartAt, StreamSettings, is_offset
from millstream.clock import monotonic_ms
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    PartitionNotFound,
    RequestError,
    StorageFailed,
    TopicNotFound,
)
from millstream.names import is_pattern
from millstream.wire import calls
from millstream.wire.messages import FetchRequest

__all__ = ["Following"]

_log = logging.getLogger("millstream.client")

#: A call to make, and the type of its answer.
_Resolve = tuple[calls.Call, Any]
#: Per partition: offset, whether the user gave it, and what is committed.
_Starts = dict[TopicPartition, tuple[int, bool, int | None]]
_LOOK_AGAIN_S: Final = 1.0
#: Without a group nobody says that there are more topics and partitions; a stream looks this often, and the less often
#: the longer it takes.
_TOPICS_AGE_S: Final = 5.0
_LOOKING_SHARE: Final = 100
_PAGE: Final = 1000
_COMMIT_S: Final = 10.0


class _Unreadable(NamedTuple):
    """A partition whose log the broker could not open when we wanted to begin with it."""

    uid: int
    error: StorageFailed
    #: Where to begin with it when it can be read, if there is no progress.
    start: StartAt


class Following(Reading):
    """A stream and its partitions."""

    def __init__(self, target: Target, settings: StreamSettings) -> None:
        super().__init__(settings)
        self._target = target
        self._uids: dict[str, list[int]] = {}
        #: From then on, what is found without progress has appeared since, and is read from its first message.
        self._began = settings.group is not None and settings.start == "latest"  # the broker has put down the ends
        self._look_up_s = math.inf
        #: The connection was lost since the last look, or there was none: the broker may have been restarted, and what
        #: it keeps in memory has other partitions then, of which no offset is known.
        self._in_doubt = False
        #: When the topics of the patterns were made, and how many partitions they had, at the last look.
        self._listed: dict[str, tuple[int, int]] = {}
        self._unreadable: dict[TopicPartition, _Unreadable] = {}
        self._epoch = 0
        self._look_again_s = math.inf

    # --- how to wait ---------------------------------------------------------------------------------------------

    async def _ask(self, call: calls.Call, kind: Any) -> Any:
        """Make a call.  Raises the broker's refusal, or ConnectionLost after the client's patience."""
        raise NotImplementedError

    async def _commit(self, offsets: dict[TopicPartition, int], epoch: int | None, timeout_s: float) -> None:
        """Have the membership commit, and wait for it."""
        raise NotImplementedError

    async def _tell(self, callback: Callable[..., Any] | None, *arguments: object) -> None:
        """Call a function of the user's, if there is one."""
        raise NotImplementedError

    # --- the group -----------------------------------------------------------------------------------------------

    def _attention_in_s(self) -> float:
        """How long until the group has to be looked at: 0 when it is time."""
        return 0.0 if self._attention else max(0.0, self._look_again_s - time.monotonic())

    async def _attended(self) -> bool:
        """Do what the group asks; whether the stream is open after that: somebody may have closed it meanwhile."""
        await self._attend()
        return not self._closed

    async def _attend(self) -> None:
        """Do what the group asks, between two messages."""
        changes = self._look_up_group()
        if changes is None:
            return
        if changes.lost:
            self._remove_all(changes.lost, lost=True)
            await self._tell(self._settings.on_revoked, sorted(changes.lost), True)
        if changes.give_up:
            await self._commit_finished(changes.give_up)
            await self._tell(self._settings.on_revoked, sorted(changes.give_up), False)
            self._remove_all(changes.give_up, lost=False)
        if changes.take:
            await self._take(changes.take)

    def _look_up_group(self) -> Changes | None:
        """What the group wants from us now."""
        self._attention = False  # before looking: what changes from now on is another reason to look
        membership = self._membership
        if membership is None:
            return None
        if membership.failure is not None:
            self._attention = True  # every call says so
            raise membership.failure
        changes = membership.changes(self._positions.places, self._epoch)
        self._epoch = changes.epoch
        busy = changes.lost or changes.give_up or changes.take
        self._look_again_s = time.monotonic() + _LOOK_AGAIN_S if busy else math.inf
        return changes

    async def _take(self, places: Iterable[TopicPartition]) -> None:
        """Begin with these partitions; topic by topic, as one of them may be gone."""
        for topic, group in groupby(sorted(places), key=lambda place: place.topic):
            wanted = list(group)
            try:
                unknown = self._unknown_topics(wanted)
                if unknown:
                    self._learn(await self._ask(*self._metadata_lookup(unknown)))
                starts = await self._all_starts(wanted)
            except RequestError as error:
                if self._membership is None and topic in self._settings.topics:
                    raise
                _log.warning("stream: cannot begin with topic %s yet: %s", topic, error)  # it is being deleted
                continue
            # Asked only now: meanwhile the group may have passed on what we were about to read.
            taken = dict.fromkeys(starts, 0) if self._membership is None else self._membership.took(starts)
            self._add(starts, taken)
            if taken:
                await self._tell(self._settings.on_assigned, sorted(taken))

    def _remove_all(self, places: set[TopicPartition], *, lost: bool) -> None:
        for place in places:
            self._remove(place)
        if self._membership is not None:
            for topic in {at.topic for at in places} - {at.topic for at in self._positions.places}:
                self._uids.pop(topic, None)  # when it comes back it may be another topic of that name
            self._membership.dropped(places, lost=lost)

    async def _commit_finished(self, places: set[TopicPartition]) -> None:
        if not self._settings.commits_itself:
            return
        epoch, finished = self._progress()
        offsets = {place: offset for place, offset in finished.items() if place in places}
        try:
            await self._commit(offsets, epoch, min(_COMMIT_S, self._target.timeout_s))
        except MillstreamError as error:
            _log.warning("stream: progress could not be committed, messages will be delivered again: %s", error)

    async def _let_go(self) -> None:
        """The stream ends in good order."""
        places = self._positions.places
        if self._membership is not None and self._membership.failure is None and places:
            await self._commit_finished(places)
            await self._tell(self._settings.on_revoked, sorted(places), False)

    # --- where to begin ------------------------------------------------------------------------------------------

    @property
    def _start(self) -> StartAt:
        """Where to begin with partitions that have no progress."""
        return "earliest" if self._began else self._settings.start

    async def _all_starts(self, places: list[TopicPartition]) -> _Starts:
        """Where to begin with partitions of one topic, without those whose logs the broker cannot open."""
        tried = {place: known.start for place in places if (known := self._known_unreadable(place)) is not None}
        untried = [place for place in places if place not in tried]
        starts = await self._find_starts(untried, self._start) if untried else {}
        for place, start in tried.items():  # one by one: most likely they are as they were
            starts |= await self._find_starts([place], start)
        return starts

    async def _find_starts(self, places: list[TopicPartition], start: StartAt) -> _Starts:
        try:
            answers = [await self._ask(*lookup) for lookup in self._lookups(places, start)]
        except StorageFailed as error:
            half = len(places) // 2
            if half:  # one of them need not keep us from the others
                return await self._find_starts(places[:half], start) | await self._find_starts(places[half:], start)
            (place,) = places
            if self._known_unreadable(place) is None:
                say_refused(place, error)
            # What is the latest then, nobody can say later.
            later = "earliest" if start == "latest" else start
            self._unreadable[place] = _Unreadable(self._uid_of(place), error, later)
            return {}
        for place in places:
            self._unreadable.pop(place, None)
        return self._starts(places, answers, start)

    def _known_unreadable(self, place: TopicPartition) -> _Unreadable | None:
        """Unless it is another one of its name by now."""
        known = self._unreadable.get(place)
        return known if known is not None and known.uid == self._uid_of(place) else None

    def _lookups(self, places: Iterable[TopicPartition], start: StartAt) -> list[_Resolve]:
        """Calls whose answers say where these partitions begin, in the order `_starts` wants them."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in sorted(places):
            by_topic.setdefault(topic, []).append(partition)
        wanted: list[_Resolve] = []
        if self._settings.group is not None:
            call = calls.CommittedOffsets(group=self._settings.group, topics=list(by_topic))
            wanted.append((call, list[calls.OffsetEntry]))
        at: Literal["earliest", "latest"] | datetime = "earliest"
        if start == "latest" or isinstance(start, datetime):
            at = start  # type: ignore[assignment]
        wanted += [
            (offsets_call(topic, at, partitions), list[calls.OffsetEntry]) for topic, partitions in by_topic.items()
        ]
        return wanted

    def _starts(
        self, places: Iterable[TopicPartition], answers: list[list[calls.OffsetEntry]], start: StartAt
    ) -> _Starts:
        """Where to begin, from the answers to `_lookups`."""
        committed: dict[TopicPartition, int] = {}
        if self._settings.group is not None:
            first, *answers = answers
            committed = {TopicPartition(entry.topic, entry.partition): entry.offset for entry in first}
        found = {TopicPartition(entry.topic, entry.partition): entry.offset for answer in answers for entry in answer}
        starts: _Starts = {}
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

    def _out_of_range(self) -> list[TopicPartition]:
        return [position.place for position in self._positions if position.out_of_range is not None]

    async def _restart(self, gone: list[TopicPartition]) -> None:
        """Go on with partitions whose offset is gone; raises if the user named that offset.

        What retention has passed goes on with the oldest message there is, as nothing else was read.  Where the log is
        shorter than it was, nobody knows what is in it: from the start, as if nothing were committed.
        """
        for position in self._positions:
            if position.out_of_range is not None and position.explicit:
                raise position.out_of_range
        for topic, places in groupby(sorted(gone), key=lambda place: place.topic):
            oldest = offsets_call(topic, "earliest", [place.partition for place in places])
            for position, offset in await self._gone_positions(oldest):
                if position.fetch_offset < offset:
                    self._move(position, offset, explicit=False)
        for call, _ in self._lookups(self._out_of_range(), self._settings.start):
            if isinstance(call, calls.ListOffsets):  # what is committed is what is gone
                for position, offset in await self._gone_positions(call):
                    self._move(position, offset, explicit=False)

    async def _gone_positions(self, call: calls.ListOffsets) -> list[tuple[Position, int]]:
        """Those of a lookup that have nowhere to go on yet, with what was found."""
        entries: list[calls.OffsetEntry] = await self._ask(call, list[calls.OffsetEntry])
        found = [(self._positions.get(TopicPartition(entry.topic, entry.partition)), entry.offset) for entry in entries]
        return [(at, offset) for at, offset in found if at is not None and at.out_of_range is not None]

    async def _look_back(self) -> None:
        """Find out whether the logs still hold what was read of them before the broker was restarted.

        With fsync `interval` and `never` a message is read before it is on disk, and a power cut gives its offset to
        another one.  What was stored in a later epoch than we have read in is new, wherever we stood.
        """
        for position in self._positions.doubtful:
            (topic, partition), epoch = position.place, position.epoch
            call = calls.ListOffsets(topic=topic, at="epoch", epoch=epoch, partitions=[partition])
            try:
                (entry,) = await self._ask(call, list[calls.OffsetEntry])
            except StorageFailed as error:  # one of them need not keep us from the others
                self._look_up_s = min(self._look_up_s, time.monotonic() + _LOOK_AGAIN_S)
                if not position.attempts:
                    say_refused(position.place, error)
                position.attempts += 1
                continue
            except (TopicNotFound, PartitionNotFound):
                entry = None  # which a fetch finds out as well
            if self._positions.get(position.place) is not position or not position.doubtful:
                continue  # given up or moved meanwhile
            if self._positions.epoch is None:
                return  # the next connection may be to a broker in yet another epoch
            if entry is None or entry.offset >= position.fetch_offset:
                self._positions.trust(position)
                continue
            _log.warning("stream: %s has lost messages that were read; going on at %d", position.place, entry.offset)
            self._move(position, min(entry.offset, self._handed_out()[position.place]), explicit=False)

    async def _seek(self, place: TopicPartition, to: Place) -> None:
        self._known(place)
        if type(to) is int:
            if not is_offset(to):
                raise InvalidArgument(f"an offset is 0 or more and has 63 bits, not {to}")
            self._move(self._known(place), to, explicit=True)
            return
        call = offsets_call(place.topic, to, [place.partition])  # type: ignore[arg-type]
        (entry,) = await self._ask(call, list[calls.OffsetEntry])
        self._move(self._known(place), entry.offset, explicit=False)

    # --- topics --------------------------------------------------------------------------------------------------

    async def _find_topics(self) -> None:
        """Raises TopicNotFound.  Without a group, all that match are read from now on."""
        if self._settings.group is None:
            await self._look_up_topics()
            self._began = True
            if self._unreadable and not self._positions:
                raise min(self._unreadable.items())[1].error
            return
        names = [topic for topic in self._settings.topics if not is_pattern(topic)]
        if names:
            self._learn(await self._ask(*self._metadata_lookup(names)))

    async def _look_up_topics(self) -> None:
        """Without a group: all topics and partitions there are, including those made since."""
        began_s = time.monotonic()
        names = [topic for topic in self._settings.topics if not is_pattern(topic)]
        if names:
            self._learn(await self._ask(*self._metadata_lookup(names)))
        names += [name for name in await self._look_up_patterns() if name not in names]
        self._uids = {name: self._uids[name] for name in names}  # topics may come and go for as long as it reads
        places = dict.fromkeys(self._all_places(names))
        for position in self._positions:
            topic, number = position.place
            if position.place not in places or position.uid != self._uids[topic][number]:
                self._remove(position.place)  # deleted, or another one of its name
        await self._take(place for place in places if self._positions.get(place) is None)
        self._in_doubt = False
        now_s = time.monotonic()
        self._look_up_s = now_s + max(_TOPICS_AGE_S, (now_s - began_s) * _LOOKING_SHARE)

    async def _look_up_patterns(self) -> list[str]:
        """The topics that match.  Details are asked for only where something is new."""
        while True:
            listed: dict[str, tuple[int, int]] = {}
            for pattern in filter(is_pattern, self._settings.topics):
                after = ""
                while True:
                    call = calls.ListTopics(pattern=pattern, after=after, limit=_PAGE)
                    page: list[calls.TopicInfo] = await self._ask(call, list[calls.TopicInfo])
                    listed |= {info.name: (info.created_ms, info.partition_count) for info in page}
                    if len(page) < _PAGE:
                        break
                    after = page[-1].name
            changed = [name for name, form in listed.items() if self._listed.get(name) != form]
            try:
                if changed:
                    self._learn(await self._ask(*self._metadata_lookup(changed)))
            except TopicNotFound:
                continue  # deleted since it was listed
            self._listed = listed
            return list(listed)

    async def _look_up_again(self) -> None:
        alone = self._settings.group is None
        self._look_up_s = time.monotonic() + _TOPICS_AGE_S if alone else math.inf
        try:
            if alone:
                await self._look_up_topics()
            await self._look_back()
        except MillstreamError as error:
            if not error.retriable:
                raise
            if self._in_doubt or self._positions.doubtful:  # nothing is read before it
                self._look_up_s = time.monotonic() + _LOOK_AGAIN_S
            _log.info("stream: cannot look for topics and partitions now: %s; trying again", error)

    def _look_up_in_s(self) -> float:
        """How long until a stream has to look for topics and partitions, or back: 0 when it is time."""
        return max(0.0, self._look_up_s - time.monotonic())

    def _reached(self, epoch: int | None) -> None:
        """We are connected, to a broker in this epoch."""
        self._positions.connected(epoch)
        if self._positions.doubtful:
            self._look_up_s = 0.0

    def _disconnected(self) -> None:
        """The connection is lost.  Without a group nobody says what has become of the partitions meanwhile."""
        self._positions.disconnected()
        self._look_up_s = 0.0
        if self._settings.group is None:
            self._in_doubt = True
            self._listed = {}

    def _requests(self) -> list[tuple[int, FetchRequest]]:
        """What to fetch now, with correlation ids."""
        return [] if self._in_doubt else self._positions.requests(monotonic_ms())

    def _metadata_lookup(self, topics: Iterable[str]) -> _Resolve:
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
                    if self._began:
                        continue  # of a new topic, which may get more
                    raise PartitionNotFound(f"topic {topic!r} has partitions 0 to {count - 1}, not {number}")
                places.append(TopicPartition(topic, number))
        return places

    def _unknown_topics(self, places: Iterable[TopicPartition]) -> list[str]:
        return sorted({at.topic for at in places if at.partition >= len(self._uids.get(at.topic, ()))})

    def _add(self, starts: _Starts, holdings: dict[TopicPartition, int]) -> None:
        for place, holding in sorted(holdings.items()):
            offset, explicit, committed = starts[place]
            uid = self._uid_of(place)
            self._positions.add(place, uid, offset, explicit=explicit, committed=committed, holding=holding)

    def _uid_of(self, place: TopicPartition) -> int:
        uids = self._uids.get(place.topic, ())
        return uids[place.partition] if place.partition < len(uids) else 0
