"""Something that one thread does for all who need it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from millstream.client.blocking.knock import Flag

__all__ = ["Ongoing"]

#: A thread that waits looks around this often, whatever happens.
_LOOK_S: Final = 1.0


class Ongoing:
    """One thing that is being done at a time: who comes while it is under way waits, for as long as he likes.

    A lock that is held meanwhile would not do.  Taken with a time limit it could stay taken for ever: the exception of
    a signal's handler may come between the taking and whatever would let go of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: Flag | None = None

    def do(self, work: Callable[[], object], deadline_s: float) -> bool:
        """Do it, or wait for whoever does it; a moment at most, so look whether it is done.  True if it was us."""
        ours = Flag()
        try:
            with self._lock:
                doing = self._doing = self._doing or ours
            if doing is ours:
                work()
                return True
        finally:
            if self._doing is ours:
                self._doing = None  # without a call before it: whatever interrupts us now, others may begin
                ours.set()
        doing.wait(min(_LOOK_S, deadline_s - time.monotonic()))
        return False
