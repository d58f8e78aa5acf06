"""What the broker must remember about one partition besides its messages: facts, in a log beside it.

A fact belongs to an entity (a queue group, the partition's schedules, its transfers).  Most facts are recorded without
waiting, because losing the last few costs only a repetition: a lost ack means that a message is delivered again.  What
must be on disk before anybody acts on it is recorded durably, together with everything before it, in one batch that is
there as a whole or not at all.

A restart replays the facts of each entity, in order, to whoever claims it.  When the log has grown, a snapshot is
taken: the claimants are asked for the facts that rebuild them, these are written together, and everything before them
is removed.  A snapshot that does not fit into one batch is written as several, each with its number and their count,
and is ignored in replay unless the last of them is there.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import structlog

from millstream.broker.answers import PublishReply
from millstream.broker.partition import Partition
from millstream.broker.state import all_batches
from millstream.broker.vocabulary import check_fact
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
#: A batch gets so many facts and about so many bytes of them: half of what it may have, as those that are waited for
#: come on top and stay together.
_BATCH_FACTS: Final = 50_000
_BATCH_BYTES: Final = 16 * 1024 * 1024
_RETRY_S: Final = 1.0
#: What waits for a disk that refuses; beyond it the oldest facts are lost, which costs repetitions.
_BUFFER_MAX: Final = 1_000_000
_SNAPSHOT: Final = b"snapshot"
#: The entity of a fact that says nothing, and is there to be waited for.
_NOBODY: Final = ""
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder().decode
_NOTHING: Final = _pack(None)


#: Facts for one batch, with the entity of each.
_Part: TypeAlias = tuple[list[bytes], list[bytes]]


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
    """The facts of one partition.  All methods are called on the event loop.

    Raises NewerData when it is made and there are facts that only a newer version understands.
    """

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
        #: Entities with something that could not be written down and is not on disk: after a restart they do not know
        #: of it.  Why not, by their names.
        self.unwritten: dict[str, str] = {}
        try:
            self._unclaimed = self._replay()
        except BaseException:  # nobody would close it; the next one who asks opens it again
            partition.log.close()
            raise

    # --- reading back --------------------------------------------------------------------------------------------

    @property
    def entities(self) -> list[str]:
        """The names of all entities, claimed or not."""
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
        """Add facts to what nobody has claimed yet, on disk when this returns.  Blocks, so it is for rare events.

        Raises StorageFailed.  Then the claimants will not be told of these facts; call it again.
        """
        facts = list(facts)
        for entity, fact in facts:
            self.record(entity, fact)
        self.flush()
        if self._facts or self.partition.failed is not None:
            raise StorageFailed(f"the journal {self.partition.log.directory} cannot be written")
        if self.partition.is_durable:
            self.partition.log.sync()
        for entity, fact in facts:
            self._unclaimed.setdefault(entity, Facts()).append(_pack(fact))

    def forget(self, entity: str) -> None:
        """Remove an entity and all that is known of it."""
        self._claims.pop(entity, None)
        self._unclaimed.pop(entity, None)
        self.unwritten.pop(entity, None)
        self.record(entity, None)

    def _replay(self) -> dict[str, Facts]:
        facts: dict[str, Facts] = {}
        snapshot: dict[str, Facts] = {}  # the one that is being read, until its last batch has come
        snapshot_bytes = 0
        directory = self.partition.log.directory
        for batch in all_batches(self.partition.log):
            self._written_bytes += batch.header.length
            into, ends = facts, False
            for key, value in zip(batch.keys() or (), batch.values(), strict=True):
                assert key is not None
                assert value is not None
                if key == _SNAPSHOT:
                    place, count = (0, 1) if value == _NOTHING else _unpack(value)
                    if place == 0:
                        snapshot, snapshot_bytes = {}, 0
                    snapshot_bytes += batch.header.length
                    into, ends = snapshot, place == count - 1
                elif value == _NOTHING:
                    into.pop(key.decode(), None)
                else:
                    entity = key.decode()
                    check_fact(directory, entity, value)
                    into.setdefault(entity, Facts()).append(value)
            if ends:
                facts, snapshot = snapshot, {}
                self._snapshot_bytes = self._written_bytes = snapshot_bytes
        return facts

    # --- writing -------------------------------------------------------------------------------------------------

    def record(self, entity: str, fact: Fact) -> None:
        """Write a fact soon.  Nobody waits for it.  One that cannot be written stops none of the others."""
        packed = self._packed(entity, fact)
        if packed is None:
            return
        self._keys.append(entity.encode())
        self._facts.append(packed)
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self.flush)

    async def ready(self) -> None:
        """Wait until `record_durably` would write at once, and not wait for a snapshot that is due.

        For callers whose facts may be void after a wait: await this, look whether they still hold, and record them
        before awaiting anything else.
        """
        while not self._snapped.is_set():
            await self._snapped.wait()

    async def record_durably(self, *facts: EntityFact, holds: bool = False) -> None:
        """Write facts, with all earlier ones, and wait until they are on disk.

        Raises StorageFailed, and then none of these facts counts.  Whoever awaits this acts on the facts at once,
        before it awaits anything else: a snapshot that is taken afterwards must know of them.  With `holds` the entity
        has acted on them already; then they are kept and written later, those of them that can be.
        """
        await self.ready()
        packed = [(entity, known) for entity, fact in facts if (known := self._packed(entity, fact)) is not None]
        if len(packed) < len(facts) and not holds:
            raise StorageFailed("a fact cannot be written; the broker's log says why")
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
            keys = [entity.encode() for entity, _ in packed]
            self._write(keys, [known for _, known in packed], "group", confirmed, holds=holds)
            await written
        finally:
            self._in_flight -= 1
            if not self._snapped.is_set():
                self._loop.call_soon(self._snapshot)
        if len(packed) < len(facts):
            raise StorageFailed("a fact cannot be written; the broker's log says why")

    def _packed(self, entity: str, fact: Fact) -> bytes | None:
        """A fact as it is written; None, and a note in `unwritten`, if it cannot be: a number beyond 64 bits, say."""
        try:
            return _pack(fact)
        except Exception as error:  # whatever it is, others have facts that can be written
            self.cannot_write(entity, error)
            return None

    def cannot_write(self, entity: str, error: Exception) -> None:
        """Note that something an entity knows could not be written, and will be forgotten by a restart."""
        if entity not in self.unwritten:
            _log.error(
                "facts cannot be written; after a restart messages may be delivered again",
                directory=self.partition.log.directory,
                entity=entity,
                exc_info=error,
            )
        self.unwritten[entity] = repr(error)

    async def sync(self) -> None:
        """Wait until everything recorded so far is on disk.  Raises StorageFailed."""
        if self._facts or not self.partition.is_synced or self.partition.failed is not None:
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

        *before, (last_keys, last_facts) = _parts(earlier_keys, earlier_facts)
        # What is waited for is there as a whole or not at all, so it is never cut.
        parts = [*before, (last_keys + keys, last_facts + facts)]
        try:
            self._written_bytes += self._append(parts, fsync, answered)
        except MillstreamError as error:
            answered(error, 0, 0, 0, False)
            return
        except Exception as error:  # also what nobody foresaw must not take facts with it; twice does no harm
            _log.error("a journal cannot be written", directory=self.partition.log.directory, exc_info=error)
            answered(StorageFailed(f"a journal cannot be written: {error!r}"), 0, 0, 0, False)
            return
        if self._written_bytes > max(_GROWN_BYTES, 2 * self._snapshot_bytes) and self._snapped.is_set():
            self._snapped.clear()
            self._loop.call_soon(self._snapshot)

    def _append(self, parts: Sequence[_Part], fsync: str, reply: PublishReply) -> int:
        """Write a batch for each part, all in one write; how many bytes they have.  The reply is that of the last."""
        batches = [encode_batch(facts, keys=keys, base_timestamp_us=self._clock.now_us()) for keys, facts in parts]
        try:
            for place, batch in enumerate(batches, 1):
                self.partition.publish(
                    memoryview(batch),
                    fsync=fsync,
                    max_message_bytes=_MESSAGE_BYTES_MAX,
                    reply=reply if place == len(batches) else None,
                    flushes=True,
                )
        finally:
            self.partition.flush()
        return sum(map(len, batches))

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
        """Write what rebuilds everything into a new segment; then what came before can go."""
        if self._in_flight or self._snapped.is_set():
            return  # called again by the last of them
        self.flush()
        self._snapped.set()
        log = self.partition.log
        keys: list[bytes] = []
        facts: list[bytes] = []
        for entity, known in self._unclaimed.items():
            keys += [entity.encode()] * len(known)
            facts += known.packed()
        for entity, snapshot in self._claims.items():
            try:
                made = [_pack(fact) for fact in snapshot()]
            except Exception as error:  # without it all that is known of it would go; so nothing goes for now
                self.cannot_write(entity, error)
                self._snapshot_bytes = self._written_bytes  # not again before as much was written
                return
            keys += [entity.encode()] * len(made)
            facts += made
        parts = _parts(keys, facts)
        numbers = [_pack((place, len(parts))) for place in range(len(parts))] if len(parts) > 1 else [_NOTHING]
        parts = [([_SNAPSHOT, *keys], [number, *facts]) for number, (keys, facts) in zip(numbers, parts, strict=True)]
        # Before it is tried: after a refusal the next one is due when as much again was written.
        self._snapshot_bytes = self._written_bytes = sum(map(len, keys)) + sum(map(len, facts))
        first = log.next_offset
        spoken_for = list(self.unwritten)  # all that these entities know is in it

        def written(error: MillstreamError | None, _label: int, _base: int, _time: int, _again: bool) -> None:
            if error is not None:
                _log.warning("facts could not be written anew; what came before stays", reason=str(error))
                return
            for entity in spoken_for:
                self.unwritten.pop(entity, None)
            # Not now: this is called from within a commit, whose files must not be removed under it.
            self._loop.call_soon(self._remove_before, first)

        try:
            log.roll()
            self._snapshot_bytes = self._written_bytes = self._append(parts, "group", written)
        except MillstreamError as error:
            written(error, 0, 0, 0, False)

    def _remove_before(self, offset: int) -> None:
        if self.partition.failed is None:
            try:
                self.partition.log.delete_before(offset)
            except StorageFailed as error:
                _log.warning("old facts could not be removed", reason=str(error))


def _parts(keys: list[bytes], facts: list[bytes]) -> list[_Part]:
    """Cut facts, in their order, to what a batch takes; one part at least."""
    if len(facts) <= _BATCH_FACTS and sum(map(len, facts)) <= _BATCH_BYTES:
        return [(keys, facts)]
    parts: list[_Part] = []
    start = size = 0
    for place, fact in enumerate(facts):
        if place > start and (size + len(fact) > _BATCH_BYTES or place - start == _BATCH_FACTS):
            parts.append((keys[start:place], facts[start:place]))
            start, size = place, 0
        size += len(fact)
    parts.append((keys[start:], facts[start:]))
    return parts
