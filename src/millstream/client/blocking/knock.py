"""A knock at the door of a thread that waits."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Knock"]


class Knock:
    """One thread waits, any thread knocks; a knock that nobody waits for is heard by the next wait.

    It is a lock that is let go of to knock, and has nothing around it: the exception of a signal's handler that comes
    in the middle of an Event or a Condition can leave their lock taken, or let go of it twice.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def knock(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody has knocked, and it was not heard yet
            self._silence.release()

    def wait(self, wait_s: float) -> None:
        self._silence.acquire(timeout=max(0.0, wait_s))

    def forget(self) -> None:
        """Nobody has knocked so far."""
        self._silence.acquire(blocking=False)
