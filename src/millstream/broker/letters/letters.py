"""Dead letters at run time: listing, showing, counting and purging them, and word of each new one.

A dead letter is a message of a dead letter topic that is not settled in that topic's queue group `dlq`.  They are
looked through in the log itself, from the first one that is not settled on, a small read at a time, so that a million
of them keeps nobody waiting; there is no index that could disagree with the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import structlog

from millstream.broker.background import to_its_end
from millstream.broker.letters.alerts import Alert, LetterAlerts
from millstream.broker.letters.box import LetterBox
from millstream.broker.metrics import Metrics
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.transfer import Target
from millstream.broker.webhooks.sender import Sender
from millstream.clock import Clock
from millstream.dead_letters import DeadLetter, LetterFilter, LetterStatistics
from millstream.errors import InvalidArgument, MessageNotFound, TopicNotFound
from millstream.ids import parse_message_id
from millstream.queues.letter_filters import compile_filter
from millstream.wire import letter_calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["Letters", "Position", "require_choice"]

_log = structlog.get_logger("millstream.dead_letters")

#: How long one call looks through letters before it answers with what it has.
_WORK_MS: Final = 1_000
#: An answer must fit a frame, with room for base 64 and headers.
_PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_PAGE_LETTERS_MAX: Final = 1_000
#: Digits of a partition and an offset.
_POSITION_MAX: Final = 40
#: One line in the log for all letters of a topic within this time.
_SAY_EVERY_MS: Final = 10_000


class _Host(Protocol):
    topics: Topics
    queues: Queues
    metrics: Metrics
    recorder: Recorder


class Position(NamedTuple):
    """Where to go on looking; travels as text."""

    topic: str = ""
    partition: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Position:
        if not text:
            return cls()
        topic, _, rest = text.partition("/")
        partition, _, offset = rest.partition("/")
        if not (partition.isdecimal() and offset.isdecimal() and len(rest) <= _POSITION_MAX):
            raise InvalidArgument(f"after={text[:80]!r} is not what a call of this family has answered")
        return cls(topic, int(partition), int(offset))


#: Letters that match, and where to go on after them.
Found = tuple[list[DeadLetter], Position]


def require_choice(ids: Sequence[str], wanted: LetterFilter, everything: bool) -> None:
    """A forgotten filter must not mean everything."""
    if sum((bool(ids), not wanted.is_everything, everything)) != 1:
        raise InvalidArgument("say which dead letters: ids, or a filter, or everything")


class Letters:
    """All dead letters of the broker."""

    def __init__(self, host: _Host, sender: Sender, *, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._clock = clock
        self._alerts = LetterAlerts(sender, loop, self._alert_told)
        #: When a topic's letters were last mentioned in the log, and how many there have been since.
        self._said: dict[tuple[str, str], tuple[int, int]] = {}
        #: Told of every letter that arrives: (namespace, letter).
        self.listeners: list[Callable[[str, DeadLetter], None]] = []
        host.queues.on_letters = self._arrived

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            letter_calls.ListLetters: lambda session, call: self.page(session.namespace, call),
            letter_calls.ShowLetter: lambda session, call: self.show(session.namespace, call.id),
            letter_calls.CountLetters: lambda session, call: self.count(session.namespace, call),
            letter_calls.PurgeLetters: lambda session, call: self.purge(session.namespace, call),
        }

    async def stop(self) -> None:
        await self._alerts.close()

    def forget_topic(self, namespace: str, name: str) -> None:
        self._said.pop((namespace, name), None)

    # --- looking through them ------------------------------------------------------------------------------------

    def topics(self, namespace: str) -> list[Topic]:
        """The topics that hold dead letters, by name."""
        registry = self._host.topics.registry
        return [topic for topic in registry.matching(namespace, None) if registry.holds_letters(topic)]

    def box(self, topic: Topic, number: int) -> LetterBox:
        name = f"{number}.letters"
        box: LetterBox | None = topic.beside.get(name)  # with all it has read it goes when the topic does
        if box is None:
            box = topic.beside[name] = LetterBox(topic, number, self._host.topics, self._host.queues)
        return box

    def ends(self, namespace: str) -> dict[str, list[int]]:
        """How far the dead letter topics reach now, per partition."""
        topics = self._host.topics
        return {
            topic.name: [
                0 if topics.is_untouched(topic, number) else topics.partition_of(topic, number).high_watermark
                for number in range(len(topic.partitions))
            ]
            for topic in self.topics(namespace)
        }

    async def scan(
        self,
        namespace: str,
        wanted: LetterFilter,
        *,
        after: Position | None = None,
        ends: Mapping[str, Sequence[int]] | None = None,
    ) -> AsyncIterator[Found]:
        """Letters that match, a few at a time, by topic, partition and offset; `ends` leaves out what came later."""
        matches = compile_filter(wanted)
        begin = after or Position()
        for topic in self.topics(namespace):
            if topic.name < begin.topic:
                continue
            for number in range(len(topic.partitions)):
                first = 0
                if topic.name == begin.topic:
                    if number < begin.partition:
                        continue
                    first = begin.offset if number == begin.partition else 0
                if self._host.topics.is_untouched(topic, number):
                    continue
                limit = _end_of(ends, topic.name, number)
                box = self.box(topic, number)
                try:
                    async for letters, offset in box.scan(first, since_us=wanted.since_ms * 1000, end=limit):
                        yield [letter for letter in letters if matches(letter)], Position(topic.name, number, offset)
                        # Others first: looking through a million letters is nobody's emergency.
                        await asyncio.sleep(0)
                except TopicNotFound:
                    break  # deleted meanwhile, with its letters; nobody has asked for it by name

    async def page(self, namespace: str, call: letter_calls.ListLetters) -> letter_calls.LetterPage:
        if not 1 <= call.limit <= _PAGE_LETTERS_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_PAGE_LETTERS_MAX}, not {call.limit}")
        letters: list[DeadLetter] = []
        size = 0
        began_ms = self._clock.monotonic_ms()
        async for found, position in self.scan(namespace, call.filter, after=Position.parse(call.after)):
            for letter in found:
                letter.value = letter.value and letter.value[: call.value_bytes]
                letters.append(letter)
                size += len(letter.value or b"")
                if len(letters) == call.limit or size > _PAGE_BYTES_MAX:
                    after = Position(letter.topic, letter.partition, letter.offset + 1)
                    return letter_calls.LetterPage(letters=letters, after=str(after))
            if self._clock.monotonic_ms() - began_ms > _WORK_MS:
                return letter_calls.LetterPage(letters=letters, after=str(position))
        return letter_calls.LetterPage(letters=letters)

    async def show(self, namespace: str, letter_id: str) -> DeadLetter:
        """One letter, also when it was replayed or purged; raises MessageNotFound."""
        box, offset = self.locate(namespace, letter_id)
        letter = await box.read(offset)
        if letter is None or letter.id != letter_id.upper():
            raise MessageNotFound(f"no dead letter has the id {letter_id}; retention may have removed it")
        return letter

    def locate(self, namespace: str, letter_id: str) -> tuple[LetterBox, int]:
        """Where the letter with an id is, if it is anywhere."""
        place = parse_message_id(letter_id)
        found = self._host.topics.registry.place_of(place.partition_uid)
        if found is None or found[0].namespace != namespace or not self._host.topics.registry.holds_letters(found[0]):
            raise MessageNotFound(f"{letter_id} is not the id of a dead letter")
        return self.box(*found), place.offset

    async def count(self, namespace: str, call: letter_calls.CountLetters) -> letter_calls.LetterCount:
        statistics = LetterStatistics()
        now_ms = self._clock.now_us() // 1000
        began_ms = self._clock.monotonic_ms()
        async for found, position in self.scan(namespace, call.filter, after=Position.parse(call.after)):
            for letter in found:
                statistics.count(letter, now_ms=now_ms)
            if self._clock.monotonic_ms() - began_ms > _WORK_MS:
                return letter_calls.LetterCount(statistics=statistics, after=str(position))
        return letter_calls.LetterCount(statistics=statistics)

    # --- removing them -------------------------------------------------------------------------------------------

    async def purge(self, namespace: str, call: letter_calls.PurgeLetters) -> letter_calls.LetterCount:
        require_choice(call.ids, call.filter, call.everything)
        if call.limit < 0:
            raise InvalidArgument(f"limit must be 0 (all of them) or more, not {call.limit}")
        statistics = LetterStatistics()
        now_ms = self._clock.now_us() // 1000
        began_ms = self._clock.monotonic_ms()
        async for found, position in self._chosen(namespace, call):
            if call.limit:
                found = found[: call.limit - statistics.total]
            if not call.dry_run:
                found = await self._remove(namespace, found)
            for letter in found:
                statistics.count(letter, now_ms=now_ms)
            if call.limit and statistics.total >= call.limit:
                break
            # Behind a list of ids there is nowhere to go on: whoever asked again would be told the same again.
            if not call.ids and self._clock.monotonic_ms() - began_ms > _WORK_MS:
                return letter_calls.LetterCount(statistics=statistics, after=str(position))
        return letter_calls.LetterCount(statistics=statistics)

    async def _chosen(self, namespace: str, call: letter_calls.PurgeLetters) -> AsyncIterator[Found]:
        if not call.ids:
            async for found in self.scan(namespace, call.filter, after=Position.parse(call.after)):
                yield found
            return
        # All of them in one go: `after` means nothing to a list of ids.
        yield [letter async for letter in self.with_ids(namespace, call.ids)], Position()

    async def with_ids(self, namespace: str, ids: Iterable[str]) -> AsyncIterator[DeadLetter]:
        """The letters with these ids that are still there.  Raises MessageNotFound for an id that never was one."""
        for letter_id in dict.fromkeys(some.upper() for some in ids):  # as they are written, each once
            box, offset = self.locate(namespace, letter_id)
            letter = await box.read(offset) if box.is_open(offset) else None
            if letter is not None and letter.id == letter_id.upper():
                yield letter
            await asyncio.sleep(0)

    async def _remove(self, namespace: str, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Settle letters; returns those that nobody else had settled, or taken to replay them, meanwhile."""
        removed: list[DeadLetter] = []
        for box, its in self.by_box(namespace, letters):
            # Whoever has asked may go away meanwhile: what gets to the disk is known here all the same.
            removed += await to_its_end(_let_go(box, its))
        self._host.metrics.dead_letters_purged += len(removed)
        self._host.recorder.letters_purged(removed)
        return removed

    def by_box(self, namespace: str, letters: Iterable[DeadLetter]) -> list[tuple[LetterBox, list[DeadLetter]]]:
        """Letters by where they lie, in their order; those whose topic was deleted since, and made again, are gone."""
        sorted_out: dict[LetterBox, list[DeadLetter]] = {}
        for letter in letters:
            topic = self._host.topics.registry.get(namespace, letter.topic)
            if parse_message_id(letter.id).partition_uid not in topic.partition_uids:
                continue
            sorted_out.setdefault(self.box(topic, letter.partition), []).append(letter)
        return list(sorted_out.items())

    # --- new ones ------------------------------------------------------------------------------------------------

    def _arrived(self, place: Target, first: int, end: int) -> None:
        """Letters were stored: write it down, tell the webhook of the topic they came from, and whoever listens."""
        namespace = place.namespace
        topic = self._host.topics.registry.find(namespace, place.topic)
        if topic is None:
            return
        for letter in self.box(topic, place.partition).read_stored(first, end):
            self._say(namespace, letter)
            origin = self._host.topics.registry.find(namespace, letter.original_topic)
            if origin is not None and origin.config.dead_letter_alert:
                self._alerts.send(Alert(origin.config.dead_letter_alert, _alert_of(letter)))
            for listener in self.listeners:
                listener(namespace, letter)

    def _say(self, namespace: str, letter: DeadLetter) -> None:
        key = (namespace, letter.original_topic)
        now_ms = self._clock.monotonic_ms()
        said_ms, silent = self._said.get(key, (-_SAY_EVERY_MS, 0))
        if now_ms - said_ms < _SAY_EVERY_MS:
            self._said[key] = (said_ms, silent + 1)
            return
        self._said[key] = (now_ms, 0)
        _log.warning(
            "dead letter",
            namespace=namespace,
            topic=letter.original_topic,
            group=letter.group,
            id=letter.id,
            reason=letter.reason,
            error=letter.error,
            not_mentioned=silent,
        )

    def _alert_told(self, delivered: bool) -> None:
        if delivered:
            self._host.metrics.dead_letter_alerts_sent += 1
        else:
            self._host.metrics.dead_letter_alerts_failed += 1


async def _let_go(box: LetterBox, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
    """Settle letters; returns those that were there."""
    left = [letter for letter in letters if box.is_open(letter.offset)]
    with box.claim(letter.offset for letter in left):
        await box.settle([letter.offset for letter in left])
    return left


def _end_of(ends: Mapping[str, Sequence[int]] | None, topic: str, number: int) -> int | None:
    """None = as far as it goes.  A topic or partition that is newer than `ends` has nothing before its beginning."""
    if ends is None:
        return None
    known = ends.get(topic, ())
    return known[number] if number < len(known) else 0


def _alert_of(letter: DeadLetter) -> dict[str, object]:
    return {
        "queue": letter.original_topic,
        "group": letter.group,
        "message_id": letter.original_id,
        "dead_letter_id": letter.id,
        "failure_reason": letter.reason,
        "error": letter.error,
        "retry_count": letter.failures,
        "moved_at": letter.dead_ms,
    }
