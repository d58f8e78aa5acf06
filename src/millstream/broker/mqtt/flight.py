"""What a session has sent and its client has not confirmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.broker.journal import Fact
from millstream.broker.mqtt.reading import Place
from millstream.mqtt.messages import Message

if TYPE_CHECKING:
    from millstream.broker.mqtt.shares import Share

__all__ = ["Flight"]


class Flight:
    """A message that was sent and is not confirmed."""

    __slots__ = ("is_lent", "message", "on_arrival", "place", "share", "was_sent")

    def __init__(
        self,
        message: Message | None,
        place: Place | None,
        share: Share | None = None,
        on_arrival: Callable[[bool], None] | None = None,
        *,
        is_lent: bool = False,
        was_sent: bool = True,
    ) -> None:
        #: Forgotten while the client is away, if there is a place to read it again.
        self.message = message
        self.place = place
        self.share = share
        #: Whether it came by a share, perhaps in an earlier run of the broker.
        self.is_lent = is_lent or share is not None
        #: Of a queue: called when the client has it, or does not want it.
        self.on_arrival = on_arrival
        #: Whether the client may have got it; nobody knows of an earlier run of the broker.
        self.was_sent = was_sent

    @property
    def has_no_position(self) -> bool:
        """Whether nothing but the fact of its flight says that the session has it."""
        return self.is_lent or (self.place is not None and not self.place.topic)

    def is_recorded(self, qos: int) -> bool:
        """Whether a session that lasts writes it down.

        A message that is in no log is not sent again by another run of the broker, but of QoS 2 its packet id must be
        known there: the client would take the next message under it for a repetition.
        """
        return self.place is not None or qos == 2

    def fact(self, packet_id: int, qos: int) -> Fact:
        """The fact that it was sent; for a message of the log it also records how far the position has come."""
        if self.place is None:
            return ["held", packet_id]
        return ["lent" if self.has_no_position else "sent", packet_id, qos, *self.place]
