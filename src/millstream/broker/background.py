"""Work that goes on by itself while the broker runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from millstream.errors import MillstreamError

__all__ = ["comes_within", "every", "to_its_end"]

T = TypeVar("T")

_log = structlog.get_logger("millstream.broker")


async def every(seconds: float, work: Callable[[], Awaitable[None]], stopping: asyncio.Task[Any]) -> None:
    """Do something again and again until `stopping` is done; it is never cut off in the middle.

    Not `asyncio.wait`, which takes longer than most of what is done here, many times a second in a broker at rest.
    """
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not turn.done():
            turn.set_result(None)

    stopping.add_done_callback(wake)
    while not stopping.done():
        turn = loop.create_future()
        timer = loop.call_later(seconds, wake)
        try:
            await turn
        finally:
            timer.cancel()
        if stopping.done():
            return
        try:
            await work()
        except MillstreamError as error:
            _log.error("background work failed", work=work.__name__, code=error.code, reason=str(error))
        except Exception:
            _log.exception("background work failed", work=work.__name__)


async def comes_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, for so long at most; returns whether it came.

    Not `asyncio.wait_for`: in Python 3.11 that swallows a cancellation which comes in the same moment as the event, and
    the task that was to be ended goes on for ever.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do something that must not be left half done: a cancellation takes effect when it is over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.warning("what was cancelled has failed", reason=str(problem))
        raise
