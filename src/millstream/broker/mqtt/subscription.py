"""What a session is subscribed to."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["QueueSubscription", "Subscription"]


class Subscription(NamedTuple):
    """One filter of a session, with its options."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class QueueSubscription(NamedTuple):
    """A filter that makes the client a consumer of a queue group."""

    filter: str
    group: str
    qos: int
    identifier: int = 0
