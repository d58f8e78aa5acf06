"""Who reads a connection that several threads wait for: one of them, for all.

Whoever waits for something and finds that nobody reads does it himself, so a single thread never waits for another.
"""

from __future__ import annotations

import time
from _thread import RLock, get_ident
from collections.abc import Callable
from functools import partial

from millstream.client.blocking.knock import Knock

__all__ = ["Turns"]

#: A thread that waits looks around this often, whatever happens.
_LOOK_S = 1.0


class Turns(RLock):  # type: ignore[misc]
    """`with turns:` guards whatever the reader changes; it may be entered again by the thread that holds it.

    It is the lock, and has no methods of its own to enter and leave it: the exception of a signal's handler could come
    in the middle of them, and others would wait for ever.
    """

    def __init__(self) -> None:
        #: Of threads that wait while another one reads.
        self._waiting: dict[Knock, None] = {}
        self._reading = False
        self._reader = 0
        self._read_s = time.monotonic()

    @property
    def is_mine(self) -> bool:
        """This thread reads, or holds the guard: if it asks, it is the handler of a signal that has interrupted it.

        It must not wait then for what only the interrupted code can do.
        """
        held: bool = self._is_owned()  # type: ignore[attr-defined]
        return held or (self._reading and self._reader == get_ident())

    def notify(self) -> None:
        """Something has changed that others may wait for.  The caller holds the guard."""
        while self._waiting:
            self._waiting.popitem()[0].knock()

    def neglected(self, patience_s: float) -> bool:
        """Nobody reads, and nobody has for this long."""
        return not self._reading and time.monotonic() - self._read_s >= patience_s

    def read(self, read: Callable[[], None]) -> None:
        """Call `read`, if nobody reads now."""
        mine, me = False, get_ident()
        try:
            with self:
                if not self._reading:
                    mine = self._reading = True
                    self._reader = me
            if mine:
                read()
        finally:
            if mine:
                self._reading = False  # first of all: whatever interrupts us now, others may read
                with self:
                    self._read_s = time.monotonic()
                    self.notify()

    def wait_for(
        self, done: Callable[[], bool], wait_s: float | None, *, read: Callable[[float], None], over: Callable[[], bool]
    ) -> bool:
        """Wait until `done`, calling `read` (which returns after a moment) when nobody else does.

        False when it did not happen in time, or `over` says that it never will.
        """
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        looked = False
        knock = Knock()
        try:
            while True:
                with self:
                    if done():
                        return True
                    left_s = _LOOK_S if deadline_s is None else max(0.0, min(_LOOK_S, deadline_s - time.monotonic()))
                    if over() or (looked and not left_s):
                        return False
                    looked = True
                    reading = self._reading
                    if reading:
                        self._waiting[knock] = None
                if reading:
                    knock.wait(left_s)  # without the guard: whatever interrupts us, it is clear who has it
                else:
                    self.read(partial(read, left_s))
        finally:
            if knock in self._waiting:
                with self:
                    self._waiting.pop(knock, None)
