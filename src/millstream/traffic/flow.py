"""How fast a topic may be published to, from how far behind its consumers are.

Two things are measured a few times per second: how long the oldest message of the slowest queue group has waited, and
how many messages wait.  Each is compared with its limit; the larger ratio is the *pressure*, smoothed so that a blip
means nothing.  Pressure moves the topic through four levels:

| level | entered at pressure | left below | what happens |
|---|---|---|---|
| normal | | | nothing |
| warning | 0.5 | 0.4 | publishers are told |
| critical | 1 | 0.5 | confirmations are delayed, a little more with every sample |
| overloaded | 3 | 1 | they are delayed for longer, and low priorities are refused |

A level is entered only after two samples in a row say so and left only after a hold time without contradiction, one
level at a time.  So the decision does not flutter, and neither do publishers.
"""

from __future__ import annotations

from enum import IntEnum
from math import exp
from typing import Final, Literal, TypeAlias

__all__ = ["FlowController", "Level", "Trend"]

Trend: TypeAlias = Literal["increasing", "stable", "decreasing"]
Advice: TypeAlias = Literal["none", "light", "moderate", "heavy"]
Word: TypeAlias = Literal["normal", "warning", "critical", "overloaded"]

#: Samples that must agree before a level is entered.
_AGREEING: Final = 2
HOLD_MS: Final = 5_000
_FAST_MS: Final = 1_000
_SLOW_MS: Final = 5_000
_SLOPE_MS: Final = 2_000
_DELAY_START_MS: Final = 10.0
_GROWTH: Final = 1.4
_EASING: Final = 0.9
_RELIEF: Final = 0.6
#: A difference this small is not a trend.
_STABLE: Final = 0.05


class Level(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2
    OVERLOADED = 3

    @property
    def word(self) -> Word:
        return _WORDS[self]


_WORDS: Final[tuple[Word, ...]] = ("normal", "warning", "critical", "overloaded")
_ADVICE: Final[tuple[Advice, ...]] = ("none", "light", "moderate", "heavy")
_ENTER: Final = (0.0, 0.5, 1.0, 3.0)
_LEAVE: Final = (0.0, 0.4, 0.5, 1.0)
#: Far below any time-out of a client: a delayed confirmation must not be taken for a lost one.
_DELAY_MAX_MS: Final = (0.0, 0.0, 500.0, 2_000.0)


class _Average:
    """An exponentially weighted average of samples that come at uneven times."""

    __slots__ = ("_memory_ms", "value")

    def __init__(self, memory_ms: int) -> None:
        self._memory_ms = memory_ms
        self.value = 0.0

    def add(self, sample: float, elapsed_ms: int) -> None:
        self.value += (sample - self.value) * (1 - exp(-elapsed_ms / self._memory_ms))


class FlowController:
    """One topic.  A limit of 0 is not watched."""

    def __init__(self, *, lag_limit_ms: int, depth_limit: int, now_ms: int) -> None:
        self.lag_limit_ms = lag_limit_ms
        self.depth_limit = depth_limit
        self.level = Level.NORMAL
        #: What was measured last.
        self.lag_ms = 0
        self.depth = 0
        self._fast = _Average(_FAST_MS)
        self._slow = _Average(_SLOW_MS)
        #: Messages per millisecond by which the depth changes.
        self._slope = _Average(_SLOPE_MS)
        self._delay_ms = 0.0
        self._sampled_ms = now_ms
        self._above = 0
        self._calm_since_ms: int | None = None

    def sample(self, now_ms: int, *, lag_ms: int, depth: int) -> bool:
        """Take in a measurement; True when the level or the delay changed."""
        elapsed_ms = max(1, now_ms - self._sampled_ms)
        self._sampled_ms = now_ms
        self._slope.add((depth - self.depth) / elapsed_ms, elapsed_ms)
        self.lag_ms, self.depth = lag_ms, depth
        pressure = max(
            lag_ms / self.lag_limit_ms if self.lag_limit_ms else 0.0,
            depth / self.depth_limit if self.depth_limit else 0.0,
        )
        self._fast.add(pressure, elapsed_ms)
        self._slow.add(pressure, elapsed_ms)
        before = (self.level, self.delay_ms)
        self._move(now_ms)
        self._adjust_delay()
        return before != (self.level, self.delay_ms)

    def _move(self, now_ms: int) -> None:
        pressure = self._fast.value
        if self.level < Level.OVERLOADED and pressure >= _ENTER[self.level + 1]:
            self._calm_since_ms = None
            self._above += 1
            if self._above >= _AGREEING:
                self._above = 0
                self.level = Level(self.level + 1)
            return
        self._above = 0
        if self.level == Level.NORMAL or pressure >= _LEAVE[self.level]:
            self._calm_since_ms = None
        elif self._calm_since_ms is None:
            self._calm_since_ms = now_ms
        elif now_ms - self._calm_since_ms >= HOLD_MS:
            self._calm_since_ms = now_ms
            self.level = Level(self.level - 1)

    def _adjust_delay(self) -> None:
        delay, pressure, most = self._delay_ms, self._fast.value, _DELAY_MAX_MS[self.level]
        if most and pressure >= 1.0:
            delay = max(_DELAY_START_MS, delay * _GROWTH) if self.trend != "decreasing" else delay
        else:
            delay *= _EASING if pressure >= _LEAVE[Level.CRITICAL] else _RELIEF
        # Down by steps also when the level falls: publishers that all wake up at once would be the next flood.
        most = max(most, self._delay_ms * _RELIEF)
        self._delay_ms = min(delay, most) if min(delay, most) >= 1.0 else 0.0

    # --- what it says ----------------------------------------------------------------------------------------------

    @property
    def pressure(self) -> float:
        """1 is the limit."""
        return self._fast.value

    @property
    def delay_ms(self) -> int:
        """By how much confirmations are to be delayed."""
        return round(self._delay_ms)

    @property
    def trend(self) -> Trend:
        difference = self._fast.value - self._slow.value
        if abs(difference) <= _STABLE * max(1.0, self._slow.value):
            return "stable"
        return "increasing" if difference > 0 else "decreasing"

    @property
    def catch_up_ms(self) -> int | None:
        """How long until nothing waits any more if it goes on like this; None when it does not get less."""
        if not self.depth:
            return 0
        slope = self._slope.value
        return round(self.depth / -slope) if slope < -1e-6 else None

    @property
    def at_rest(self) -> bool:
        """Whether nobody would miss it."""
        return self.level == Level.NORMAL and not self._delay_ms

    @property
    def advice(self) -> Advice:
        """How much publishers should hold back."""
        return _ADVICE[self.level]
