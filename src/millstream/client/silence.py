"""Noticing that a broker has vanished: a power cut or a firewall ends a connection without a word.

The broker sends a heartbeat on every connection, so one that stays silent for several of them has nobody at its end.
Only time during which we listened counts: a program that was stopped, or busy with something else, has not heard
anything either.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Silence"]

#: Heartbeats that may be missing.
_MISSED_MAX: Final = 3


class Silence:
    """How long the other end of one connection has said nothing.  `look` is called several times per heartbeat."""

    __slots__ = ("_limit_s", "_looked_s", "_silent_s", "_step_s", "heard")

    def __init__(self, heartbeat_ms: int, now_s: float) -> None:
        self._limit_s = heartbeat_ms * _MISSED_MAX / 1000
        #: However late we look, there is no telling whether we would have heard something in the meantime.
        self._step_s = heartbeat_ms / 3000
        self._looked_s = now_s
        self._silent_s = 0.0
        #: Set by whoever receives anything.
        self.heard = False

    def look(self, now_s: float) -> bool:
        """Whether it has lasted for too long."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._silent_s = 0.0 if self.heard else self._silent_s + min(passed_s, self._step_s)
        self.heard = False
        return self._silent_s > self._limit_s

    def __str__(self) -> str:
        return f"has been silent for {self._silent_s:.3g} s"
