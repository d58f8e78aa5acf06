"""The background thread of a producer, which keeps nothing alive while there is nothing for it to do.

As long as something is to be delivered the thread has the producer; who drops it meanwhile takes nothing away.
"""

from __future__ import annotations

import weakref
from typing import Final, Protocol

from millstream.client.blocking.bell import Bell
from millstream.client.blocking.knock import Knock
from millstream.client.blocking.transport import Transport

__all__ = ["IDLE_S", "woken", "work"]

#: The longest that it rests: it also answers the broker's question whether we are alive.
IDLE_S: Final = 1.0
#: Producers that were given something while they rested: who drops one now must not take it away from its thread.
woken: Final[set[object]] = set()


class Works(Protocol):
    """A producer, as far as its thread is concerned."""

    _ended: bool
    _transport: Transport | None

    def _work(self) -> None:
        """Until there is nothing to do, or the producer has ended."""


def work(found: weakref.ref[Works], wake: Knock, bell: Bell | None) -> None:
    """What the thread does, until the producer has ended or nobody has it any more.

    `bell` rings beside `wake`, where the thread that rests listens to the broker meanwhile.
    """
    while (producer := found()) is not None:
        producer._work()
        if producer._ended:
            woken.discard(producer)
            return
        transport = producer._transport
        del producer
        if transport is None or bell is None:
            wake.wait(IDLE_S)
        else:
            transport.wait(IDLE_S, bell.fileno())
            bell.clear()
        if transport is not None and found() is None:
            transport.close()
    if bell is not None:
        bell.close()
