"""Processes within one event loop: what was started from one coroutine, and can be killed as a whole.

Tasks, callbacks, timers and threads carry their process in their context.  Killing it takes place between any two steps
and without a last word, as `kill -9` or a power cut do it: no `finally`, no `except`, no goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.clock import Clock

if TYPE_CHECKING:
    from millstream.testing.threads import Thread
    from millstream.testing.virtual_loop import VirtualLoop

__all__ = ["Process", "current_process", "process_of"]

T = TypeVar("T")


class Process:
    """Whatever runs in its context, with a wall clock of its own."""

    def __init__(self, loop: VirtualLoop, name: str, clock: Clock) -> None:
        self.name = name
        self.alive = True
        self.loop = loop
        self.clock = clock
        self.threads: dict[Thread, None] = {}
        #: Called when the process is killed: what its machine still does for it.
        self.on_death: list[Callable[[], None]] = []
        self.context = copy_context()
        self.context.run(_current.set, self)
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._remains: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.create_task(coroutine, name=self.name, context=self.context)

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        if not self.alive:
            self._remains.append(task)  # made by the step that was on the stack when it was killed

    def kill(self) -> None:
        """From here on not a step more.  May be called from within, for example by a disk that loses power."""
        if not self.alive:
            return
        self.alive = False
        self.loop.drop(self)
        # Whoever is on the stack right now goes on to the end of this step; what that schedules is dropped as well.
        self.loop.call_soon(self.loop.drop, self, context=copy_context())
        # Nobody may collect what is left before the end of the run: that would execute its `finally` blocks.
        self._remains = list(self._tasks)
        for tell in list(self.on_death):
            tell()

    def bury(self) -> None:
        """At the end of the run: end what was left in the middle, where it cannot do anything any more."""
        self.alive = False
        for thread in list(self.threads):
            thread.end()
        for task in self._remains or list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done():
                with contextlib.suppress(BaseException), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # some had not even begun
                    task.get_coro().close()
        self._remains.clear()


_current: ContextVar[Process] = ContextVar("millstream-process")


def current_process() -> Process:
    """The process of the code that asks."""
    return _current.get()


def process_of(context: Context | None) -> Process | None:
    """The process that something in this context (or here) belongs to, if any."""
    return _current.get(None) if context is None else context.get(_current)
