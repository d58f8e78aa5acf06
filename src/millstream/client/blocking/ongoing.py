"""Work that one thread does for all who need its result, such as connecting."""

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
    """At most one thread does the work at a time; whoever comes meanwhile waits for it, with a time limit of its own.

    A lock that is held meanwhile would not do: a signal's handler may raise between taking it with a time limit and the
    `try` that would release it, and then it would stay taken for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: Flag | None = None

    def do(self, work: Callable[[], object], deadline_s: float) -> bool:
        """Do the work and return True; or wait a moment for the thread that does it.  The caller then looks again."""
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
