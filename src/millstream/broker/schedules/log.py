"""The schedules of one partition at run time: its schedule log, its agenda, and an alarm.

What becomes visible in the schedule log is entered with its due time.  When messages are due they are read from the
schedule log and moved to the partition; that they have fired is recorded in the same step.  When the alarm rings the
clock is looked at again, so an alarm that rings early fires nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any, Final, TypeVar

import structlog

from millstream.broker.journal import Journal
from millstream.broker.partition import Partition
from millstream.broker.schedules.messages import Collected, Scheduled, collect, due_rows, make_batches, open_messages
from millstream.broker.schedules.repetitions import TargetIds, judged
from millstream.broker.schedules.window import DueWindow
from millstream.broker.transfer import Target, Transfer
from millstream.clock import Clock
from millstream.errors import MillstreamError, ScheduleFired, ScheduleNotFound, StorageFailed
from millstream.ids import OFFSET_BITS
from millstream.log.due_index import DueIndex
from millstream.log.sweeping import Sweep
from millstream.schedules.agenda import Agenda, settled_fact
from millstream.slicing import batches_of

__all__ = ["ScheduleLog"]

T = TypeVar("T")

_log = structlog.get_logger("millstream.schedules")

_ENTITY: Final = "schedules"
_OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
_READ_BYTES: Final = 1024 * 1024
#: Taken from the timers at once: enough to open each batch once when many messages are due.
_FIRE_ROWS: Final = 20_000
#: Of these, so much is in memory at a time, about.
_FIRE_BYTES: Final = 4 * 1024 * 1024
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 5.0
#: An alarm that is further away is set again on the way there.
_ALARM_S_MAX: Final = 3600.0


class ScheduleLog:
    """What is scheduled for one partition.  All methods are called on the event loop."""

    def __init__(
        self,
        partition: Partition,
        target: Target,
        journal: Journal,
        transfer: Transfer,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        may_fire: Callable[[], bool],
        ids: Callable[[], TargetIds | None],
    ) -> None:
        """`ids`: the dedup ids of the target, or None if it has no window for them.  It raises MillstreamError."""
        self.partition = partition
        self.target = target
        self.agenda = Agenda()
        self.fired = self.expired = self.cancelled = self.moved = 0
        index = DueIndex(partition.log.storage, partition.log.directory.removesuffix(".schedules") + ".due")
        self._window = DueWindow(self.agenda, index, clock=clock, loop=loop)
        self._journal = journal
        self._transfer = transfer
        self._clock = clock
        self._loop = loop
        self._may_fire = may_fire
        self._ids = ids
        self._ready = False
        self._closed = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._firing = False
        for fact in journal.claim(_ENTITY, lambda: [self.agenda.snapshot()]):
            self.agenda.apply(fact)
        self._loaded = loop.create_future()
        partition.listeners.append(lambda _before, _after: self.take_in())
        self._start(self._load())

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the log is gone or refuses everything, until a restart."""
        return self._closed or self.partition.failed is not None

    @property
    def pending(self) -> int:
        """How many messages are still to come.  It is known before they are: the agenda is filled after the start."""
        return self.agenda.unsettled_between(self.partition.log.start_offset, self.partition.high_watermark)

    async def loaded(self) -> None:
        """Wait until everything that is pending is known."""
        if not self._ready:
            await asyncio.shield(self._loaded)

    async def close(self) -> None:
        """Finish what is under way and start nothing new."""
        self._closed = True
        self._disarm()
        if self._tasks:
            # A move whose target refuses goes on for ever; it is recorded, and the next start takes it up.
            _, unfinished = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in unfinished:
                task.cancel()

    def _start(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except MillstreamError as error:
                _log.warning("schedules wait", directory=self.partition.log.directory, reason=str(error))
            except Exception:
                _log.exception("schedules failed", directory=self.partition.log.directory)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        """After a start: take over the runs that are there, and read from the log what is in none of them."""
        while not self.ended:
            try:
                await self._try_to_load()
                break
            except (OSError, MillstreamError) as error:
                _log.error("schedules cannot be read", directory=self.partition.log.directory, reason=str(error))
                await asyncio.sleep(_RETRY_S)
        if not self._loaded.done():
            self._loaded.set_result(None)

    async def _try_to_load(self) -> None:
        # What fired before a crash is seen to by CutMoves, and goes before what fires now (see Transfer.move).
        log, agenda = self.partition.log, self.agenda
        agenda.trim(log.start_offset)
        agenda.extend(self.partition.high_watermark)
        await self._window.load(self._read_rows, log.start_offset)
        self._ready = True
        self.take_in()
        self.arm()

    async def _read_rows(self, first: int, end: int) -> AsyncIterator[tuple[int, list[int]]]:
        """The rows of a range, from the log itself, a piece at a time: where the piece ends, and the rows."""
        while first < end and not self.ended:
            await self.partition.warm(first)
            chunk = self.partition.log.read(first, _READ_BYTES, before=self.partition.high_watermark)
            if chunk.damaged is not None:
                await self._lose(*chunk.damaged)
            if chunk.next_offset <= first:
                raise StorageFailed(f"the log {self.partition.log.directory} cannot be read at offset {first}")
            rows = [row for batch in batches_of(chunk.buffers) for row in due_rows(batch)]
            rows = [row for row in rows if first <= row & _OFFSET_MASK < end]
            first = min(end, chunk.next_offset)
            yield first, list(self.agenda.unsettled(rows))
            await asyncio.sleep(0)

    async def _lose(self, first: int, end: int) -> None:
        """Messages that cannot be read any more must not keep everything behind them from being removed."""
        _log.error("scheduled messages are damaged", directory=self.partition.log.directory, first=first, end=end)
        fact = settled_fact("lost", range(first, end))
        await self._journal.record_durably((_ENTITY, fact))
        self.agenda.apply(fact)

    # --- rows come in --------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Enter what has become visible in the log."""
        if not self._ready or self.ended:
            return
        agenda, partition = self.agenda, self.partition
        try:
            while agenda.end < partition.high_watermark:
                chunk = partition.log.read(agenda.end, _READ_BYTES, before=partition.high_watermark)
                if chunk.next_offset <= agenda.end:
                    break
                for batch in batches_of(chunk.buffers):
                    self._window.enter(due_rows(batch))
                agenda.extend(chunk.next_offset)
        except (OSError, MillstreamError) as error:  # tried again when the next message comes, and once a second
            _log.error("schedules cannot be read", directory=partition.log.directory, reason=str(error))
        if self._window.wants_tending:
            self._start(self._tend())
        due_ms = agenda.timers.next_due_ms()
        if due_ms is not None and (self._alarm is None or due_ms < self._alarm_ms):
            self.arm()

    async def _tend(self) -> None:
        pause_s = 0.0
        try:
            await self._window.tend()
        except OSError as error:
            _log.error("the index of due times failed", directory=self.partition.log.directory, reason=str(error))
            pause_s = _RETRY_S
        self.arm(pause_s)

    async def tidy(self, is_over: Callable[[], bool]) -> int:
        """Remove what is settled: whole segments at the start of the log, and runs.  Returns how many segments.

        What takes long is given up when `is_over` says so, which is asked in a thread.
        """
        log = self.partition.log
        async with self.partition.maintenance:
            if not self._ready or self.ended:
                return 0
            before = len(log.segments)
            # The newest segment stays until it is full, so that people can see what became of their messages.
            log.delete_before(min(self.agenda.first_pending(), log.segments[-1].base_offset))
            self.agenda.trim(log.start_offset)
            self._window.remove_settled()
            removed = max(0, before - len(log.segments))
            # One message that waits for a year must not keep all that were published after it.
            pending = self.agenda.pending_before(log.segments[-1].base_offset)
            sweep = Sweep.plan_sweep(log, self.agenda.settled(), pending)
            if sweep is not None:
                await self._loop.run_in_executor(None, sweep.rewrite, is_over)
                for _ in sweep.swaps() if not self.ended else ():
                    await asyncio.sleep(0)  # each takes some syncs
            return removed

    # --- time ----------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def arm(self, at_least_s: float = 0.0) -> None:
        """Set the alarm for the next thing to do."""
        self._disarm()
        if not self._ready or self._firing or self.ended:
            return
        due_ms = self.agenda.timers.next_due_ms()
        self._alarm_ms = self._window.moves_ms if due_ms is None else min(due_ms, self._window.moves_ms)
        wait_s = (self._alarm_ms * 1000 - self._clock.now_us()) / 1_000_000
        self._alarm = self._loop.call_later(min(max(at_least_s, wait_s), _ALARM_S_MAX), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now_ms = self._now_ms()
        if self._window.wants_tending:
            self._start(self._tend())
        due_ms = self.agenda.timers.next_due_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._firing = True
            self._start(self._fire())
        else:
            self.arm(at_least_s=0.001)

    async def _fire(self) -> None:
        """Deliver everything that is due, in order."""
        pause_s = 0.0
        try:
            while not self.ended:
                if not self._may_fire():
                    pause_s = _RETRY_S
                    break
                rows = self.agenda.take_due(self._now_ms(), _FIRE_ROWS)
                if not rows:
                    break
                await self._deliver(rows)
        except BaseException:
            pause_s = _RETRY_S
            raise
        finally:
            self._firing = False
            self.arm(pause_s)

    async def _deliver(self, rows: Sequence[int]) -> None:
        # In the order of the rows: by due time, then as they were published.
        waiting = {row & _OFFSET_MASK: row for row in rows}
        offsets = list(waiting)
        at, count = 0, len(offsets)
        try:
            while at < len(offsets) and not self._closed:
                some = offsets[at : at + count]
                collected = await self._collect(sorted(some), _whole, bytes_max=_FIRE_BYTES)
                if collected.looked_at < len(some):
                    count = collected.looked_at  # they are too large for all to be in memory
                    continue
                await self._deliver_some(some, collected.found)
                at += count
                if 2 * collected.size_bytes <= _FIRE_BYTES:
                    count *= 2
        finally:
            self.agenda.give_back([row for offset, row in waiting.items() if self.agenda.state(offset) == "firing"])

    async def _deliver_some(self, offsets: Sequence[int], found: Mapping[int, Scheduled]) -> None:
        lost = [offset for offset in offsets if offset not in found]
        if lost:
            await self._settle("lost", lost)
        messages = [found[offset] for offset in offsets if offset in found]
        now_us = self._clock.now_us()
        expired = {message.offset for message in messages if 0 < message.expiry_us <= now_us}
        if expired:
            await self._settle("expired", expired)
            self.expired += len(expired)
            messages = [message for message in messages if message.offset not in expired]
        async with judged(messages, self._ids, self._clock) as verdict:
            if verdict.known:
                await self._settle("fired", verdict.known)
                self.fired += len(verdict.known)
            for sent, batch in make_batches(verdict.new, self.partition.uid):
                if self._closed:
                    break
                verdict.stored(await self._move(sent, batch))

    async def _move(self, messages: list[Scheduled], batch: bytearray) -> int:
        fact = settled_fact("fired", [message.offset for message in messages])

        def recorded() -> None:
            self.agenda.apply(fact)
            self.fired += len(messages)

        return await self._transfer.move(self.target, batch, [(_ENTITY, fact)], on_recorded=recorded)

    async def _settle(self, kind: Any, offsets: Iterable[int]) -> None:
        fact = settled_fact(kind, offsets)
        await self._journal.record_durably((_ENTITY, fact))
        self.agenda.apply(fact)

    async def _collect(
        self, offsets: Sequence[int], keep: Callable[[Scheduled], T], *, bytes_max: int | None = None
    ) -> Collected[T]:
        for offset in self._cold(offsets):
            await self.partition.warm(offset)
        return await collect(self.partition.log, offsets, self.partition.high_watermark, keep, bytes_max=bytes_max)

    def _cold(self, offsets: Sequence[int]) -> Iterator[int]:
        """One offset of each segment that has to be checked before it is read."""
        segments = iter(self.partition.log.segments)
        segment = next(segments, None)
        for offset in offsets:
            while segment is not None and segment.next_offset <= offset:
                segment = next(segments, None)
            if segment is not None and not segment.verified and offset >= segment.base_offset:
                yield offset
                segment = next(segments, None)

    # --- what is asked -------------------------------------------------------------------------------------------

    async def message(self, offset: int) -> Scheduled | None:
        """The message at an offset, if it can be read."""
        if not self.partition.log.start_offset <= offset < self.partition.high_watermark:
            return None
        return (await self._collect([offset], _whole)).found.get(offset)

    async def upcoming(
        self, after_ms: int, before_ms: int, limit: int, keep: Callable[[int, Scheduled], T], *, behind: int = -1
    ) -> list[T]:
        """What is pending between two times and behind a row, soonest first.

        `keep` gets the due time and the message of each, and says what is wanted of them.
        """
        from_ms = max(after_ms, behind >> OFFSET_BITS)

        def first_of(rows: Iterator[int]) -> list[int]:
            found: dict[int, None] = {}  # a message that was moved may have its row twice
            for row in dropwhile(lambda row: row <= behind, self.agenda.current(rows)):
                if len(found) == limit or row >> OFFSET_BITS >= before_ms:
                    break
                found[row] = None
            return list(found)

        while True:
            try:
                rows = await self._loop.run_in_executor(None, first_of, self._window.rows_from(from_ms))
                break
            except FileNotFoundError:
                continue  # a run was removed meanwhile, because nothing in it is pending any more
        due_ms = {row & _OFFSET_MASK: row >> OFFSET_BITS for row in rows}
        found = (await self._collect(sorted(due_ms), lambda message: keep(due_ms[message.offset], message))).found
        return [found[offset] for offset in due_ms if offset in found]

    async def with_key(self, key: bytes, keep: Callable[[int, Scheduled], T]) -> list[T]:
        """What `keep` makes of every message that is pending with a key.  Reads all pending messages."""
        found: list[tuple[int, int, T]] = []
        offset, agenda = self.agenda.start, self.agenda
        while offset < agenda.end and not self.ended:
            await self.partition.warm(offset)
            chunk = self.partition.log.read(offset, _READ_BYTES, before=agenda.end)
            if chunk.next_offset <= offset:
                break
            for batch in batches_of(chunk.buffers):
                if key in (batch.keys() or ()):
                    for message in open_messages(batch):
                        if message.key == key and agenda.state(message.offset) == "pending":
                            due_ms = agenda.due_ms(message.offset, message.due_ms)
                            found.append((due_ms, message.offset, keep(due_ms, message)))
            offset = chunk.next_offset
            await asyncio.sleep(0)
        return [kept for _, _, kept in sorted(found, key=lambda it: it[:2])]

    def check_pending(self, offset: int) -> None:
        """Raise unless a message can still be moved or cancelled."""
        state = self.agenda.state(offset)
        if state in ("firing", "fired"):
            raise ScheduleFired("the message was delivered already")
        if state == "gone":
            raise ScheduleFired("the message was delivered, cancelled or expired, and its record has been removed")
        if state != "pending":
            reasons = {"cancelled": "was cancelled", "expired": "expired before it was due", "lost": "is damaged"}
            raise ScheduleNotFound(f"the message {reasons.get(state, 'was never scheduled')}")

    async def cancel(self, offsets: Iterable[int]) -> int:
        """Cancel those of these messages that are pending; durable on return.  Returns how many."""
        pending = [offset for offset in offsets if self.agenda.state(offset) == "pending"]
        if pending:
            await self._decide(settled_fact("cancelled", pending), pending)
            self.cancelled += len(pending)
        return len(pending)

    async def move(self, offset: int, due_ms: int) -> None:
        """Give a pending message another time; durable on return."""
        await self._decide(("moved", offset, due_ms), [offset])
        self.moved += 1
        self.take_in()

    async def _decide(self, fact: Sequence[Any], offsets: list[int]) -> None:
        """Record a decision.  Until it is on disk these messages are not delivered."""
        self.agenda.hold(offsets)
        try:
            await self._journal.record_durably((_ENTITY, fact))
            self.agenda.apply(fact)
        finally:
            self.agenda.release(offsets)
            self.arm()


def _whole(message: Scheduled) -> Scheduled:
    return message
