"""How long to wait before the next try."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["BACKOFF_MS", "BACKOFF_MS_MAX", "Backoff", "backoff_ms"]

BACKOFF_MS: Final = 100
#: A broker that comes back is noticed within this time.
BACKOFF_MS_MAX: Final = 5_000
_PATIENCE_S: Final = 0.25


def backoff_ms(attempt: int, jitter: float) -> int:
    """The wait before try number `attempt` (from 1); `jitter` in 0..1 spreads clients that failed together."""
    full = min(BACKOFF_MS_MAX, BACKOFF_MS << min(attempt - 1, 16))
    return int(full * (0.5 + 0.5 * jitter))


class Backoff:
    """Counts tries of one thing."""

    __slots__ = ("attempts",)

    def __init__(self) -> None:
        self.attempts = 0

    def next_s(self) -> float:
        self.attempts += 1
        return backoff_ms(self.attempts, random.random()) / 1000

    def patience_s(self, wait_s: float) -> float:
        """How long the next try may take for a caller who would rather be back within `wait_s`.

        Longer each time: a link on which it takes longer than that would otherwise never be joined again.
        """
        return max(wait_s, _PATIENCE_S * (1 << min(self.attempts, 16)))

    def reset(self) -> None:
        self.attempts = 0
