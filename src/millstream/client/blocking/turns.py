"""Who reads a connection that several threads wait for: one of them, for all.

Whoever waits for something and finds that nobody reads does it himself, so a single thread never waits for another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Turns"]

#: A thread that waits looks around this often, whatever happens.
_LOOK_S = 1.0


class Turns:
    """`with turns:` guards whatever the reader changes; it may be entered again by the thread that holds it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reading = False
        self._read_s = time.monotonic()

    def __enter__(self) -> None:
        self._changed.__enter__()

    def __exit__(self, *details: object) -> None:
        self._changed.__exit__(*details)  # type: ignore[arg-type]

    def notify(self) -> None:
        """Something has changed that others may wait for.  The caller holds the guard."""
        self._changed.notify_all()

    def neglected(self, patience_s: float) -> bool:
        """Nobody reads, and nobody has for this long."""
        return not self._reading and time.monotonic() - self._read_s >= patience_s

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Read, if nobody does: whether it is our turn."""
        with self._changed:
            mine = not self._reading
            self._reading = True
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._reading = False
                    self._read_s = time.monotonic()
                    self._changed.notify_all()

    def wait_for(
        self, done: Callable[[], bool], wait_s: float | None, *, read: Callable[[float], None], over: Callable[[], bool]
    ) -> bool:
        """Wait until `done`, calling `read` (which returns after a moment) when nobody else does.

        False when it did not happen in time, or `over` says that it never will.
        """
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        looked = False
        while True:
            with self._changed:
                if done():
                    return True
                left_s = _LOOK_S if deadline_s is None else max(0.0, min(_LOOK_S, deadline_s - time.monotonic()))
                if over() or (looked and not left_s):
                    return False
                looked = True
                if self._reading:
                    self._changed.wait(left_s)
                    continue
            with self.reading() as mine:
                if mine:
                    read(left_s)
