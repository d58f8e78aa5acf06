"""Moving a batch from its stages to its topics.

What is to be published was recorded before; this can be done again from the start after a crash, as often as need be.
Every message goes with the same identity each time, by which its target tells what it has already (see transfer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import structlog

from millstream.broker.partition import Partition
from millstream.broker.stages.query import Query
from millstream.broker.stages.stage import Stage, Staged
from millstream.broker.transfer import Target, deliver
from millstream.errors import RequestError
from millstream.records import assign_producer
from millstream.wire.stage_calls import StagedOffsets

__all__ = ["messages_by_target", "move_all", "target_key"]

_log = structlog.get_logger("millstream.stages")

_SEQUENCE: Final = 0xFFFF_FFFF
#: Targets that are written to at the same time, and how much is in memory for each.
_ABREAST: Final = 8
_ROUND_BYTES: Final = 4 * 1024 * 1024


def target_key(topic: str, partition: int) -> str:
    return f"{topic}/{partition}"


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
            return await _move(query, place, by_target[place], resolve)

    return await asyncio.gather(*map(move, sorted(by_target)))


async def _move(
    query: Query, place: tuple[str, int], all_staged: list[Staged], resolve: Callable[[Target], Partition]
) -> StagedOffsets:
    document = query.document
    target = Target(document.namespace, *place)
    sequence = document.sequences.get(target_key(*place), 0)
    moved = StagedOffsets(topic=target.topic, partition=target.partition, first=-1, until=-1, messages=0)
    for some in _rounds(all_staged):
        batches, counts = [], []
        for staged in some:
            try:
                batch = bytearray(await query.read(staged))
            except RequestError as error:
                _log.error(
                    "staged messages are lost", query=document.query, messages=staged.messages, reason=str(error)
                )
            else:
                assign_producer(batch, document.producer << 16, sequence)
                batches.append(batch)
                counts.append(staged.messages)
            sequence = (sequence + staged.messages) & _SEQUENCE
        try:
            bases = await deliver(resolve, target, batches)
        except RequestError:
            break  # deliver has said why
        moved.messages += sum(counts)
        ends = [(base, base + count) for base, count in zip(bases, counts, strict=True) if base >= 0]
        if ends:
            moved.first = ends[0][0] if moved.first < 0 else moved.first
            moved.until = ends[-1][1]
    return moved


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
