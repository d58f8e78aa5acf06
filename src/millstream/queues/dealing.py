"""Who gets how much of what is ready when several wait for it: everybody the same, as far as it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

__all__ = ["rounds", "share"]

_R = TypeVar("_R")


def share(ready: int, waiting: int) -> int:
    """What the next of so many gets.  One at least: how much is ready is an estimate."""
    return max(1, -(-ready // waiting))


def rounds(line: Sequence[_R], whose: Callable[[_R], Hashable]) -> Iterator[list[_R]]:
    """Requests in the order in which they are served, a round after the other: each has one of everybody's."""
    while line:
        asked: dict[Hashable, _R] = {}
        later: list[_R] = []
        for request in line:
            if asked.setdefault(whose(request), request) is not request:
                later.append(request)
        yield list(asked.values())
        line = later
