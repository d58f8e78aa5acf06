"""Work that goes on although the task that began it was cancelled or timed out, such as connecting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from millstream.errors import ConnectionLost

__all__ = ["Ongoing"]

T = TypeVar("T")


class Ongoing(Generic[T]):
    """The work is done once at a time; whoever comes while it is under way waits for the same result.

    Connecting is such work.  If it ended with the time limit of whoever asked first, a link on which connecting takes
    longer than that would never be established.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin
        self._task: asyncio.Task[T] | None = None

    async def result(self, wait_s: float | None = None) -> T:
        """What comes of it, or TimeoutError.  Raises ConnectionLost when it was cancelled."""
        task = self._task
        if task is None:
            task = self._task = asyncio.get_running_loop().create_task(self._begin())
            task.add_done_callback(self._ended)
        await asyncio.wait((task,), timeout=wait_s)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ConnectionLost("the connection was closed while it was being opened")
        return task.result()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None  # what came of it is for those who wait now; later it may not be true any more
        if not task.cancelled():
            task.exception()  # perhaps nobody waits
