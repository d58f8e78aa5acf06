"""Who is using the broker right now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream.access.rights import EVERYTHING, Access
from millstream.errors import MillstreamError
from millstream.wire.deliveries import Delivery

__all__ = ["Session"]


@dataclass(eq=False, slots=True)
class Session:
    """One client of the broker, whichever door it came through."""

    namespace: str
    client_id: str
    address: str
    #: Sends the client something it did not ask for.
    push: Callable[[object], None]
    #: Sends messages of a subscription, unless the client is slow to read; then the answer is False.
    deliver: Callable[[Delivery], bool]
    #: Which door it came through, and when.
    door: str = "native"
    opened_ms: int = 0
    #: What it may do: everything, unless keys are asked for.
    access: Access = EVERYTHING
    #: Ends the connection and says why, where there is one.
    end: Callable[[MillstreamError], None] | None = None
    #: It has gone: what a call opens for it from now on is closed again.
    closed: bool = False
