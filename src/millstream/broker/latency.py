"""How long things take, as histograms that cost two additions per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["BUCKETS", "Histogram", "Latencies", "quantile_us"]

#: Bucket i counts what took at most 2**i microseconds and more than the one before; the last one everything longer.
BUCKETS: Final = 37
_LAST: Final = BUCKETS - 1


class Histogram:
    """Durations in buckets that double, so that one array serves a microsecond as well as a day."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.sum_us = 0

    def observe(self, took_us: int, messages: int = 1) -> None:
        """Count messages that took so long.  A negative duration (somebody has set the clock back) counts as 0."""
        if took_us < 1:
            self.counts[0] += messages
            return
        bucket = (took_us - 1).bit_length()
        self.counts[bucket if bucket < _LAST else _LAST] += messages
        self.sum_us += took_us * messages

    @property
    def count(self) -> int:
        return sum(self.counts)


def quantile_us(share: float, counts: Sequence[int], before: Sequence[int] | None = None) -> float:
    """About the duration that this share did not exceed, of everything counted or since `before`; 0 for nothing."""
    if before is not None:
        counts = [now - then for now, then in zip(counts, before, strict=True)]
    wanted = share * sum(counts)
    if wanted <= 0:
        return 0.0
    seen = 0
    for bucket, count in enumerate(counts):
        if seen + count >= wanted:
            low = (1 << bucket) / 2 if bucket else 0.0
            return low + ((1 << bucket) - low) * (wanted - seen) / count
        seen += count
    return float(1 << _LAST)


@dataclass(slots=True)
class Latencies:
    """Every latency that the broker measures."""

    #: From a batch's arrival until it is as durable as its publisher asked for, per message.
    publish: Histogram = field(default_factory=Histogram)
    #: One round of the committer.
    fsync: Histogram = field(default_factory=Histogram)
    #: From a message's lease to its ack.
    processing: Histogram = field(default_factory=Histogram)
    #: From the append of a message to its delivery: its first one in a queue, each one of a stream, also a late one.
    to_stream: Histogram = field(default_factory=Histogram)
    to_queue: Histogram = field(default_factory=Histogram)
    to_subscription: Histogram = field(default_factory=Histogram)
    #: From a new generation of a stream group until every partition is where it belongs.
    rebalance: Histogram = field(default_factory=Histogram)
    #: HTTP requests by family of endpoints.
    http: dict[str, Histogram] = field(default_factory=dict)
