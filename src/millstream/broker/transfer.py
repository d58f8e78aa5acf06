"""Moving messages to another partition, exactly once.

A move is an intent in the journal of the partition it starts from: the batch, where it goes, and the identity (producer
and sequence) it is appended with.  Whatever else the move means (these messages are dead, those have fired) is recorded
in the same write.  Then the batch is appended.  A crash in between leaves the intent, and the restart appends it again
with the same identity, which the target recognises if it has it already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import structlog

from millstream.broker.background import to_its_end
from millstream.broker.journal import EntityFact, Fact, Journal
from millstream.broker.partition import Partition
from millstream.errors import MillstreamError, OutOfSequence, ProducerFenced, RequestError, TopicNotFound
from millstream.records import BatchHeader, assign_producer

__all__ = ["Remake", "Target", "Transfer", "deliver"]

_log = structlog.get_logger("millstream.transfer")

_ENTITY: Final = "transfers"
_SEQUENCE: Final = 0xFFFF_FFFF
_RETRY_S_FIRST: Final = 0.05
_RETRY_S_MAX: Final = 5.0


class Target(NamedTuple):
    namespace: str
    topic: str
    partition: int


#: Makes a target again whose topic was deleted, for this batch.  Raises TopicNotFound when nothing is lost without it.
Remake: TypeAlias = Callable[[Target, bytes | bytearray], Awaitable[None]]


async def deliver(
    resolve: Callable[[Target], Partition],
    target: Target,
    batches: Sequence[bytearray],
    *,
    remake: Remake | None = None,
) -> Sequence[int]:
    """Append batches with their identities, trying again until the partition has each of them exactly once.

    Returns their first offsets; -1 for a batch that was stored before, at a place that is not known any more.  Raises
    the target's error when it will never take them.
    """
    wait_s = _RETRY_S_FIRST
    is_gone = False
    while True:
        try:
            if is_gone and remake is not None:
                await remake(target, batches[0])
                is_gone = False
            partition = resolve(target)
            past = [partition.log.producers.is_past(BatchHeader(batch)) for batch in batches]
            new = iter(
                await partition.append_moved([batch for batch, old in zip(batches, past, strict=True) if not old])
            )
            return [-1 if old else next(new) for old in past]
        except (OutOfSequence, ProducerFenced) as error:
            # The target does not know our last sequence: damage on its disk took it.  Without an identity a batch may
            # be stored twice, which is better than never; those that the target knows it has are not sent again.
            _log.warning("a move goes without its identity", target=str(target), reason=str(error))
            for batch in batches:
                if not _has(partition, batch):
                    assign_producer(batch, 0, 0)
        except RequestError as error:
            if isinstance(error, TopicNotFound) and remake is not None and not is_gone:
                is_gone = True
                continue
            # The topic was deleted, or became smaller: there is nowhere to go any more.
            _log.error("a move was given up", target=str(target), reason=str(error))
            raise
        except MillstreamError as error:
            _log.warning("a move waits", target=str(target), reason=str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_S_MAX, wait_s * 2)


def _has(partition: Partition, batch: bytearray) -> bool:
    producers, header = partition.log.producers, BatchHeader(batch)
    try:
        return producers.is_past(header) or producers.check(header) is not None
    except (OutOfSequence, ProducerFenced):
        return False


@dataclass(frozen=True, slots=True)
class _Intent:
    target: Target
    batch: bytes


class _Turn(asyncio.Lock):
    """One move at a time reaches a target, so that sequences arrive in order."""

    #: Moves that have it or wait for it.
    moves = 0


class Transfer:
    """The moves that start from one partition."""

    def __init__(
        self,
        journal: Journal,
        *,
        resolve: Callable[[Target], Partition],
        exists: Callable[[Target], bool],
        new_producer: Callable[[], Awaitable[int]],
        remake: Remake | None = None,
    ) -> None:
        self._journal = journal
        self._resolve = resolve
        self._exists = exists
        self._new_producer = new_producer
        self._remake = remake
        self._producer = 0
        self._number = 0
        self._intents: dict[int, _Intent] = {}
        self._sequences: dict[Target, int] = {}
        self._turns: dict[Target, _Turn] = {}
        self._naming = asyncio.Lock()
        for fact in journal.claim(_ENTITY, self._snapshot):
            self._apply(fact)

    @property
    def undone(self) -> int:
        """How many moves are recorded and not finished."""
        return len(self._intents)

    async def move(
        self,
        target: Target,
        batch: bytearray,
        facts: Iterable[EntityFact] = (),
        *,
        on_recorded: Callable[[], None] | None = None,
    ) -> int:
        """Append a batch (as encode_batch makes it) to another partition; returns its first offset there.

        `facts` are recorded in the same write as the intent; they are iterated only then, after earlier moves.
        `on_recorded` is called when both are on disk: from there on the move will be finished, also after a crash.  A
        cancellation takes effect no earlier than that.  Raises StorageFailed when they could not be recorded, and the
        target's error when it will never take the batch.
        """
        async with self._turn(target):
            if not self._producer:
                await self._name()
            for earlier in [number for number, intent in self._intents.items() if intent.target == target]:
                # A crash has cut it short; its sequence comes before ours.
                with contextlib.suppress(RequestError):
                    await self._finish(earlier)
            first = self._sequences.get(target, 0)
            assign_producer(batch, self._producer << 16, first)
            self._number += 1
            number = self._number
            intent: Fact = ["intent", number, *target, first, bytes(batch)]
            await to_its_end(self._intend(intent, facts, on_recorded))
            return await self._finish(number)

    async def _intend(self, intent: Fact, facts: Iterable[EntityFact], on_recorded: Callable[[], None] | None) -> None:
        await self._journal.ready()
        await self._journal.record_durably(*facts, (_ENTITY, intent))
        self._apply(intent)
        if on_recorded is not None:
            on_recorded()

    async def recover(self) -> None:
        """Finish what a crash has interrupted, for all targets side by side."""
        targets = dict.fromkeys(intent.target for intent in self._intents.values())
        await asyncio.gather(*(self._recover(target) for target in targets))

    async def _recover(self, target: Target) -> None:
        for number in [number for number, intent in self._intents.items() if intent.target == target]:
            try:
                async with self._turn(target):
                    if number in self._intents:  # otherwise somebody else saw to it meanwhile
                        await self._finish(number)
            except RequestError as error:
                _log.error("a move could not be finished", reason=str(error))

    @contextlib.asynccontextmanager
    async def _turn(self, target: Target) -> AsyncIterator[None]:
        turn = self._turns.setdefault(target, _Turn())
        turn.moves += 1
        try:
            async with turn:
                yield
        finally:
            turn.moves -= 1
            if not turn.moves:
                del self._turns[target]

    async def _name(self) -> None:
        async with self._naming:
            if not self._producer:
                fact = ["producer", await self._new_producer()]
                await self._journal.record_durably((_ENTITY, fact))
                self._apply(fact)

    async def _finish(self, number: int) -> int:
        intent = self._intents[number]
        try:
            (base,) = await deliver(self._resolve, intent.target, [bytearray(intent.batch)], remake=self._remake)
        except RequestError:
            self._done(number)
            raise
        self._done(number)
        return base

    def _done(self, number: int) -> None:
        fact = ["done", number]
        self._apply(fact)
        self._journal.record(_ENTITY, fact)

    # --- facts ---------------------------------------------------------------------------------------------------

    def _apply(self, fact: Fact) -> None:
        kind, *rest = fact
        if kind == "producer":
            (self._producer,) = rest
        elif kind == "intent":
            number, namespace, topic, partition, first, batch = rest
            target = Target(namespace, topic, partition)
            self._intents[number] = _Intent(target, batch)
            self._sequences[target] = (first + BatchHeader(batch).count) & _SEQUENCE
            self._number = max(self._number, number)
        elif kind == "done":
            self._intents.pop(rest[0], None)
        elif kind == "next":
            namespace, topic, partition, first = rest
            self._sequences[Target(namespace, topic, partition)] = first

    def _snapshot(self) -> Iterable[Fact]:
        if self._producer:
            yield ["producer", self._producer]
        # A topic that is made again under the same name has never heard of this producer.
        self._sequences = {target: first for target, first in self._sequences.items() if self._exists(target)}
        for target, first in self._sequences.items():
            yield ["next", *target, first]
        for number, intent in self._intents.items():
            yield ["intent", number, *intent.target, BatchHeader(intent.batch).first_sequence, intent.batch]
