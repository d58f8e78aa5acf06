"""Noting what happens to messages, without keeping anybody waiting.

Failures are always noted.  Of successes every n-th message is: which ones follows from their offsets, so that nobody
has to look at messages to know, and at most a few in each moment.  What is noted waits in a bounded buffer until the
next flush, a few times a second; then it is looked up to which key and trace it belongs, and written.  When more
happens than fits, the rest is dropped and counted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from pyroaring import BitMap64

from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.topics import Topics
from millstream.broker.traces.store import TraceStore
from millstream.clock import Clock
from millstream.config import TraceSettings
from millstream.dead_letters import DeadLetter
from millstream.errors import InvalidArgument, MillstreamError
from millstream.headers import readable_headers
from millstream.ids import SCHEDULES, message_id, parse_message_id, schedule_uid
from millstream.queues.ranges import lowest, normal, pack
from millstream.queues.records import Attempt, Lease
from millstream.records import Batch
from millstream.slicing import batches_of
from millstream.traceparent import context_of
from millstream.traces.records import Kind, Record, Search, Subject, marker

if TYPE_CHECKING:
    from millstream.broker.queues.part import QueuePart

__all__ = ["FLUSH_S", "Recorder"]

_log = structlog.get_logger("millstream.traces")

FLUSH_S: Final = 0.2
#: Records that wait for the next flush; beyond that they are dropped.
_BUFFER_MAX: Final = 5_000
#: Successes that are sampled between two flushes.
_SAMPLES_MAX: Final = 20
#: Messages whose key and trace are looked up at one flush, and bytes of the log that are read for it.
_SUBJECTS_MAX: Final = 500
#: The bits of a record about messages that were chosen one by one: 8 KiB.
_SPAN_MAX: Final = 64 * 1024
#: Records whose messages are looked up before others get their turn.
_AT_A_TIME: Final = 25
_READ_BYTES_MAX: Final = 256 * 1024
#: Replayed messages of one partition whose success is waited for.
_WATCHED_MAX: Final = 100_000
#: How long a broker that starts looks for them.
_RESUME_MS: Final = 1_000
_NEVER: Final = 1 << 62
_ERROR_MAX: Final = 1_024
_ATTEMPTS: Final[dict[str, Kind]] = {
    "nack": "nacked",
    "reject": "rejected",
    "timeout": "timeout",
    "returned": "returned",
}


class _Host(Protocol):
    topics: Topics
    metrics: Metrics
    patience: PatientClock


class Recorder:
    """All methods are called on the event loop."""

    def __init__(
        self,
        host: _Host,
        store: TraceStore,
        settings: TraceSettings,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.store = store
        self.enabled = settings.enabled
        #: Of so many offsets one is sampled; 0 = none.
        self.every = round(1 / settings.sample) if settings.enabled and settings.sample > 0 else 0
        self._stride = self.every or _NEVER
        #: Told what is written, with its subjects.
        self.listeners: list[Callable[[Sequence[Record]], None]] = []
        #: Messages whose success is of interest, by the uid of their partition: those that were replayed.
        self.watched: dict[int, BitMap64] = {}
        self._host = host
        self._clock = clock
        self._buffer: list[Record] = []
        self._samples = _SAMPLES_MAX
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # --- noting --------------------------------------------------------------------------------------------------

    async def resume(self) -> None:
        """Find out again which messages were replayed before the broker started, the last ones of them."""
        began_ms, found = self._clock.monotonic_ms(), 0
        with suppress(OSError, MillstreamError):  # then there is nothing to go on with
            async for _, records in self.store.backward(Search(), self.store.end):
                for _, record in records:
                    if record.kind == "replayed" and record.link:
                        place = parse_message_id(record.link)
                        self.watch(place.partition_uid, (place.offset,))
                        found += 1
                if found > _WATCHED_MAX or self._clock.monotonic_ms() - began_ms > _RESUME_MS:
                    return

    def note(self, record: Record) -> None:
        if not self.enabled:
            return
        if len(self._buffer) >= _BUFFER_MAX:
            self._host.metrics.trace_events_dropped += 1
            return
        self._buffer.append(record)
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._due)

    def follow(self, part: QueuePart) -> None:
        """From now on note what comes to nothing in a group on one partition."""
        if not self.enabled:
            return
        place, group = marker(part.keeper.partition.uid), part.group.name

        def attempted(base: int, bits: int, attempt: Attempt) -> None:
            self.note(
                Record(
                    _ATTEMPTS[attempt.kind],
                    attempt.ended_us // 1000,
                    place,
                    *_named(base, bits),
                    group,
                    attempt.consumer,
                    attempt.delivered_us // 1000,
                    attempt.reason[:_ERROR_MAX],
                )
            )

        def ended(how: str, base: int, bits: int) -> None:
            # `how` is expired, evicted or purged.
            now_ms = self._clock.now_us() // 1000
            self.note(Record(how, now_ms, place, *_named(base, bits), group))  # type: ignore[arg-type]

        part.ledger.on_attempt = attempted
        part.ledger.announce_to(ended)

    def cares(self, part: QueuePart, lease: Lease) -> bool:
        """Whether an ack of messages of a lease may have to be noted.  Asked for every ack: costs nearly nothing."""
        return (
            -lease.base % self._stride < lease.granted.bit_length()
            or lease.history.deliveries > 0
            or part.keeper.partition.uid in self.watched
        )

    def acked(self, part: QueuePart, lease: Lease, bits: int, now_us: int) -> None:
        """Messages of a lease were acked: note those that had failed before, that are watched, or that are sampled.

        Called when `cares` says so.
        """
        if not lease.history.deliveries:
            bits = self._chosen(part.keeper.partition.uid, lease.base, bits)
            if not bits:
                return
        self.note(
            Record(
                "acked",
                now_us // 1000,
                marker(part.keeper.partition.uid),
                *_named(lease.base, bits),
                part.group.name,
                lease.consumer,
                lease.granted_us // 1000,
            )
        )

    def _chosen(self, uid: int, base: int, bits: int) -> int:
        """Which of these messages, all of which went well at once, are to be noted."""
        chosen = 0
        watched = self.watched.get(uid)
        if watched is not None:
            size = bits.bit_length()
            if watched.range_cardinality(base, base + size):
                inside = watched & BitMap64(range(base, base + size))
                chosen = pack(base, list(inside)) & bits
        if self.every and self._samples > 0:
            place = -base % self.every
            while place < bits.bit_length() and self._samples > 0:
                if bits >> place & 1:
                    chosen |= 1 << place
                    self._samples -= 1
                place += self.every
        return chosen

    def watch(self, uid: int, offsets: Iterable[int]) -> None:
        if not self.enabled:
            return
        watched = self.watched.setdefault(uid, BitMap64())
        watched.update(offsets)
        if len(watched) > _WATCHED_MAX:
            watched.remove_range(0, watched[len(watched) - _WATCHED_MAX])

    def dead_letter(self, _namespace: str, letter: DeadLetter) -> None:
        """A message has become a dead letter."""
        self._note_letter("dead_lettered", letter, letter.dead_ms, letter.error, letter.reason, letter.id)

    def replayed(self, letters: Sequence[DeadLetter], partition: Partition, first: int) -> None:
        """Letters have become messages again, one after the other from an offset on."""
        now_ms = self._clock.now_us() // 1000
        append_us = None
        try:
            chunk = partition.log.read(first, 1, before=partition.log.next_offset)
            append_us = next((batch.append_time_us for batch in batches_of(chunk.buffers)), None)
        except (OSError, MillstreamError) as error:  # a passport that does not say as what is not worth a replay
            _log.warning("replayed messages could not be read", partition=partition.uid, reason=str(error))
        for offset, letter in enumerate(letters, first):
            link = "" if append_us is None else message_id(append_us, partition.uid, offset)
            self._note_letter("replayed", letter, now_ms, "", "", link)
            self._note_own(letter, "replayed", now_ms, link)
        self.watch(partition.uid, range(first, first + len(letters)))

    def letters_purged(self, letters: Iterable[DeadLetter]) -> None:
        now_ms = self._clock.now_us() // 1000
        for letter in letters:
            self._note_letter("purged", letter, now_ms, "", "its dead letter was purged", letter.id)
            self._note_own(letter, "purged", now_ms, "")

    def _note_letter(self, kind: Kind, letter: DeadLetter, time_ms: int, error: str, note: str, link: str) -> None:
        """Something about the message that a letter was made of."""
        try:
            origin = parse_message_id(letter.original_id)
        except InvalidArgument:  # headers are anybody's to write
            return
        record = Record(
            kind, time_ms, marker(origin.partition_uid), origin.offset, b"\1", letter.group, "", 0, error, note, link
        )
        record.subjects = (_subject(origin.offset, origin.append_time_ms, letter.key, letter.headers),)
        self.note(record)

    def _note_own(self, letter: DeadLetter, kind: Kind, time_ms: int, link: str) -> None:
        """Something about the letter itself."""
        place = parse_message_id(letter.id)
        record = Record(kind, time_ms, marker(place.partition_uid), place.offset, b"\1", letter.group, link=link)
        record.subjects = (_subject(place.offset, place.append_time_ms, letter.key, letter.headers),)
        self.note(record)

    def scheduled(self, kind: Kind, partition: Partition, offsets: Sequence[int], note: str) -> None:
        """Something happened to messages that are not due yet; `partition` is their log."""
        now_ms = self._clock.now_us() // 1000
        for some in _spans(sorted(offsets)):
            bits = pack(some[0], some)
            self.note(Record(kind, now_ms, marker(partition.uid), *_named(some[0], bits), note=note))

    # --- writing -------------------------------------------------------------------------------------------------

    def _due(self) -> None:
        self._task = self._loop.create_task(self.flush())

    async def flush(self) -> None:
        """Write what was noted until now."""
        async with self._flushing:
            self._samples = _SAMPLES_MAX
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            records, self._buffer = self._buffer, []
            if records:
                try:
                    await self._look_up(records)
                except Exception:  # what happened is worth more than the names of whom it happened to
                    _log.exception("messages could not be looked up")
                self._write(records)

    async def tidy(self) -> None:
        """Let go of old records, also when nothing happens, and of messages in topics that are gone."""
        place_of = self._host.topics.registry.place_of
        self.watched = {uid: offsets for uid, offsets in self.watched.items() if place_of(uid) is not None}
        self.store.tidy(self._host.patience.now_us())

    async def stop(self) -> None:
        """Write what is left."""
        await self.flush()
        self.enabled = False
        if self._task is not None:
            await self._task

    def _write(self, records: Sequence[Record]) -> None:
        metrics = self._host.metrics
        self.store.tidy(self._host.patience.now_us())
        if self.store.write(records, self._clock.now_us()):
            metrics.trace_events_recorded += len(records)
        else:
            metrics.trace_events_dropped += len(records)
        for listener in self.listeners:
            listener(records)

    async def _look_up(self, records: Iterable[Record]) -> None:
        """Find out which keys and traces the messages of some records have, of as many as there is time for."""
        left, room = _SUBJECTS_MAX, _READ_BYTES_MAX
        near: dict[bytes, _Near] = {}
        for number, record in enumerate(records):
            if left <= 0:
                break
            if record.subjects:
                continue
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            subjects: list[Subject] = []
            with suppress(OSError, MillstreamError):  # what cannot be read has no name
                looked = near.get(record.place)
                if looked is None:
                    looked = near[record.place] = _Near(self._host.topics, int.from_bytes(record.place))
                for offset in _named_offsets(record, left):
                    subject, used = await looked.subject(offset, may_read=room > 0)
                    room -= used
                    if subject is not None:
                        subjects.append(subject)
            left -= len(subjects)
            record.subjects = subjects


class _Near:
    """The batch of a partition that was looked at last: what happens together was mostly published together."""

    def __init__(self, topics: Topics, uid: int) -> None:
        self._partition: Partition | None = None
        place = topics.registry.place_of(uid)
        if place is None:
            beside = topics.registry.place_of(schedule_uid(uid))
            if beside is not None:
                self._partition = topics.partition_of(beside[0], beside[1] | SCHEDULES)
        elif not topics.is_untouched(*place):
            self._partition = topics.partition_of(*place)
        self._batch: Batch | None = None
        self._columns: tuple[Sequence[int], list[bytes | None] | None, list[bytes | None] | None] = ((), None, None)

    async def subject(self, offset: int, *, may_read: bool) -> tuple[Subject | None, int]:
        """A message as records name it, and how many bytes of the log that took."""
        partition, batch, used = self._partition, self._batch, 0
        if partition is None:
            return None, 0
        if batch is None or not batch.base_offset <= offset < batch.next_offset:
            if not may_read or not partition.log.start_offset <= offset < partition.high_watermark:
                return None, 0
            await partition.warm(offset)
            chunk = partition.log.read(offset, 1, before=partition.high_watermark)
            batch = self._batch = next(batches_of(chunk.buffers), None)
            if batch is None:
                return None, 0
            used = batch.header.length
            self._columns = batch.offsets(), batch.keys(), batch.raw_headers()
        offsets, keys, headers = self._columns
        try:
            place = offsets.index(offset)
        except ValueError:
            return None, used
        items = readable_headers(headers[place]) if headers is not None else ()
        append_ms = batch.append_time_us // 1000
        return _subject(offset, append_ms, keys[place] if keys is not None else None, items), used


def _subject(offset: int, append_ms: int, key: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Subject:
    context = context_of(headers)
    return Subject(offset, append_ms, key, bytes.fromhex(context.trace_id) if context is not None else None)


def _spans(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    """Sorted offsets, cut into as few records as stay small: those that are far apart do not share a bitmap."""
    first = 0
    while first < len(offsets):
        last = bisect_left(offsets, offsets[first] + _SPAN_MAX, first)
        last = min(last, first + _SUBJECTS_MAX)
        yield offsets[first:last]
        first = last


def _named(base: int, bits: int) -> tuple[int, bytes]:
    """Messages as a record names them."""
    base, bits = normal(base, bits)
    return base, bits.to_bytes(bits.bit_length() + 7 >> 3, "little")


def _named_offsets(record: Record, limit: int) -> Iterable[int]:
    few = Record(record.kind, 0, b"", *_named(record.base, lowest(record.mask, limit)))
    return few.offsets()
