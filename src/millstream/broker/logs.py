"""The two rules of the broker's log: details cost nothing while nobody asks for them, and nobody can fill it.

An entry of level debug is made where `details.on` was asked first, once per event and never per message.  What others
can cause as often as they like is written through a `Sparing`, which counts what it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from millstream.access.rates import Bucket
from millstream.clock import monotonic_ms

__all__ = ["SLOW_MS", "Sparing", "details", "waits_ms"]

#: What takes longer is worth a warning.
SLOW_MS: Final = 100
#: Entries a second that somebody else can cause, and how many at once.
_PER_S: Final = 1
_BURST: Final = 20


class _Details:
    """Whether the log is at level debug; set by whoever sets its level."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


details: Final = _Details()


class Sparing:
    """Writes a few entries a second.  The first one after a gap says how many were left out."""

    def __init__(self, now_ms: Callable[[], int] = monotonic_ms) -> None:
        self._now_ms = now_ms
        self._bucket = Bucket(_PER_S, _BURST, now_ms())
        self._left_out = 0

    def write(self, entry: Callable[..., Any], event: str, **fields: Any) -> None:
        """`entry` is the method of a logger."""
        if self._bucket.wait_ms(self._now_ms()):
            self._left_out += 1
            return
        self._bucket.take(1)
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        entry(event, **fields)


def waits_ms(*forms: object) -> int:
    """How long a call may take because whoever makes it wants it to: it waits for messages, or for others."""
    return max(getattr(form, "wait_ms", 0) or getattr(form, "timeout_ms", 0) or 0 for form in forms)
