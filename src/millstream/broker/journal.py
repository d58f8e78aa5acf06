"""What the broker must remember about one partition besides its messages: facts, in a log beside it.

A fact belongs to an entity (a queue group, the partition's schedules, its transfers).  Most facts are recorded without
waiting, because losing the last few costs only a repetition: a lost ack means that a message is delivered again.  What
must be on disk before anybody acts on it is recorded durably, together with everything before it, in one batch that is
there as a whole or not at all.

A restart replays the facts of each entity, in order, to whoever claims it.  When the log has grown, the claimants are
asked for the facts that rebuild them; these are written as one batch, and everything before it is removed.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import msgspec
import structlog

from millstream.broker.partition import Partition
from millstream.broker.state import all_batches
from millstream.clock import Clock
from millstream.errors import MillstreamError, StorageFailed
from millstream.records import encode_batch

__all__ = ["EntityFact", "Fact", "Facts", "Journal", "Snapshot"]

_log = structlog.get_logger("millstream.journal")

#: Lists, numbers, text and bytes: whatever msgpack can carry.
Fact: TypeAlias = Any
EntityFact: TypeAlias = tuple[str, Fact]
#: The facts that rebuild an entity.
Snapshot: TypeAlias = Callable[[], Iterable[Fact]]

SEGMENT_BYTES: Final = 16 * 1024 * 1024
#: A snapshot is due when this much was written since the last one, and at least twice as much as it had.
_GROWN_BYTES: Final = 4 * 1024 * 1024
_MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
_RETRY_S: Final = 1.0
#: What waits for a disk that refuses; beyond it the oldest facts are lost, which costs repetitions.
_BUFFER_MAX: Final = 1_000_000
_SNAPSHOT: Final = b"snapshot"
#: The entity of a fact that says nothing, and is there to be waited for.
_NOBODY: Final = ""
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder().decode
_NOTHING: Final = _pack(None)


class Facts:
    """The facts of one entity, in order, as they were written.

    As objects they would take ten times as much memory, and a process never gives back all of what it once had.
    """

    __slots__ = ("_ends", "_written")

    def __init__(self) -> None:
        self._written = bytearray()
        self._ends = array("Q")

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Fact]:
        return map(_unpack, self.packed())

    @property
    def last(self) -> Fact:
        return _unpack(self._packed(len(self._ends) - 1))

    def append(self, packed: bytes) -> None:
        self._written += packed
        self._ends.append(len(self._written))

    def packed(self) -> Iterator[bytes]:
        return map(self._packed, range(len(self._ends)))

    def _packed(self, place: int) -> bytes:
        return bytes(memoryview(self._written)[self._ends[place - 1] if place else 0 : self._ends[place]])


class Journal:
    """The facts of one partition.  All methods are called on the event loop."""

    def __init__(self, partition: Partition, *, clock: Clock, loop: asyncio.AbstractEventLoop, flush_s: float) -> None:
        self.partition = partition
        self._clock = clock
        self._loop = loop
        self._flush_s = flush_s
        self._claims: dict[str, Snapshot] = {}
        self._keys: list[bytes] = []
        self._facts: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot_bytes = 0
        self._written_bytes = 0
        #: Durable facts on their way to the disk: their entities do not know of them yet.
        self._in_flight = 0
        #: Cleared while a snapshot is due: it waits for those facts, and new ones wait for it.
        self._snapped = asyncio.Event()
        self._snapped.set()
        self._unclaimed = self._replay()

    # --- reading back --------------------------------------------------------------------------------------------

    @property
    def entities(self) -> list[str]:
        """Everything that facts are known of."""
        return [*self._claims, *self._unclaimed]

    def claim(self, entity: str, snapshot: Snapshot) -> Facts:
        """Take an entity over: its facts since the last snapshot, in order.  From now on `snapshot` speaks for it."""
        assert entity not in self._claims, f"{entity} is claimed already"
        self._claims[entity] = snapshot
        return self._unclaimed.pop(entity, Facts())

    def unclaimed(self) -> dict[str, Facts]:
        """The facts of everything that nobody has claimed yet; to look at only."""
        return self._unclaimed

    def amend(self, facts: Iterable[EntityFact]) -> None:
        """Add facts to what nobody has claimed yet, on disk when this returns.  Blocks, so it is for rare events."""
        for entity, fact in facts:
            self._unclaimed.setdefault(entity, Facts()).append(_pack(fact))
            self.record(entity, fact)
        self.flush()
        if self.partition.is_durable:
            self.partition.log.sync()

    def forget(self, entity: str) -> None:
        """The entity is no more."""
        self._claims.pop(entity, None)
        self._unclaimed.pop(entity, None)
        self.record(entity, None)

    def _replay(self) -> dict[str, Facts]:
        facts: dict[str, Facts] = {}
        for batch in all_batches(self.partition.log):
            self._written_bytes += batch.header.length
            for key, value in zip(batch.keys() or (), batch.values(), strict=True):
                assert key is not None
                assert value is not None
                if key == _SNAPSHOT:
                    facts = {}
                    self._snapshot_bytes = self._written_bytes = batch.header.length
                    continue
                if value == _NOTHING:
                    facts.pop(key.decode(), None)
                else:
                    facts.setdefault(key.decode(), Facts()).append(value)
        return facts

    # --- writing -------------------------------------------------------------------------------------------------

    def record(self, entity: str, fact: Fact) -> None:
        """Write a fact soon.  Nobody waits for it."""
        self._keys.append(entity.encode())
        self._facts.append(_pack(fact))
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self.flush)

    async def record_durably(self, *facts: EntityFact, holds: bool = False) -> None:
        """Write facts, with all earlier ones, and wait until they are on disk.

        Raises StorageFailed, and then none of these facts counts.  Whoever awaits this acts on the facts at once,
        before it awaits anything else: a snapshot that is taken afterwards must know of them.  With `holds` the entity
        has acted on them already; then they are kept and written later.
        """
        while not self._snapped.is_set():
            await self._snapped.wait()
        keys = [entity.encode() for entity, _ in facts]
        written: asyncio.Future[None] = self._loop.create_future()

        def confirmed(error: MillstreamError | None) -> None:
            if written.done():
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        self._in_flight += 1
        try:
            self._write(keys, [_pack(fact) for _, fact in facts], "group", confirmed, holds=holds)
            await written
        finally:
            self._in_flight -= 1
            if not self._snapped.is_set():
                self._loop.call_soon(self._snapshot)

    async def sync(self) -> None:
        """Wait until everything recorded so far is on disk."""
        if self._facts or not self.partition.is_synced:
            await self.record_durably((_NOBODY, None))

    async def checkpoint(self) -> None:
        """Write a snapshot now; it is on disk when this returns.  Raises StorageFailed."""
        if self.partition.failed is not None:
            raise StorageFailed(self.partition.failed)
        if self._snapped.is_set():
            self._snapped.clear()
            self._snapshot()
        await self._snapped.wait()
        await self.sync()

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._facts:
            self._write([], [], "interval", None)

    def _write(
        self,
        keys: list[bytes],
        facts: list[bytes],
        fsync: str,
        reply: Callable[[MillstreamError | None], None] | None,
        *,
        holds: bool = False,
    ) -> None:
        earlier_keys, earlier_facts = self._keys, self._facts
        self._keys, self._facts = [], []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        def answered(error: MillstreamError | None, _label: int, _base: int, _time: int, _again: bool) -> None:
            if error is not None:
                self._keep(
                    earlier_keys + keys if holds else earlier_keys, earlier_facts + facts if holds else earlier_facts
                )
            if reply is not None:
                reply(error)

        batch = encode_batch(
            [*earlier_facts, *facts], keys=[*earlier_keys, *keys], base_timestamp_us=self._clock.now_us()
        )
        try:
            self.partition.publish(memoryview(batch), fsync=fsync, max_message_bytes=_MESSAGE_BYTES_MAX, reply=answered)
            self.partition.flush()
        except MillstreamError as error:
            answered(error, 0, 0, 0, False)
            return
        self._written_bytes += len(batch)
        if self._written_bytes > max(_GROWN_BYTES, 2 * self._snapshot_bytes) and self._snapped.is_set():
            self._snapped.clear()
            self._loop.call_soon(self._snapshot)

    def _keep(self, keys: list[bytes], facts: list[bytes]) -> None:
        """The disk refused facts that nobody waits for: try again, unless it has failed for good."""
        if self.partition.failed is not None:
            return
        self._keys[:0], self._facts[:0] = keys, facts
        surplus = len(self._facts) - _BUFFER_MAX
        if surplus > 0:
            del self._keys[:surplus], self._facts[:surplus]
            _log.error("facts were lost; messages may be delivered again", directory=self.partition.log.directory)
        if self._timer is None:
            self._timer = self._loop.call_later(_RETRY_S, self.flush)

    # --- snapshots -----------------------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        """Write what rebuilds everything as one batch in a new segment; then what came before can go."""
        if self._in_flight or self._snapped.is_set():
            return  # called again by the last of them
        self.flush()
        self._snapped.set()
        log = self.partition.log
        keys, facts = [_SNAPSHOT], [_NOTHING]
        for entity, known in self._unclaimed.items():
            keys += [entity.encode()] * len(known)
            facts += known.packed()
        for entity, snapshot in self._claims.items():
            made = [_pack(fact) for fact in snapshot()]
            keys += [entity.encode()] * len(made)
            facts += made
        batch = encode_batch(facts, keys=keys, base_timestamp_us=self._clock.now_us())
        self._snapshot_bytes = self._written_bytes = len(batch)

        def written(error: MillstreamError | None, _label: int, base: int, _time: int, _again: bool) -> None:
            if error is not None:
                return  # what came before is still there; the next one is due when as much again was written
            # Not now: this is called from within a commit, whose files must not be removed under it.
            self._loop.call_soon(self._remove_before, base)

        try:
            log.roll()
            self.partition.publish(
                memoryview(batch), fsync="group", max_message_bytes=_MESSAGE_BYTES_MAX, reply=written
            )
            self.partition.flush()
        except MillstreamError as error:
            written(error, 0, 0, 0, False)

    def _remove_before(self, offset: int) -> None:
        if self.partition.failed is None:
            try:
                self.partition.log.delete_before(offset)
            except StorageFailed as error:
                _log.warning("old facts could not be removed", reason=str(error))
