"""Tasks that wait for messages: only as many are woken as there are messages for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import islice

__all__ = ["Arrivals"]


class Arrivals:
    """Waiting tasks, woken in the order in which they came.  An Event would wake a hundred tasks for one message."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    @contextlib.contextmanager
    def expecting(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when something has come since it was made."""
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[arrival] = None
        try:
            yield arrival
        except BaseException:
            if arrival.done() and not arrival.cancelled():
                self.wake(1)  # it was meant for us, and we are gone
            raise
        finally:
            self._waiting.pop(arrival, None)

    def wake(self, most: int | None = None) -> None:
        patient = (arrival for arrival in self._waiting if not arrival.done())
        for arrival in list(islice(patient, most)):
            arrival.set_result(None)
