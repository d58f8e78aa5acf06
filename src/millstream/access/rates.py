"""How fast: token buckets, one or many, with time as an argument.

A bucket may be overdrawn by what was just let in, and then stays shut until it is filled again: a batch larger than the
burst is not refused for ever.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

__all__ = ["Bucket", "Buckets"]

#: Addresses or keys that are remembered; who was forgotten begins with a full bucket.
_REMEMBERED_MAX: Final = 10_000


class Bucket:
    """Lets in so many a second, and a burst of them at once."""

    __slots__ = ("_at_ms", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now_ms: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """0 when something may come in now, otherwise how long it takes until then."""
        self._tokens = min(self._burst, self._tokens + max(0, now_ms - self._at_ms) / 1000 * self._rate)
        self._at_ms = max(self._at_ms, now_ms)
        return 0 if self._tokens >= 1 else math.ceil((1 - self._tokens) / self._rate * 1000)

    def take(self, amount: float) -> None:
        self._tokens -= amount

    @property
    def is_full(self) -> bool:
        return self._tokens >= self._burst


class Buckets:
    """A bucket each for many, those seen last; switched off by a rate of 0."""

    def __init__(self, rate: float, burst: float, *, remembered_max: int = _REMEMBERED_MAX) -> None:
        self._rate = rate
        self._burst = max(burst, 1)
        self._remembered_max = remembered_max
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._rate > 0

    def wait_ms(self, who: Hashable, now_ms: int) -> int:
        """As `Bucket.wait_ms`, without taking anything."""
        bucket = self._buckets.get(who)
        return 0 if bucket is None else bucket.wait_ms(now_ms)

    def admit(self, who: Hashable, now_ms: int, amount: float = 1) -> int:
        """0 and the amount is taken, or how long to wait."""
        if not self.is_on:
            return 0
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = Bucket(self._rate, self._burst, now_ms)
            if len(self._buckets) > self._remembered_max:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(who)
        wait_ms = bucket.wait_ms(now_ms)
        if not wait_ms:
            bucket.take(amount)
        return wait_ms

    def __len__(self) -> int:
        return len(self._buckets)
