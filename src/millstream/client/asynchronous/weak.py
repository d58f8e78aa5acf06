"""Weak references, so that dropping a queue, stream or subscription without closing it ends it.

The event loop refers to every connection, and a connection to whom it calls back.  With ordinary references an object
that the program has dropped would therefore live, and hold messages, for ever.  One that somebody is waiting on stays:
every wait has a timer, the loop refers to the timer, and the timer to the waiting task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.asynchronous.ongoing import Ongoing
from millstream.errors import ConnectionLost

__all__ = ["beginning", "weakly"]


class Begins(Protocol):
    async def _begin(self, connection: AsyncConnection) -> None:
        """Begin anew on this connection."""


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Calls a method as long as its object is there."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = found()
        if bound is not None:
            bound(*arguments)

    return call


def beginning(owner: Begins, link: AsyncLink) -> Ongoing[None]:
    """Work that waits for a connection and then lets the owner begin on it, unless the owner was dropped meanwhile."""
    found = weakref.ref(owner)

    async def begin() -> None:
        connection = await link.get(None)
        owner = found()
        if owner is None:
            raise ConnectionLost("nobody wants this connection any more")
        await owner._begin(connection)

    return Ongoing(begin)
