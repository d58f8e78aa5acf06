"""Whether the broker's memory stays flat: by what it needs at the same age, and by what it needs within a long life."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

__all__ = ["Comparison", "compare_memory", "is_flat"]

#: Caches fill, clients come back: before this age nothing is compared.
WARM_S: Final = 60.0
#: Lives shorter than this say nothing about growth.
LONG_S: Final = 150.0
#: What may differ between two thirds: what waits for the collector, which comes every 50,000 objects (15 MB were seen),
#: and what the allocator keeps.  Chosen after a look at short runs, not derived.
SHARE_MAX: Final = 0.15
MB_MAX: Final = 24.0


class Measured(Protocol):
    """What is looked at of a sample."""

    @property
    def life(self) -> int: ...
    @property
    def age_s(self) -> float: ...
    @property
    def resident_mb(self) -> float: ...


@dataclass(frozen=True)
class Comparison:
    """The median of the first third, and of the last."""

    what: str
    seconds: float
    first_mb: float
    last_mb: float

    @property
    def growth_mb(self) -> float:
        return self.last_mb - self.first_mb

    @property
    def flat(self) -> bool:
        return self.growth_mb <= max(MB_MAX, SHARE_MAX * self.first_mb)


def compare_memory(samples: Sequence[Measured]) -> list[Comparison]:
    """Each long life by itself, and one life with another."""
    found: list[Comparison] = []
    lives = [list(life) for _, life in groupby(samples, key=lambda sample: sample.life)]
    for life in lives:
        warm = [sample for sample in life if sample.age_s >= WARM_S]
        if warm and warm[-1].age_s >= LONG_S:
            found.append(_compare(f"life {warm[0].life}", warm))
    found += _between(lives)
    return found


def _between(lives: Sequence[Sequence[Measured]]) -> Iterator[Comparison]:
    """The first long life and the last at the same age: what a restart keeps in memory of all that was before it."""
    long = [life for life in lives if life[-1].age_s >= LONG_S]
    if len(long) < 2:
        return
    medians = [
        statistics.median(sample.resident_mb for sample in life if WARM_S <= sample.age_s <= LONG_S)
        for life in (long[0], long[-1])
    ]
    yield Comparison(f"lives {long[0][0].life} and {long[-1][0].life} at the same age", LONG_S - WARM_S, *medians)


def _compare(what: str, samples: Sequence[Measured]) -> Comparison:
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    return Comparison(
        what,
        samples[-1].age_s - samples[0].age_s,
        statistics.median(sample.resident_mb for sample in first),
        statistics.median(sample.resident_mb for sample in last),
    )


def is_flat(comparisons: Sequence[Comparison]) -> bool:
    return all(comparison.flat for comparison in comparisons)
