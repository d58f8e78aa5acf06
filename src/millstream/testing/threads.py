"""Threads in virtual time: only one runs at any moment, and the loop decides which.

A thread of a simulation is a real one that holds a baton while it runs, and gives it back to the loop when it blocks or
ends.  So code that was written for threads, such as the client's membership in a group, runs here unchanged and always
in the same order; what it knows as `threading` is `STAND_IN`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, Final

from millstream.testing.processes import current_process

__all__ = ["STAND_IN", "Event", "Thread", "block", "wake"]


class _Killed(BaseException):
    """Thrown into a thread whose process is dead, at the end of the run."""


class Thread:
    """Looks like `threading.Thread`."""

    def __init__(
        self, target: Callable[..., object], name: str = "", daemon: bool = True, args: Iterable[Any] = ()
    ) -> None:
        self._target = target
        self._args = tuple(args)
        self._process = current_process()
        self._loop = self._process.loop
        # Two batons, each held by whoever waits for it: plain locks, because semaphores take several times as long.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._parked = False
        self._killed = False
        self._ended = Event()
        self._thread: threading.Thread | None = None
        self.name = name
        self.daemon = daemon

    # --- what its users call -------------------------------------------------------------------------------------

    def start(self, after_s: float = 0.0) -> None:
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=self.name, daemon=True)
        self._process.threads[self] = None
        self._loop.call_later(after_s, self._begin)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    # --- the baton -----------------------------------------------------------------------------------------------

    def park(self, timeout_s: float | None) -> None:
        """Called by the thread itself: let others run until `wake`, or until time is up."""
        timer = None if timeout_s is None else self._loop.call_later(max(0.0, timeout_s), self._resume)
        self._parked = True
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise _Killed
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        if self._parked and self._process.alive:
            self._loop.call_soon(self._resume, context=self._process.context)

    def end(self) -> None:
        """Unwind what is left of it; nothing it does any more reaches anybody."""
        if self._thread is not None and self._thread.is_alive():
            self._killed = True
            self._go.release()
            self._thread.join()

    def _begin(self) -> None:
        assert self._thread is not None
        self._thread.start()
        self._back.acquire()

    def _resume(self) -> None:
        if self._parked:
            self._parked = False
            self._go.release()
            self._back.acquire()

    def _run(self) -> None:
        _mine.thread = self
        try:
            self._target(*self._args)
        except _Killed:
            return
        except BaseException as error:
            self._loop.call_exception_handler({"message": f"thread {self.name} failed", "exception": error})
        finally:
            if not self._killed:
                self._ended.set()
                self._process.threads.pop(self, None)
            self._back.release()


class _Mine(threading.local):
    """What the calling thread is.  Not a context variable: `asyncio.to_thread` runs things in other contexts."""

    thread: Thread | None = None


_mine: Final = _Mine()


def block(places: Sequence[list[Thread]], reached: Callable[[], bool], timeout_s: float | None) -> bool:
    """Have the calling thread wait, at places where others wake it, until something is true or time is up."""
    if reached():
        return True
    if timeout_s is not None and timeout_s <= 0:
        return False
    thread = _mine.thread
    assert thread is not None, "only a thread may block; the loop must not"
    loop = current_process().loop
    deadline_s = None if timeout_s is None else loop.time() + timeout_s
    for place in places:
        place.append(thread)
    try:
        while not reached():
            left_s = None if deadline_s is None else deadline_s - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            thread.park(left_s)
    finally:
        for place in places:
            place.remove(thread)
    return True


def wake(place: list[Thread]) -> None:
    for thread in place:
        thread.wake()


class Event:
    """Looks like `threading.Event`."""

    def __init__(self) -> None:
        self._flag = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        wake(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        return block((self._waiting,), self.is_set, timeout)


def _current_thread() -> Thread | threading.Thread:
    return _mine.thread or threading.current_thread()


#: In the place of the module `threading`.  Locks are real: nobody holds one while he gives the baton away.
STAND_IN: Final = SimpleNamespace(Thread=Thread, Event=Event, RLock=threading.RLock, current_thread=_current_thread)
