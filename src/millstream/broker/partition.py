"""One partition at run time: sole writer of its log, keeper of what is visible, and of who waits for more.

Publishes are collected while one network read is handled and appended together by `flush`; small ones that wait for the
disk anyway are collected until the next round of syncs.  Each is answered when it is as durable as its policy promises;
readers see a message no earlier than that, so nobody acts on a message that a power cut can take back, unless its topic
says that they need not wait (`visible=written`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import structlog

from millstream.broker.ages import Ages
from millstream.broker.answers import FetchAnswer, FetchHandle, FetchReply, PublishReply, confirm
from millstream.broker.cold import ColdChecks
from millstream.broker.committer import Committer, Syncable
from millstream.broker.incoming import check_storable
from millstream.broker.metrics import Metrics
from millstream.broker.traffic.duplicates import Duplicates, mark_of
from millstream.clock import Clock
from millstream.errors import MillstreamError, OffsetOutOfRange, OutOfSequence, StorageFailed
from millstream.log.partition import Chunk, PartitionLog
from millstream.log.producers import Duplicate, follows
from millstream.log.storage import NotOpened
from millstream.records import PRIORITY_DEFAULT, BatchHeader, Columns

__all__ = ["LABEL_DISK", "LABEL_MEMORY", "LABEL_OS", "Partition"]

_log = structlog.get_logger("millstream.partition")

LABEL_MEMORY: Final = 1
LABEL_OS: Final = 2
LABEL_DISK: Final = 3
_SYNCED: Final = frozenset(("group", "always"))
_EXPIRY: Final = int(Columns.EXPIRY)
_OPTIONS: Final = int(Columns.OPTIONS)
#: Batches of up to this size, and so many of them, are copied to wait for the next round: cheaper than a write each.
_GATHERED_BYTES_MAX: Final = 4096
_GATHERED_MAX: Final = 256
_NORMAL_LANE: Final = 1 << PRIORITY_DEFAULT

#: Submitted, not yet appended: the batch, its header, fsync, whom to answer.
_Pending: TypeAlias = tuple[memoryview, BatchHeader, str, PublishReply | None]
#: Appended, waiting to be durable: base offset, next offset, append time, whom to answer, whether it is a repetition.
_Parked: TypeAlias = tuple[int, int, int, PublishReply | None, bool]


class Partition:
    """The log of one partition with its traffic."""

    def __init__(
        self,
        log: PartitionLog,
        *,
        uid: int,
        committer: Committer | None,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        on_flush_needed: Callable[[Partition], None],
        on_failed: Callable[[Partition, str], None],
        schedules: bool = False,
    ) -> None:
        """Without a committer the log lives in memory and every confirmation says so.

        `schedules`: every message says when it is due.  In an ordinary partition none does.
        """
        self.log = log
        self.uid = uid
        self.high_watermark = log.next_offset
        self.shows_unsynced = False  # whether readers need not wait for the disk, as its topic is set
        #: Called with the old and the new high watermark, whenever more becomes visible.
        self.listeners: list[Callable[[int, int], None]] = []
        #: The same for subscribers.  Set again whenever the partition is opened, so it need not stay open for them.
        self.audience: Callable[[int, int], None] | None = None
        #: Told the due times (us) of a batch for a log of schedules; raises when it may not be taken.
        self.admit: Callable[[list[int]], None] | None = None
        #: Whether what is scheduled at an offset will never be delivered, so that its dedup id is free again.
        self.lapsed: Callable[[int], bool] | None = None
        #: About when its messages were stored.
        self.ages = Ages(log)
        #: Since it was opened: bytes that came in, and messages that went to streams and to subscribers.
        self.bytes_published = self.messages_fetched = self.messages_pushed = 0
        self._opened_at = log.next_offset
        #: Whether any message came with another priority than normal since the partition was opened.
        self.has_lanes = False
        #: Whether any message came with a time of expiry.  Of what an earlier process stored nobody knows.
        self.has_expiry = log.next_offset > log.start_offset
        self._due_column = int(Columns.DELIVER_AT) if schedules else 0
        #: Held by work on the files that runs in a thread (compaction); whoever removes the files waits for it.
        self.maintenance = asyncio.Lock()
        self._committer = committer
        self._clock = clock
        self._loop = loop
        self._metrics = metrics
        self._on_flush_needed = on_flush_needed
        self._on_failed = on_failed
        self._pending: list[_Pending] = []
        #: How many of them are copies; the others are borrowed from the network's buffer.
        self._gathered = 0
        #: The last batch that each producer has among the pending ones.
        self._pending_of: dict[int, BatchHeader] = {}
        self._duplicates: Duplicates | None = None
        #: Dedup ids among the pending batches: where, and how long they count.
        self._pending_marks: dict[bytes, tuple[int, int]] = {}
        self.durable_offset = log.next_offset  # the end of what is on disk
        self._committing = False
        self._awaits_interval = False  # has messages that were confirmed without a sync, which follows
        #: Why everything is refused from now on, once the topic is going away.
        self._gone: MillstreamError | None = None
        self._commit_ended = asyncio.Event()
        self._failure_told = False
        self._cold = ColdChecks(log, loop)
        self._checking = 0  # reads that wait for a cold segment to be checked
        self._parked: deque[_Parked] = deque()
        self._waiters: dict[FetchHandle, None] = {}

    @property
    def failed(self) -> str | None:
        """Why nothing is accepted any more; the log itself knows."""
        return self.log.failure

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything here."""
        busy = self._pending or self._parked or self._waiters or self._committing or self._checking or self.listeners
        busy = busy or (self._duplicates is not None and self._duplicates.is_reading)
        return not busy and not self.maintenance.locked() and self.log.failure is None

    @property
    def messages_published(self) -> int:
        """How many were appended since it was opened."""
        return self.log.next_offset - self._opened_at

    def stored_us(self, offset: int) -> int:
        """About when a message was appended, without a look at the disk."""
        return self.ages.time_us(offset, end=self.log.next_offset, end_us=self.log.last_append_us)

    def pushed(self, messages: int, batch: bytes) -> None:
        """Subscribers have got messages, the first of them in this batch."""
        self.messages_pushed += messages
        took_us = self._clock.now_us() - BatchHeader(batch).append_time_us
        self._metrics.latency.to_subscription.observe(took_us, messages)

    @property
    def invisible(self) -> int:
        """Messages that were taken and that nobody can read yet."""
        pending = sum(header.count for _, header, _, _ in self._pending)
        return self.log.next_offset - self.high_watermark + pending

    @property
    def is_synced(self) -> bool:
        """Whether everything that was appended is as durable as it will ever be."""
        return self._committer is None or self.durable_offset >= self.log.next_offset

    @property
    def unsynced(self) -> bool:
        return self._awaits_interval and self.log.failure is None

    @property
    def is_durable(self) -> bool:
        return self._committer is not None

    # --- publish -------------------------------------------------------------------------------------------------

    def publish(
        self,
        batch: memoryview,
        *,
        fsync: str,
        max_message_bytes: int,
        reply: PublishReply | None,
        dedup_window_ms: int | None = None,
        admitted: bool = False,
        flushes: bool = False,
    ) -> None:
        """Take a batch as it came from a producer; the buffer is borrowed until `flush`.

        `dedup_window_ms`: None for what the broker appends itself.  `admitted`: whether it may be scheduled was asked
        before.  `flushes`: the caller does, at once; others are not asked to, or the list of what they have to flush
        would grow where nobody publishes.  Raises MillstreamError when the batch can never be stored; then `reply` is
        not called.
        """
        header, due_us = self.check(batch, max_message_bytes)
        if header.priorities != _NORMAL_LANE:
            self.has_lanes = True
        if header.flags & _EXPIRY:
            self.has_expiry = True
        producer = header.producer
        if producer:
            before = self._pending_of.get(producer)
            if before is not None and not follows(header, before):
                self.flush()  # it may be a repetition of what waits: then that has an offset
                before = None
            try:
                duplicate = self.log.producers.check(header, before)
            except OutOfSequence:
                # A repetition by its id has used up its number without being stored, which a restart forgets.
                passed = header.flags & _OPTIONS and self.log.producers.has_passed(header)
                if not passed or not self._known(batch, header, dedup_window_ms, fsync, reply):
                    raise
                return
            if duplicate is not None:
                self._repeat(header, duplicate, fsync, reply)
                return
        if header.flags & _OPTIONS and self._known(batch, header, dedup_window_ms, fsync, reply):
            return
        if due_us is not None and self.admit is not None and not admitted:
            self._admit(due_us)
        if producer:
            self._pending_of[producer] = header
        if not flushes and len(self._pending) == self._gathered:
            self._on_flush_needed(self)
        self._pending.append((batch, header, fsync, reply))

    def check(self, batch: memoryview, max_message_bytes: int) -> tuple[BatchHeader, list[int] | None]:
        """Look whether a batch could be stored here: its header, and when its messages are due if that is asked.

        Raises MillstreamError.
        """
        if self.log.failure is not None:
            raise self._gone or StorageFailed(self.log.failure)
        return check_storable(batch, max_message_bytes, self._due_column)

    def _admit(self, due_us: list[int]) -> None:
        """Raise if what is scheduled is beyond the limits.  Not asked of a repetition: that is stored already."""
        assert self.admit is not None
        try:
            self.admit(due_us)
        except MillstreamError:
            # Its dedup id is free again, or the next try would be taken for a repetition.
            waiting = len(self._pending)
            self._pending_marks = {mark: it for mark, it in self._pending_marks.items() if it[0] < waiting}
            raise

    def _known(
        self, batch: memoryview, header: BatchHeader, window_ms: int | None, fsync: str, reply: PublishReply | None
    ) -> bool:
        """Whether a message with the same dedup id is stored, which then is the answer."""
        if window_ms is None or (mark := mark_of(batch, header, window_ms)) is None:
            return False
        now_us, window_us = self._clock.now_us(), window_ms * 1000
        if mark in self._pending_marks:
            self.flush()  # then it has an offset
        seen = self.duplicates(window_ms).find(mark, now_us=now_us, window_us=window_us)
        passed = bool(header.producer) and self.log.producers.has_passed(header)
        if seen is None:
            if not passed:
                self._pending_marks[mark] = (len(self._pending), window_us)
            return False
        if header.producer and not passed:
            # Its number is used up, or the producer's next batch would come out of sequence.
            if header.producer in self._pending_of:
                self.flush()
            self.log.producers.record(header, seen.offset, seen.append_time_us)
        self._repeat(header, Duplicate(seen.offset, seen.append_time_us), fsync, reply)
        return True

    def duplicates(self, window_ms: int) -> Duplicates:
        """The dedup ids seen here; reading them begins with the first one who asks."""
        if self._duplicates is None:
            self._duplicates = Duplicates(self, self._loop, now_us=self._clock.now_us(), window_us=window_ms * 1000)
        return self._duplicates

    def flush(self) -> None:
        """Append everything that was published since the last flush, in one write."""
        if self._pending:
            self._append_pending(commits=True)

    def flush_in_time(self) -> None:
        """Give borrowed buffers back.  Small publishes that wait for the disk share a write as well as a sync."""
        pending = self._pending
        if len(pending) == self._gathered:
            return
        if self._committer is None or self.shows_unsynced or len(pending) > _GATHERED_MAX:
            self.flush()
            return
        for at in range(self._gathered, len(pending)):
            batch, header, fsync, reply = pending[at]
            if fsync not in _SYNCED or header.length > _GATHERED_BYTES_MAX:
                self.flush()
                return
            pending[at] = (memoryview(bytearray(batch)), header, fsync, reply)
        self._gathered = len(pending)
        self._committer.request(self)

    def _append_pending(self, *, commits: bool) -> None:
        """`commits`: a commit is asked for if somebody waits for one; otherwise one has begun."""
        pending, self._pending, self._gathered = self._pending, [], 0
        log = self.log
        self._pending_of.clear()
        marks, self._pending_marks = self._pending_marks, {}
        bytes_before, before_us = log.size_bytes, log.last_append_us
        try:
            first = log.append([p[0] for p in pending], [p[1].count for p in pending], self._clock.now_us())
        except StorageFailed as error:
            self._refuse(pending, error)
            return
        except Exception as error:
            self.log.fail(f"the log failed in a way it does not know: {error!r}")
            self._refuse(pending, StorageFailed(str(self.log.failure)))
            raise
        append_time_us = log.last_append_us
        if marks and self._duplicates is not None:
            self._duplicates.remember(marks, [p[1].count for p in pending], first, append_time_us)
        if append_time_us >= self.ages.due_us:
            self.ages.note(first, append_time_us, before_us)
        sync_asked = False
        at_once = 0  # messages that are confirmed without waiting for the disk
        committer = self._committer
        base = first
        for _, header, fsync, reply in pending:
            end = base + header.count
            if header.producer:
                log.producers.record(header, base, append_time_us)
            if committer is None:
                at_once += header.count
                if reply is not None:
                    reply(None, LABEL_MEMORY, base, append_time_us, False)
            elif fsync in _SYNCED:
                sync_asked = True
                self._parked.append((base, end, append_time_us, reply, False))
            else:
                at_once += header.count
                if fsync == "interval" or log.is_crowded:
                    self._sync_later()
                if reply is not None:
                    reply(None, LABEL_OS, base, append_time_us, False)
            base = end
        metrics = self._metrics
        metrics.batches_published += len(pending)
        metrics.messages_published += base - first
        size = log.size_bytes - bytes_before
        metrics.bytes_published += size
        self.bytes_published += size
        if at_once:
            metrics.latency.publish.observe(self._clock.now_us() - append_time_us, at_once)
        if committer is None and log.seals_pending:
            log.sync()
        # First: who is told may fail.  A full segment is sealed under every policy, which bounds recovery and memory.
        if commits and committer is not None and (sync_asked or log.seals_pending):
            committer.request(self)
        if self.shows_unsynced or not self._parked:
            self._advance(log.next_offset)

    def _sync_later(self) -> None:
        if self._committer is not None and not self._awaits_interval:
            self._awaits_interval = True
            self._committer.request_later(self)

    def _refuse(self, pending: Sequence[_Pending], error: MillstreamError) -> None:
        """Nothing was stored; say so."""
        self._metrics.publish_failures += len(pending)
        if self.log.failure is not None:
            self.fail(self.log.failure)
        for _, _, _, reply in pending:
            if reply is not None:
                reply(error, 0, 0, 0, False)

    def _repeat(self, header: BatchHeader, stored: Duplicate, fsync: str, reply: PublishReply | None) -> None:
        """Answer a batch that is stored already, when it is durable."""
        self._metrics.duplicates += 1
        if reply is None:
            return
        (base, append_time_us), parked, committer = stored, self._parked, self._committer
        end = base + header.count
        label = LABEL_MEMORY if committer is None else LABEL_DISK if end <= self.durable_offset else LABEL_OS
        asks = label == LABEL_OS and fsync in _SYNCED
        if asks or (parked and end > parked[0][0]):
            # The original is on its way to the disk, or is sent there now: this answer must not overtake it.
            parked.append((base, max(end, parked[-1][1]) if parked else end, append_time_us, reply, True))
            if asks and committer is not None:
                committer.request(self)
            return
        reply(None, label, base, append_time_us, True)

    # --- the end -------------------------------------------------------------------------------------------------

    async def retire(self, error: MillstreamError) -> None:
        """Let go of the log: everybody gets this error from now on, and no thread uses its files any more."""
        self._gone = error
        self.log.fail(str(error))
        self.cancel_all(error)
        self._refuse_parked(error)
        pending, self._pending, self._gathered = self._pending, [], 0
        self._refuse(pending, error)
        async with self.maintenance:
            while self._committing:
                self._commit_ended.clear()
                await self._commit_ended.wait()
            self.log.abandon()

    # --- commit --------------------------------------------------------------------------------------------------

    def begin_commit(self) -> tuple[Sequence[Syncable], int]:
        if self._pending:
            try:
                self._append_pending(commits=False)
            except Exception:  # the log has failed and says so; the other partitions of the round have not
                _log.exception("a log failed", log=self.log.directory)
        self._awaits_interval = False
        self._committing = True
        return self.log.dirty_files(), self.log.next_offset

    def end_commit(self, durable_to: int, error: Exception | None) -> int:
        self._committing = False
        self._commit_ended.set()
        if isinstance(error, NotOpened) and self.log.failure is None:
            # Too many open files, mostly.  Everybody waits, and it is tried again.
            self.log.put_off()
            self._awaits_interval = True
            if self._committer is not None:
                self._committer.request_again(self)
            return 0
        if error is not None:
            problem = getattr(error, "strerror", None) or repr(error)
            self.fail(f"the disk failed to sync ({problem}); what was not confirmed is in doubt")
        if self.log.failure is not None:
            # Also when this round went well: a log that failed meanwhile handed out nothing to sync.
            self.fail(self.log.failure)
            return 0
        self.log.mark_durable(durable_to)
        self.durable_offset = durable_to
        parked, stored = self._parked, []
        while parked and parked[0][1] <= durable_to:
            stored.append(parked.popleft())
        try:
            # Readers first: who waits for a message waits for it longer than its publisher for the confirmation.
            self._advance(parked[0][0] if parked else self.log.next_offset)
        finally:
            now_us, observe = self._clock.now_us(), self._metrics.latency.publish.observe
            for base, end, append_time_us, reply, duplicate in stored:
                if not duplicate:
                    observe(now_us - append_time_us, end - base)
                if reply is not None:
                    reply(None, LABEL_DISK, base, append_time_us, duplicate)
        return len(stored)

    def note_durable(self) -> None:
        self.log.note_durable()

    async def append_durably(self, batch: bytearray) -> int:
        """Store a batch of the broker's own; its first offset, once it is on disk.  Raises as `publish`."""
        return (await self._append([batch], admitted=False))[0]

    async def append_moved(self, batches: Sequence[bytearray]) -> list[int]:
        """The same for messages that were taken in elsewhere; in one write, and nothing comes between them."""
        return await self._append(batches, admitted=True)

    async def _append(self, batches: Sequence[bytearray], *, admitted: bool) -> list[int]:
        stored: list[asyncio.Future[int]] = []
        try:
            for batch in batches:
                future: asyncio.Future[int] = self._loop.create_future()
                view, reply = memoryview(batch), partial(confirm, future)
                self.publish(
                    view, fsync="group", max_message_bytes=len(batch), reply=reply, admitted=admitted, flushes=True
                )
                stored.append(future)
        finally:
            self.flush()
        return await asyncio.gather(*stored)

    async def sync(self) -> None:
        """Wait until everything appended so far is on disk, whatever its publishers were promised.

        Raises StorageFailed.
        """
        self.flush()
        if self.failed is not None:
            raise StorageFailed(self.failed)
        if self._committer is None:
            self.log.sync()  # in memory, where that costs nothing
            return
        if self.is_synced and not self.log.seals_pending:
            return
        done: asyncio.Future[int] = self._loop.create_future()
        # In line with the publishes that wait for the disk, as one without messages.
        end = self.log.next_offset
        self._parked.append((end, end, self.log.last_append_us, partial(confirm, done), False))
        self._committer.request(self)
        await done

    def fail(self, reason: str) -> None:
        """Stop confirming.  Repeating a failed sync proves nothing; only recovery can tell what is on the disk."""
        self.log.fail(reason)
        if not self._failure_told and self._gone is None:
            self._failure_told = True
            self._on_failed(self, reason)
        self._refuse_parked(StorageFailed(reason))

    def _refuse_parked(self, error: MillstreamError) -> None:
        parked, self._parked = self._parked, deque()
        self._metrics.publish_failures += len(parked)
        for _, _, _, reply, _ in parked:
            if reply is not None:
                reply(error, 0, 0, 0, False)

    # --- fetch ---------------------------------------------------------------------------------------------------

    def fetch(self, offset: int, max_bytes: int, wait_ms: int, reply: FetchReply) -> FetchHandle | None:
        """Answer with data now, or wait until there is some; the handle cancels the wait."""
        if self._gone is not None:
            raise self._gone
        if offset < self.high_watermark:
            self._read(offset, max_bytes, reply)
            return None
        if offset > self.log.next_offset:
            raise OffsetOutOfRange(f"offset {offset} is after the end of the log at {self.log.next_offset}")
        if wait_ms <= 0:
            self._answer(Chunk([], offset, None), reply)
            return None
        waiter = FetchHandle(self, offset, max_bytes, reply)
        waiter.timer = self._loop.call_later(wait_ms / 1000, self._time_out, waiter)
        self._waiters[waiter] = None
        return waiter

    def forget(self, waiter: FetchHandle) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._waiters.pop(waiter, None)

    def cancel_all(self, error: MillstreamError) -> None:
        """End every waiting fetch, because the topic goes away or the broker stops."""
        for waiter in list(self._waiters):
            self.forget(waiter)
            waiter.reply(error)

    def _time_out(self, waiter: FetchHandle) -> None:
        self._waiters.pop(waiter, None)
        self._answer(Chunk([], waiter.offset, None), waiter.reply)

    def _read(self, offset: int, max_bytes: int, reply: FetchReply) -> None:
        log = self.log
        cold = log.cold_segment(offset)
        if cold is not None:
            # Never served since the broker started: checked as a whole first, away from the loop.
            self._checking += 1
            self._cold.check(cold).add_done_callback(lambda done: self._checked(done, offset, max_bytes, reply))
            return
        try:
            chunk = log.read(offset, max_bytes, before=self.high_watermark)
        except MillstreamError as error:
            reply(error)
        except OSError as error:
            reply(StorageFailed(f"the log cannot be read: {error}"))
        else:
            if chunk.buffers:
                messages = chunk.next_offset - offset
                self.messages_fetched += messages
                born_us = BatchHeader(chunk.buffers[0]).append_time_us
                self._metrics.latency.to_stream.observe(self._clock.now_us() - born_us, messages)
            self._answer(chunk, reply)

    def _checked(
        self, done: asyncio.Future[StorageFailed | None], offset: int, max_bytes: int, reply: FetchReply
    ) -> None:
        """Go on with a fetch that had to wait for the check of a cold segment."""
        self._checking -= 1
        error = self._gone or done.result()
        if error is not None:
            reply(error)
        else:
            self._read(offset, max_bytes, reply)

    async def warm(self, offset: int) -> None:
        """Have the segment of an offset checked, away from the loop, so that it can be read without blocking.

        Raises StorageFailed when it cannot be read at all.
        """
        while (cold := self.log.cold_segment(offset)) is not None and self._gone is None:
            self._checking += 1
            try:
                error = await asyncio.shield(self._cold.check(cold))  # others may wait for the same
            finally:
                self._checking -= 1
            if error is not None:
                raise error

    def _answer(self, chunk: Chunk, reply: FetchReply) -> None:
        reply(FetchAnswer(chunk.buffers, chunk.next_offset, self.high_watermark, self.log.start_offset, chunk.damaged))

    def _advance(self, high_watermark: int) -> None:
        if high_watermark <= self.high_watermark:
            return
        before, self.high_watermark = self.high_watermark, high_watermark
        for listener in self.listeners:
            listener(before, high_watermark)
        if self.audience is not None:
            self.audience(before, high_watermark)
        if self._waiters:
            for waiter in [waiter for waiter in self._waiters if waiter.offset < high_watermark]:
                self.forget(waiter)
                self._read(waiter.offset, waiter.max_bytes, waiter.reply)
