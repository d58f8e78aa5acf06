"""How long a call may take, all in all: whatever it waits for, one after the other, has one end."""

from __future__ import annotations

import time

from millstream.errors import RequestTimeout

__all__ = ["Limit"]


class Limit:
    """The time that a caller has given, from now on."""

    __slots__ = ("_deadline_s", "_limit_s")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """How much of it is left; nothing, or less, when it is over."""
        return self._deadline_s - time.monotonic()

    def over(self, what: str) -> RequestTimeout:
        return RequestTimeout(f"{what} after {self._limit_s:g} s")
