"""A commit on its way, from the stream that wants it to the thread that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from millstream.client.blocking.knock import Flag
from millstream.client.messages import TopicPartition
from millstream.errors import MillstreamError, RequestTimeout, StaleGeneration

__all__ = ["NO_PROGRESS", "CommitTicket", "Progress", "moved_on"]


class Progress(NamedTuple):
    """What a stream has finished, and the epoch of the broker in which it read that."""

    epoch: int | None
    offsets: dict[TopicPartition, int]


NO_PROGRESS: Final = Progress(None, {})


def moved_on(group: str, place: TopicPartition) -> StaleGeneration:
    return StaleGeneration(f"{place} has left this member of group {group!r} since, and others may have read on")


class CommitTicket:
    """A commit under way."""

    __slots__ = ("_callback", "done", "epoch", "error", "holdings", "offsets")

    def __init__(
        self,
        offsets: dict[TopicPartition, int],
        holdings: dict[TopicPartition, int],
        epoch: int | None,
        callback: Callable[[CommitTicket], None] | None = None,
    ) -> None:
        self.offsets = offsets
        #: Of the broker, when they were read.
        self.epoch = epoch
        #: In which these messages were read, by partition.
        self.holdings = holdings
        self.error: MillstreamError | None = None
        self.done = Flag()
        self._callback = callback

    def finish(self, error: MillstreamError | None) -> None:
        self.error = error
        self.done.set()
        if self._callback is not None:
            self._callback(self)

    def wait(self, timeout_s: float) -> None:
        """Raises the broker's refusal, or RequestTimeout."""
        if not self.done.wait(timeout_s):
            raise RequestTimeout(f"the commit was not confirmed within {timeout_s:g} s")
        if self.error is not None:
            raise self.error
