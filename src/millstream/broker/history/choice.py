"""Which topics and groups have a history of their own: as many as there is memory for, the busiest ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

__all__ = ["Choice"]

K = TypeVar("K")

#: How much of the newest measurement goes into what counts as usual: after some minutes it is what counts.
_NEWEST: Final = 0.02
#: A newcomer must be this many times as busy as whoever gives way: a plot that comes and goes is no use.
_BUSIER: Final = 4


class Choice(Generic[K]):
    """At most so many of whatever there is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._usual: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._usual

    def __iter__(self) -> Iterable[K]:
        return iter(self._usual)

    def resume(self, keys: Iterable[K]) -> list[K]:
        """What had a history before; returns what it cannot have any more."""
        dropped = []
        for key in keys:
            if key in self._usual or len(self._usual) < self._most:
                self._usual.setdefault(key, 0.0)
            else:
                dropped.append(key)
        return dropped

    def choose(self, busy: Mapping[K, float]) -> list[K]:
        """Take in how busy each one is that exists; returns those that lost their place."""
        usual = self._usual
        dropped = [key for key in usual if key not in busy]
        for key in dropped:
            del usual[key]
        for key, before in usual.items():
            usual[key] = before + (busy[key] - before) * _NEWEST
        newcomers = [key for key, amount in busy.items() if amount > 0 and key not in usual]
        for key in sorted(newcomers, key=lambda key: busy[key], reverse=True):
            if len(usual) >= self._most:
                least = min(usual, key=lambda held: usual[held])
                if busy[key] <= _BUSIER * usual[least]:
                    break
                del usual[least]
                dropped.append(least)
            usual[key] = busy[key]
        return dropped
