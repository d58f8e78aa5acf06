"""The handshakes of one session: which messages are on their way in either direction, and how far each has come.

Both outlive connections.  A session with nothing on its way costs a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = ["PACKET_ID_MAX", "PUBLISHED", "RELEASED", "InFlight", "Incoming", "Outgoing"]

R = TypeVar("R")

PACKET_ID_MAX: Final = 65_535
#: Sent as PUBLISH; the client owes a PUBACK or a PUBREC.
PUBLISHED: Final = 1
#: The client has it (QoS 2) and was told to let go of the packet id; it owes a PUBCOMP.
RELEASED: Final = 2


class InFlight(NamedTuple, Generic[R]):
    """A message that a client has not confirmed."""

    packet_id: int
    state: int
    qos: int
    #: How the session finds the message again; never None.
    ref: R


class Outgoing(Generic[R]):
    """Messages of QoS 1 and 2 on their way to the client.

    Every step that is confirmed can be repeated: replaying what was recorded takes the same methods.
    """

    __slots__ = ("_held", "_last_id", "_released", "_sent", "_waiting", "limit")

    def __init__(self, limit: int = PACKET_ID_MAX) -> None:
        #: The client's receive maximum; counts what it has not confirmed.
        self.limit = limit
        #: QoS and message by packet id, in the order in which they were sent first.
        self._sent: dict[int, tuple[int, R]] = {}
        #: Those of them that are released, in the order of the PUBRECs.
        self._released: dict[int, None] | None = None
        #: Those of them that this connection has not seen yet, because the client's receive maximum has become smaller.
        self._held: dict[int, None] | None = None
        #: Those of them that have not been sent at all, and go out when it is their turn.
        self._waiting: dict[int, None] | None = None
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._sent

    @property
    def room(self) -> int:
        """How many messages may be sent now."""
        return 0 if self._held else max(0, self.limit - self._on_the_way)

    @property
    def waiting(self) -> int:
        """How many of them the client has not been sent for want of room, in this connection or at all."""
        return len(self._held or ()) + len(self._waiting or ())

    @property
    def _on_the_way(self) -> int:
        return len(self._sent) - self.waiting

    @property
    def is_nearly_full(self) -> bool:
        """Whether more than half of what may be sent is, but not all."""
        return self.room > 0 and 2 * len(self._sent) > self.limit

    @property
    def is_held(self) -> bool:
        """Whether `resume_more` has something to send, now or later."""
        return self._held is not None

    def send(self, qos: int, ref: R) -> int | None:
        """The packet id under which a message goes out; None if the client must confirm others first."""
        if self._held or len(self._sent) - len(self._waiting or ()) >= self.limit:
            return None
        return self._take_id(qos, ref)

    def wait(self, qos: int, ref: R) -> int | None:
        """The packet id under which a message is to go out later; None if all of them are in use.

        It is on its way like any other, but takes no room before `go`.
        """
        packet_id = self._take_id(qos, ref)
        if packet_id is not None:
            if self._waiting is None:
                self._waiting = {}
            self._waiting[packet_id] = None
        return packet_id

    def go(self, packet_id: int) -> bool:
        """Whether a message that waits is sent now; otherwise the client must confirm others first."""
        if not self.room or self._waiting is None or packet_id not in self._waiting:
            return False
        self._stop_waiting(packet_id)
        return True

    def _stop_waiting(self, packet_id: int) -> None:
        if self._waiting is not None:
            self._waiting.pop(packet_id, None)
            self._waiting = self._waiting or None

    def _take_id(self, qos: int, ref: R) -> int | None:
        sent = self._sent
        if len(sent) >= PACKET_ID_MAX:
            return None
        packet_id = self._last_id
        while True:
            packet_id = packet_id % PACKET_ID_MAX + 1
            if packet_id not in sent:
                break
        self._last_id = packet_id
        sent[packet_id] = (qos, ref)
        return packet_id

    def puback(self, packet_id: int) -> R | None:
        """A message of QoS 1 has arrived.  The message, or None if no PUBACK of this id was expected."""
        known = self._expected(packet_id)
        return self.forget(packet_id) if known is not None and known[0] == 1 else None

    def pubrec(self, packet_id: int, ok: bool) -> R | None:
        """The client has a message of QoS 2, or does not want it (not `ok`), and then the handshake ends here.

        The message, also when the PUBREC is a repetition; None if no PUBREC of this id was expected.
        """
        known = self._expected(packet_id)
        if known is None or known[0] != 2:
            return None
        if not ok:
            return self.forget(packet_id)
        if self._held is not None:
            self._held.pop(packet_id, None)
        if self._released is None:
            self._released = {}
        self._released.setdefault(packet_id)
        return known[1]

    def _expected(self, packet_id: int) -> tuple[int, R] | None:
        """What a client may confirm: not what it has never been sent."""
        return None if self._waiting is not None and packet_id in self._waiting else self._sent.get(packet_id)

    def pubcomp(self, packet_id: int) -> R | None:
        """A handshake of QoS 2 is over.  The message, or None if no PUBCOMP of this id was expected."""
        return self.forget(packet_id) if self.is_released(packet_id) else None

    def is_released(self, packet_id: int) -> bool:
        return self._released is not None and packet_id in self._released

    def forget(self, packet_id: int) -> R | None:
        """The packet id is free again, however far its handshake was."""
        known = self._sent.pop(packet_id, None)
        if known is None:
            return None
        if self._released is not None:
            self._released.pop(packet_id, None)
            self._released = self._released or None
        if self._held is not None:
            self._held.pop(packet_id, None)
            self._held = self._held or None
        self._stop_waiting(packet_id)
        if not self._sent:
            self._sent = {}  # a dict that was large stays large
        return known[1]

    def facts(self) -> list[InFlight[R]]:
        """Everything on its way: PUBLISHes in the order in which they went out, PUBRELs in that of their PUBRECs.

        Where both orders differ, a PUBREL takes the place of another.
        """
        released = iter(self._released or ())
        facts: list[InFlight[R]] = []
        for packet_id, (qos, ref) in self._sent.items():
            if self.is_released(packet_id):
                first = next(released)
                facts.append(InFlight(first, RELEASED, *self._sent[first]))
            else:
                facts.append(InFlight(packet_id, PUBLISHED, qos, ref))
        return facts

    def restore(self, facts: Iterable[Sequence[Any]]) -> None:
        """Takes up what `facts` said, in that order; single facts may follow as they were recorded.

        A PUBLISH under an id that is in use ends what was there: the id must have been free when it was sent.
        """
        for packet_id, state, qos, ref in facts:
            if state == PUBLISHED:
                self.forget(packet_id)
            self._sent.setdefault(packet_id, (qos, ref))
            if state == RELEASED:
                self.pubrec(packet_id, ok=True)
            self._last_id = packet_id

    def resume(self) -> list[InFlight[R]]:
        """What a connection must be sent first when it continues the session.

        PUBLISHes beyond the client's receive maximum are held back; `resume_more` has them when there is room.  So are
        those that have waited.
        """
        facts = self.facts()
        self._waiting = None
        self._held = {fact.packet_id: None for fact in facts if fact.state == PUBLISHED} or None
        taken = {fact.packet_id for fact in self.resume_more()}
        return [fact for fact in facts if fact.state == RELEASED or fact.packet_id in taken]

    def resume_more(self) -> list[InFlight[R]]:
        """What was held back and may be sent now.  Nothing else is sent before it."""
        more: list[InFlight[R]] = []
        while self._held and self._on_the_way < self.limit:
            packet_id = next(iter(self._held))
            del self._held[packet_id]
            more.append(InFlight(packet_id, PUBLISHED, *self._sent[packet_id]))
        self._held = self._held or None
        return more


class Incoming:
    """Packet ids of QoS 2 that the client has sent and not released: the same message is not taken twice."""

    __slots__ = ("_ids", "limit")

    def __init__(self, limit: int = PACKET_ID_MAX) -> None:
        #: Our receive maximum.
        self.limit = limit
        self._ids: set[int] | None = None

    def __len__(self) -> int:
        return len(self._ids or ())

    def __contains__(self, packet_id: int) -> bool:
        return self._ids is not None and packet_id in self._ids

    def receive(self, packet_id: int) -> bool:
        """Whether a PUBLISH is new and not a repetition; MqttViolation when the client has sent too many."""
        if self._ids is None:
            self._ids = set()
        if packet_id in self._ids:
            return False
        if len(self._ids) >= self.limit:
            raise MqttViolation(
                Reason.RECEIVE_MAXIMUM_EXCEEDED,
                f"more than {self.limit} messages of QoS 2 are on their way; wait for PUBCOMP before the next",
            )
        self._ids.add(packet_id)
        return True

    def release(self, packet_id: int) -> bool:
        """Whether the id of a PUBREL was known; the next PUBLISH with it is another message."""
        if self._ids is None or packet_id not in self._ids:
            return False
        self._ids.discard(packet_id)
        if not self._ids:
            self._ids = None
        return True

    def facts(self) -> list[int]:
        return sorted(self._ids or ())

    def restore(self, packet_ids: Iterable[int]) -> None:
        self._ids = {*(self._ids or ()), *packet_ids} or None

    def resume(self, limit: int) -> None:
        """A connection begins: it may send as much as any other, whatever the one before has left open."""
        self.limit = limit + min(len(self), limit)
