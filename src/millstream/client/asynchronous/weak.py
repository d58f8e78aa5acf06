"""What the event loop holds must not keep alive what it is about: who drops a queue, stream or subscription, ends it.

The loop holds every connection, and a connection holds whom it calls back.  What somebody waits for is held by his task
all the same: every wait has a timer, and a timer has the task.
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
    """Waits for a connection, then begins; not with what was dropped while the broker was away."""
    found = weakref.ref(owner)

    async def begin() -> None:
        connection = await link.get(None)
        owner = found()
        if owner is None:
            raise ConnectionLost("nobody wants this connection any more")
        await owner._begin(connection)

    return Ongoing(begin)
