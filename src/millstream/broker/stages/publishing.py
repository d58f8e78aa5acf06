"""Moving a batch from its stages to its topics.

What is to be published was recorded before; this can be done again from the start after a crash, as often as need be.
Every message goes with the same identity each time, by which its target tells what it has already (see transfer.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Final

import structlog

from millstream.broker.partition import Partition
from millstream.broker.stages.query import Query
from millstream.broker.stages.stage import Stage, Staged
from millstream.broker.transfer import Target, deliver
from millstream.errors import MillstreamError, RequestError
from millstream.records import BatchHeader, assign_producer
from millstream.wire.stage_calls import StagedOffsets

__all__ = ["messages_by_target", "move_all", "target_key", "topic_of"]

_log = structlog.get_logger("millstream.stages")

_SEQUENCE: Final = 0xFFFF_FFFF
#: Targets that are written to at the same time; for each, what is written at once, and how often before the disk has
#: confirmed it.  All of this is in memory meanwhile.
_ABREAST: Final = 4
_ROUND_BYTES: Final = 4 * 1024 * 1024
_UNCONFIRMED: Final = 3


def target_key(topic: str, partition: int) -> str:
    return f"{topic}/{partition}"


def topic_of(key: str) -> str:
    return key.rpartition("/")[0]


def messages_by_target(stages: Iterable[Stage]) -> dict[tuple[str, int], int]:
    """How many messages go to each partition."""
    found: dict[tuple[str, int], int] = {}
    for stage in stages:
        for staged in stage.staged:
            place = (staged.topic, staged.partition)
            found[place] = found.get(place, 0) + staged.messages
    return found


async def move_all(
    query: Query, stages: Sequence[Stage], resolve: Callable[[Target], Partition]
) -> list[StagedOffsets]:
    """Append everything in these stages to its topics: where it is, by target; -1 where a target is gone."""
    by_target: dict[tuple[str, int], list[Staged]] = {}
    for stage in stages:
        for staged in stage.staged:
            by_target.setdefault((staged.topic, staged.partition), []).append(staged)
    places = asyncio.Semaphore(_ABREAST)

    async def move(place: tuple[str, int]) -> StagedOffsets:
        async with places:
            return await _Move(query, place, by_target[place], resolve).run()

    return await asyncio.gather(*map(move, sorted(by_target)))


class _Move:
    """The move of everything that goes to one partition."""

    def __init__(
        self, query: Query, place: tuple[str, int], all_staged: list[Staged], resolve: Callable[[Target], Partition]
    ) -> None:
        self._query = query
        self._producer = query.document.producer << 16
        self._first_sequence = query.document.sequences.get(target_key(*place), 0)
        self._target = Target(query.document.namespace, *place)
        self._staged = all_staged
        self._resolve = resolve

    async def run(self) -> StagedOffsets:
        try:
            return await self._run_ahead()
        except MillstreamError:  # whatever it is, the patient way meets it again, and knows what to do
            return await self._run_patiently()

    async def _run_ahead(self) -> StagedOffsets:
        """Append one round after the other without waiting for the disk in between.  Raises the partition's error."""
        moved = self._nothing()
        unconfirmed: deque[tuple[list[int], asyncio.Task[list[int]]]] = deque()

        async def confirm() -> None:
            counts, appending = unconfirmed[0]
            _add(moved, await appending, counts)
            unconfirmed.popleft()

        try:
            async for batches, counts in self._rounds():
                partition = self._resolve(self._target)
                if not moved.messages and batches and partition.log.producers.is_past(BatchHeader(batches[0])):
                    return await self._run_patiently()  # a crash has cut it short
                appending = asyncio.create_task(partition.append_moved(batches))
                unconfirmed.append((counts, appending))
                # It begins now, so that everything is written in its order; and others have their turn.
                await asyncio.sleep(0)
                # A target that has never heard of the query takes any round for its first: that must not be the second.
                if appending.done() or len(unconfirmed) >= (_UNCONFIRMED if moved.messages else 1):
                    await confirm()
            while unconfirmed:
                await confirm()
        finally:
            for _, appending in unconfirmed:
                appending.cancel()  # nobody waits for it any more; what is written is written
            await asyncio.gather(*(appending for _, appending in unconfirmed), return_exceptions=True)
        return moved

    async def _run_patiently(self) -> StagedOffsets:
        """Append one round after the other, each for as long as it takes, and what is there already not again."""
        moved = self._nothing()
        async for batches, counts in self._rounds():
            try:
                _add(moved, await deliver(self._resolve, self._target, batches), counts)
            except RequestError:
                break  # deliver has said why
        return moved

    def _nothing(self) -> StagedOffsets:
        _, topic, partition = self._target
        return StagedOffsets(topic=topic, partition=partition, first=-1, until=-1, messages=0)

    async def _rounds(self) -> AsyncIterator[tuple[list[bytearray], list[int]]]:
        """Batches with their identity, and how many messages each of them has."""
        sequence = self._first_sequence
        for some in _rounds(self._staged):
            batches, counts = [], []
            for staged in some:
                try:
                    batch = await self._query.read(staged)
                except RequestError as error:
                    query = self._query.document.query
                    _log.error("staged messages are lost", query=query, messages=staged.messages, reason=str(error))
                else:
                    assign_producer(batch, self._producer, sequence)
                    batches.append(batch)
                    counts.append(staged.messages)
                sequence = (sequence + staged.messages) & _SEQUENCE
            yield batches, counts


def _add(moved: StagedOffsets, bases: Sequence[int], counts: Sequence[int]) -> None:
    """A round is stored."""
    moved.messages += sum(counts)
    ends = [(base, base + count) for base, count in zip(bases, counts, strict=True) if base >= 0]
    if ends:
        moved.first = ends[0][0] if moved.first < 0 else moved.first
        moved.until = ends[-1][1]


def _rounds(all_staged: Iterable[Staged]) -> Iterator[list[Staged]]:
    """What is appended in one write each."""
    some: list[Staged] = []
    size = 0
    for staged in all_staged:
        if some and size + staged.bytes > _ROUND_BYTES:
            yield some
            some, size = [], 0
        some.append(staged)
        size += staged.bytes
    if some:
        yield some
