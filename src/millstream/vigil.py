"""Staying awake for what comes next, while it comes at once.

A program that publishes a message, waits for the answer and publishes the next has itself and the broker do nothing for
some ten microseconds at a time, waiting for each other or for the disk.  Going to sleep for that and being woken takes
longer than the request itself, on virtual machines several times as long, and costs more processor time than waiting
awake.  So while requests and answers go on at such a pace, a loop looks for what comes next instead of sleeping, and
lets every other process go first.  A pause ends it, as does a second client of a broker: with several there is always
something to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

__all__ = ["Pace", "Vigil"]

#: So many steps at that pace (a request is one, an answer another) make it likely that the next one follows.
_STEPS_MIN: Final = 32
_STEPS_MAX: Final = 4 * _STEPS_MIN
#: A good disk takes longer to sync than a client to ask again; how much longer it may take.
_DISK_TIMES: Final = 2
_yield: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: None)


class Pace:
    """Whether steps follow each other so promptly that it pays to wait for the next one awake.

    One that is late takes away half of what the prompt ones have earned: one in twenty ends nothing, three in a row do.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps = 0

    @property
    def brisk(self) -> bool:
        return self._steps >= _STEPS_MIN

    def note(self, *, prompt: bool, steps: int = 1) -> None:
        if not prompt:
            self._steps //= 2
        elif self._steps < _STEPS_MAX:
            self._steps += steps


class Vigil:
    """Kept by whoever has a loop: a door of the broker for its clients, a client for the broker's answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stay_us: int, now_ns: Callable[[], int] = monotonic_ns) -> None:
        """`stay_us` is the longest that is waited for a request; a disk may take twice as long.  0 for never."""
        self._loop = loop
        self._stay_ns = stay_us * 1000
        self._now_ns = now_ns
        self._client: object = None
        self._last_ns = 0
        self._limit_ns = 0  # how long the next step may take
        self._pace = Pace()
        self.awake = False

    def step(self, client: object, *, awaits_disk: bool = False) -> None:
        """A small request of this client is on its way, and perhaps waits for the disk now; or its answer is."""
        now_ns = self._now_ns()
        if client is not self._client:
            self._client = client
            self._pace = Pace()
        else:
            self._pace.note(prompt=now_ns - self._last_ns <= self._limit_ns)
            if self._pace.brisk and not self.awake:
                self.awake = True
                self._loop.call_soon(self._look_out)
        self._last_ns = now_ns
        self._limit_ns = self._stay_ns * _DISK_TIMES if awaits_disk else self._stay_ns

    def forget(self, client: object) -> None:
        """A client is gone: stop waiting for it, and forget its pace."""
        if client is self._client:
            self._client = None
            self._pace = Pace()

    def _look_out(self) -> None:
        """With something to be called soon the loop does not sleep, but looks at its sockets and comes back."""
        if self._pace.brisk and self._now_ns() - self._last_ns <= self._limit_ns:
            _yield()
            self._loop.call_soon(self._look_out)
        else:
            self.awake = False
