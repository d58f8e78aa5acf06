"""Staying awake for a client that sends one request after the other.

A program that publishes a message, waits for the answer and publishes the next has the broker do nothing for some ten
microseconds at a time, waiting for the disk or for the client.  Going to sleep for that and being woken takes longer
than the request itself, on virtual machines several times as long, and costs more processor time than waiting awake.
So while one client alone goes on at such a pace, the loop looks for what comes next instead of sleeping, and lets every
other process go first.  A pause ends it, as does a second client: with several there is always something to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

__all__ = ["Vigil"]

#: So many steps at that pace (a request is one, an answer another) make it likely that the next one follows.
_STEPS_MIN: Final = 32
#: A good disk takes longer to sync than a client to ask again; how much longer it may take.
_DISK_TIMES: Final = 2
_yield: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: None)


class Vigil:
    """Kept by a door for whichever client it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stay_us: int, now_ns: Callable[[], int] = monotonic_ns) -> None:
        """`stay_us` is the longest that is waited for a client; a disk may take twice as long.  0 for never."""
        self._loop = loop
        self._stay_ns = stay_us * 1000
        self._now_ns = now_ns
        self._client: object = None
        self._last_ns = 0
        self._limit_ns = 0  # how long the next step may take
        self._steps = 0
        self.awake = False

    def step(self, client: object, *, awaits_disk: bool = False) -> None:
        """Something small has come from this client, and perhaps waits for the disk now; or was sent to it."""
        now_ns = self._now_ns()
        if client is not self._client or now_ns - self._last_ns > self._limit_ns:
            self._client = client
            self._steps = 0
        else:
            self._steps += 1
            if self._steps >= _STEPS_MIN and not self.awake:
                self.awake = True
                self._loop.call_soon(self._look_out)
        self._last_ns = now_ns
        self._limit_ns = self._stay_ns * _DISK_TIMES if awaits_disk else self._stay_ns

    def _look_out(self) -> None:
        """With something to be called soon the loop does not sleep, but looks at its sockets and comes back."""
        if self._steps and self._now_ns() - self._last_ns <= self._limit_ns:
            _yield()
            self._loop.call_soon(self._look_out)
        else:
            self._client = None
            self.awake = False
