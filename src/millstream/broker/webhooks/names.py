"""Looks up the names of receivers, in threads: a name that does not answer keeps only those waiting who asked for it.

A lookup without an answer holds its thread for as long as the system's resolver is patient, which may be half a minute,
and there are not threads without end.  So there are lanes, each with threads of its own, and what is known of a name
says which one it takes: names that answered at once, names that nobody has asked for yet, and names that have kept
somebody waiting, until they answer at once again minutes later.  However many of these there are, the first do not meet
them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

__all__ = ["Names"]

#: Of each lane.
_THREADS: Final = 16
#: A lookup that takes longer makes its name a slow one, for so long at least.
_SLOW_S: Final = 1.0
_SLOW_FOR_S: Final = 600.0
#: More than there can be webhooks.
_REMEMBERED_MAX: Final = 10_000

_Lane = Literal["quick", "new", "slow"]


class Names:
    """Used on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads: dict[_Lane, ThreadPoolExecutor] = {}
        #: Under way; shared by all who ask, so that a name that takes long holds one thread and not all of them.
        self._lookups: dict[str, asyncio.Future[list[str]]] = {}
        #: Until when a name is a slow one at least, by the loop's clock; 0 if it is none; the least used first.
        self._slow_until: OrderedDict[str, float] = OrderedDict()

    async def addresses(self, host: str) -> list[str]:
        """All addresses of a host, or the one that it is.  Raises OSError."""
        address = _address_in(host)
        if address:
            return address
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = self._loop.create_task(self._look_up(host))
            lookup.add_done_callback(lambda done: self._looked_up(host, done))
        return await asyncio.shield(lookup)

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for lookup in self._lookups.values():
            lookup.cancel()

    async def _look_up(self, host: str) -> list[str]:
        lane = self._lane(host)
        threads = self._threads.get(lane)
        if threads is None:
            threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"millstream-{lane}-names")
            self._threads[lane] = threads
        found, took_s = await self._loop.run_in_executor(threads, _timed, host)
        now_s = self._loop.time()
        if took_s > _SLOW_S:
            self._slow_until[host] = now_s + _SLOW_FOR_S
        elif self._slow_until.get(host, 0) <= now_s:
            self._slow_until[host] = 0
        self._slow_until.move_to_end(host)
        if len(self._slow_until) > _REMEMBERED_MAX:
            self._slow_until.popitem(last=False)
        if isinstance(found, OSError):
            raise found
        return found

    def _lane(self, host: str) -> _Lane:
        slow_until = self._slow_until.get(host)
        if slow_until is None:
            return "new"
        # Also when its time is over: one that is dead is asked so seldom that it would be over each time.
        return "slow" if slow_until else "quick"

    def _looked_up(self, host: str, lookup: asyncio.Future[list[str]]) -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            lookup.exception()  # all who asked may have given up


def _timed(host: str) -> tuple[list[str] | OSError, float]:
    """What is found, or why nothing is, and how long it took; in a thread, so without the time in line for it."""
    began_s = time.monotonic()
    found: list[str] | OSError
    try:
        found = _resolve(host)
    except OSError as problem:
        found = problem
    return found, time.monotonic() - began_s


def _resolve(host: str) -> list[str]:
    return _ask(host)


def _address_in(host: str) -> list[str]:
    """The address that is written there, in one of the ways that there are; nobody is asked."""
    try:
        return _ask(host, socket.AI_NUMERICHOST)
    except OSError:
        return []


def _ask(host: str, flags: int = 0) -> list[str]:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:  # how it says that a part of the name is empty or too long
        raise OSError("no such name can exist") from None
    return list(dict.fromkeys(str(row[4][0]) for row in rows))
