"""SIGINT and SIGTERM ask everything that runs to stop, however many began to run and in whatever order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["stop_signals"]

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

#: Those that run, and where.
_running: Final[dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}
#: What the signals meant before the first of them began.
_before: Final[dict[int, Any]] = {}


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, if this is the main thread.  The second has its usual effect.

    The loop has one handler per signal, and forgets the one that was there before.  So these are handlers of the
    process, and what an application has given to its loop is called as well.
    """
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    _running[stop] = asyncio.get_running_loop()
    try:
        if not _before:
            _begin()
        yield stop
    finally:
        _running.pop(stop, None)
        if not _running:
            _restore()


def _begin() -> None:
    for number in _STOP_SIGNALS:
        _before[number] = signal.getsignal(number)
        signal.signal(number, _on_signal)


def _on_signal(*_: object) -> None:
    _restore()
    while _running:
        stop, loop = _running.popitem()
        with contextlib.suppress(RuntimeError):  # a loop that was closed in the middle of it all
            loop.call_soon_threadsafe(stop.set)  # it may be asleep


def _restore() -> None:
    while _before:
        number, handler = _before.popitem()
        if signal.getsignal(number) is _on_signal:  # else somebody has come since
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
