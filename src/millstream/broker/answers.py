"""What a partition answers: to a fetch (which may have to wait for messages), to a publish, to questions about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from millstream.errors import MillstreamError
from millstream.wire.calls import PartitionInfo

if TYPE_CHECKING:
    from millstream.broker.partition import Partition

__all__ = ["FetchAnswer", "FetchHandle", "FetchReply", "Fetched", "PublishReply", "confirm", "describe"]

#: Called once per publish: (error or None, label, base offset, append time, was it a repetition).
PublishReply: TypeAlias = Callable[[MillstreamError | None, int, int, int, bool], None]


class FetchAnswer(NamedTuple):
    """Whole batches from the offset asked for on; none when the wait ended without any."""

    buffers: Sequence[bytes]
    next_offset: int
    high_watermark: int
    start_offset: int
    #: Offsets that were stepped over because they are damaged on disk: first, and first after.
    damaged: tuple[int, int] | None


#: Called once per fetch.
FetchReply: TypeAlias = Callable[[FetchAnswer | MillstreamError], None]


class Fetched(Protocol):
    """What is fetched from: a partition."""

    def forget(self, waiter: FetchHandle) -> None: ...


class FetchHandle:
    """A fetch that reached the end of the log and waits for more."""

    __slots__ = ("_partition", "max_bytes", "offset", "reply", "timer")

    def __init__(self, partition: Fetched, offset: int, max_bytes: int, reply: FetchReply) -> None:
        self._partition = partition
        self.offset = offset
        self.max_bytes = max_bytes
        self.reply = reply
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Forget the fetch; it is not answered."""
        self._partition.forget(self)


def confirm(
    stored: asyncio.Future[int], error: MillstreamError | None, _label: int, base: int, _time: int, _again: bool
) -> None:
    """Answer a publish of the broker's own: a `PublishReply` for whoever waits for an offset."""
    if stored.done():
        return
    if error is None:
        stored.set_result(base)
    else:
        stored.set_exception(error)


def describe(number: int, partition: Partition | None = None, failed: str | None = None) -> PartitionInfo:
    """What is shown of a partition; without one it was never used, or cannot be opened."""
    if partition is None:
        return PartitionInfo(
            partition=number,
            start_offset=0,
            next_offset=0,
            high_watermark=0,
            size_bytes=0,
            segments=0,
            failed=failed,
            durable_offset=0,
        )
    log = partition.log
    return PartitionInfo(
        partition=number,
        start_offset=log.start_offset,
        next_offset=log.next_offset,
        high_watermark=partition.high_watermark,
        size_bytes=log.size_bytes,
        segments=len(log.segments),
        damaged_ranges=log.recovery.damaged,
        failed=partition.failed,
        durable_offset=partition.durable_offset if partition.is_durable else None,
    )
