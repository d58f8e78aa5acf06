"""Waking threads: `Knock` wakes one that waits, `Flag` all who wait now or later.  Safe in handlers of signals."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Flag", "Knock"]


class Knock:
    """One thread waits, any thread knocks; a knock that nobody waits for is heard by the next wait.

    It is a bare lock, released to knock and taken to wait.  An Event or a Condition would not do: a signal's handler
    that raises in the middle of one can leave its inner lock taken, or release it twice.
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
        """Take back a knock that nobody has heard."""
        self._silence.acquire(blocking=False)


class Flag:
    """Set once and for all; any number of threads wait for it.

    It takes the place of an Event, for the same reason.  A signal's handler may set it, whatever it interrupts.
    """

    def __init__(self) -> None:
        self._down = threading.Lock()
        self._down.acquire()
        self._up = False

    def set(self) -> None:
        self._up = True
        self._let_go()

    def wait(self, wait_s: float | None = None) -> bool:
        """Whether it is set, or gets set in time."""
        if not self._up and self._down.acquire(timeout=-1 if wait_s is None else max(0.0, wait_s)):
            self._let_go()  # for whoever waits as well
        return self._up

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody else has
            self._down.release()
