"""Who is using the broker right now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from millstream.access.rights import EVERYTHING, Access
from millstream.broker.logs import details
from millstream.errors import MillstreamError
from millstream.wire.deliveries import Delivery

__all__ = ["Session"]

_log = structlog.get_logger("millstream.sessions")


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
    #: By which people name it, as long as it is there.
    id: str = ""
    #: Why it ended, if it was not the client who closed it.
    why: str = ""

    def opened(self) -> None:
        """Log that the client has come."""
        if details.on:
            _log.debug("client connected", **self._who(), key=self.access.key_id)

    def close(self) -> None:
        """The client has gone.  Logged once, however often this is called."""
        if not self.closed:
            self.closed = True
            if details.on:
                _log.debug("client gone", **self._who(), reason=self.why or "the client closed the connection")

    def _who(self) -> dict[str, str]:
        return {
            "door": self.door,
            "client": self.client_id,
            "address": self.address,
            "namespace": self.namespace,
        }
