"""An event loop that is kept from its work is noticed, whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream.server.stalls import Stalls
from tests.logged import Logged, logged


class _Loop:
    """Time passes as it is told to."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._due: Callable[[], None] | None = None

    def call_later(self, _: float, ring: Callable[[], None]) -> asyncio.TimerHandle | None:
        self._due = ring
        return None

    def ring_after(self, ms: int) -> None:
        self.now_ms += ms
        assert self._due is not None
        self._due()


def rung(log: Logged, *after_ms: int) -> list[int]:
    loop = _Loop()
    Stalls(loop, lambda: loop.now_ms).start()  # type: ignore[arg-type]
    for ms in after_ms:
        loop.ring_after(ms)
    return [entry["at_least_ms"] for entry in log.all("the event loop stood still", level="warning")]


def test_what_keeps_the_loop_for_long_is_a_warning_and_short_delays_are_none() -> None:
    with logged() as log:
        assert rung(log, 100, 105, 190, 350, 100) == [250]


def test_a_broker_that_is_always_late_does_not_fill_its_log() -> None:
    with logged() as log:
        assert len(rung(log, *[250] * 1_000)) < 300
        assert sum(entry.get("left_out", 0) for entry in log.all()) > 700
