"""How fast the totals grow, per topic: the difference between two surveys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from millstream.broker.stats.survey import Survey, TopicRow

__all__ = ["NO_PACE", "Pace", "Paces"]

#: A shorter time than this says little about a rate.
_LEAST_MS: Final = 2_000


class Pace(NamedTuple):
    """Per second."""

    published: float = 0.0
    published_bytes: float = 0.0
    consumed: float = 0.0
    acked: float = 0.0
    failed: float = 0.0
    dead: float = 0.0

    @classmethod
    def sum_of(cls, paces: Iterable[Pace]) -> Pace:
        columns = list(zip(*paces, strict=True))
        return cls(*map(sum, columns)) if columns else NO_PACE


NO_PACE: Final = Pace()

_Totals = tuple[int, int, int, int, int, int]


def _totals(row: TopicRow) -> _Totals:
    return row.published, row.published_bytes, row.consumed, row.acked, row.failed, row.dead


class Paces:
    """Remembers the totals of two surveys some seconds apart, so that there is always one that is old enough."""

    def __init__(self, started_ms: int) -> None:
        """`started_ms` on the monotonic clock: when all totals were 0."""
        self._at_ms = [started_ms, started_ms]
        self._totals: list[Mapping[tuple[str, str], _Totals]] = [{}, {}]

    def remember(self, survey: Survey) -> None:
        """Take this survey as one to compare with."""
        totals = {(row.namespace, row.topic): _totals(row) for row in survey.topics}
        self._at_ms = [self._at_ms[1], survey.monotonic_ms]
        self._totals = [self._totals[1], totals]

    def of(self, survey: Survey) -> dict[tuple[str, str], Pace]:
        """How fast each topic is now."""
        newest = survey.monotonic_ms - self._at_ms[1] >= _LEAST_MS
        before, at_ms = self._totals[newest], self._at_ms[newest]
        seconds = max(survey.monotonic_ms - at_ms, 1) / 1000
        nothing: _Totals = (0, 0, 0, 0, 0, 0)
        paces: dict[tuple[str, str], Pace] = {}
        for row in survey.topics:
            key = (row.namespace, row.topic)
            now, then = _totals(row), before.get(key, nothing)
            if now != then:
                # Less than before: the topic was deleted and made anew.
                paces[key] = Pace(*(max(0, one - other) / seconds for one, other in zip(now, then, strict=True)))
        return paces
