"""Time that stands still where a broker counts how often somebody comes: a busy machine fills no buckets meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.testing.broker import BrokerForTests

__all__ = ["limits_stand_still"]


class _StillClock:
    def __init__(self, now_us: int, monotonic_ms: int) -> None:
        self._now_us = now_us
        self._monotonic_ms = monotonic_ms

    def now_us(self) -> int:
        return self._now_us

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    elapsed_ms = monotonic_ms


@contextmanager
def limits_stand_still(broker: BrokerForTests) -> Iterator[None]:
    """For keys and for the rates of requests and connections; everything else goes on."""
    access = broker.broker.access
    clock = access._clock
    access._clock = _StillClock(clock.now_us(), clock.monotonic_ms())
    try:
        yield
    finally:
        access._clock = clock
