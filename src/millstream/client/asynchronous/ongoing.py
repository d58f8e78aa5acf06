"""Work that goes on when whoever waited for it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from millstream.errors import ConnectionLost

__all__ = ["Ongoing"]

T = TypeVar("T")


class Ongoing(Generic[T]):
    """One thing that is being done at a time: who comes while it is under way waits for the same.

    To connect is such a thing.  If it ended with the patience of who asked first, a link on which it takes longer would
    never be joined.
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
