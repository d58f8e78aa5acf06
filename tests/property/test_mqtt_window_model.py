"""The handshakes of a session against the simplest model of them: a list in the order of sending."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.mqtt.window import PUBLISHED, RELEASED, Incoming, InFlight, Outgoing

few_ids = st.integers(1, 8)


class OutgoingMachine(RuleBasedStateMachine):
    """A client that confirms in any order, repeats itself, confirms nonsense, and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Outgoing[str] = Outgoing(3)
        #: packet id, QoS, message, in the order of sending.
        self.sent: list[tuple[int, int, str]] = []
        #: Packet ids in the order of their PUBRECs.
        self.released: list[int] = []
        #: What the client of this connection has been sent and not confirmed.
        self.client: list[int] = []
        #: What it has never been sent, until it goes or another connection begins.
        self.waiting: list[int] = []
        self.count = 0

    def known(self, packet_id: int, qos: int, released: bool) -> str | None:
        for known_id, known_qos, ref in self.sent:
            if packet_id in self.waiting:
                continue
            if (known_id, known_qos) == (packet_id, qos) and (packet_id in self.released) == released:
                return ref
        return None

    def done(self, packet_id: int) -> None:
        self.sent = [entry for entry in self.sent if entry[0] != packet_id]
        self.released = [known for known in self.released if known != packet_id]
        self.client = [known for known in self.client if known != packet_id]
        self.waiting = [known for known in self.waiting if known != packet_id]

    @property
    def is_full(self) -> bool:
        """Whether the client must confirm others first, or has not seen all that another connection was sent."""
        begun = len(self.sent) - len(self.waiting)
        return begun >= self.window.limit or len(self.client) < begun

    @rule(qos=st.integers(1, 2))
    def send(self, qos: int) -> None:
        self.count += 1
        packet_id = self.window.send(qos, f"m{self.count}")
        assert (packet_id is None) == self.is_full
        if packet_id is not None:
            assert 1 <= packet_id <= 65_535
            assert packet_id not in [known for known, _, _ in self.sent]
            self.sent.append((packet_id, qos, f"m{self.count}"))
            self.client.append(packet_id)

    @rule(qos=st.integers(1, 2))
    def wait(self, qos: int) -> None:
        self.count += 1
        packet_id = self.window.wait(qos, f"m{self.count}")
        assert packet_id is not None
        assert packet_id not in [known for known, _, _ in self.sent]
        self.sent.append((packet_id, qos, f"m{self.count}"))
        self.waiting.append(packet_id)

    @rule()
    def go(self) -> None:
        if self.waiting:
            packet_id = self.waiting[0]
            assert self.window.go(packet_id) != self.is_full
            if not self.is_full:
                self.waiting.remove(packet_id)
                self.client.append(packet_id)

    @rule(packet_id=few_ids)
    def forget(self, packet_id: int) -> None:
        """It is gone: its message has expired, for example."""
        if packet_id in self.waiting:
            assert self.window.forget(packet_id) is not None
            self.done(packet_id)

    @rule(packet_id=few_ids)
    def puback(self, packet_id: int) -> None:
        expected = self.known(packet_id, 1, released=False)
        assert self.window.puback(packet_id) == expected
        if expected is not None:
            self.done(packet_id)

    @rule(packet_id=few_ids, ok=st.booleans())
    def pubrec(self, packet_id: int, ok: bool) -> None:
        expected = self.known(packet_id, 2, released=False) or self.known(packet_id, 2, released=True)
        assert self.window.pubrec(packet_id, ok) == expected
        if expected is not None and not ok:
            self.done(packet_id)
        elif expected is not None:
            if packet_id not in self.released:
                self.released.append(packet_id)
            if packet_id not in self.client:
                self.client.append(packet_id)

    @rule(packet_id=few_ids)
    def pubcomp(self, packet_id: int) -> None:
        expected = self.known(packet_id, 2, released=True)
        assert self.window.pubcomp(packet_id) == expected
        if expected is not None:
            self.done(packet_id)

    @rule(limit=st.integers(1, 6))
    def reconnect(self, limit: int) -> None:
        self.window.limit = limit
        self.client, self.waiting = [], []
        self.told(self.window.resume())
        assert [known for known in self.client if known in self.released] == self.released

    @rule()
    def make_room(self) -> None:
        self.told(self.window.resume_more())

    @rule()
    def restart(self) -> None:
        limit = self.window.limit
        facts = [list(fact) for fact in self.window.facts()]
        self.window = Outgoing(limit)
        self.window.restore(facts)
        # A slot of a PUBREL may have been taken by another; what is published keeps its order.
        self.sent = [(packet_id, qos, ref) for packet_id, _, qos, ref in facts]
        self.client, self.waiting = [], []
        self.told(self.window.resume())

    def told(self, again: list[InFlight[str]]) -> None:
        by_id = {packet_id: (qos, ref) for packet_id, qos, ref in self.sent}
        for packet_id, state, qos, ref in again:
            assert packet_id not in self.client
            assert (qos, ref) == by_id[packet_id]
            assert state == (RELEASED if packet_id in self.released else PUBLISHED)
            self.client.append(packet_id)
        begun = [entry for entry in self.sent if entry[0] not in self.waiting]
        published = [packet_id for packet_id, _, _ in begun if packet_id not in self.released]
        told = [packet_id for packet_id in self.client if packet_id in published]
        assert sorted(told) == sorted(published[: len(told)]), "the oldest first"
        again_published = [fact.packet_id for fact in again if fact.state == PUBLISHED]
        assert again_published == [packet_id for packet_id in published if packet_id in again_published]
        # Not more than the client takes, whatever it has confirmed without being asked; and not fewer.
        assert not again_published or len(self.client) <= self.window.limit
        assert len(self.client) == len(begun) or len(self.client) >= self.window.limit

    @invariant()
    def nothing_is_lost_or_in_two_places(self) -> None:
        facts = self.window.facts()
        # Those that are held back wait as well.
        assert self.window.waiting == len(self.sent) - len(self.client)
        assert len(self.window) == len(facts) == len(self.sent)
        assert sorted(fact.packet_id for fact in facts) == sorted(known for known, _, _ in self.sent)
        assert [fact.packet_id for fact in facts if fact.state == RELEASED] == self.released
        published = [entry[0] for entry in self.sent if entry[0] not in self.released]
        assert [fact.packet_id for fact in facts if fact.state == PUBLISHED] == published


class IncomingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.window = Incoming()
        self.open: set[int] = set()

    @rule(packet_id=few_ids)
    def receive(self, packet_id: int) -> None:
        assert self.window.receive(packet_id) == (packet_id not in self.open)
        self.open.add(packet_id)

    @rule(packet_id=few_ids)
    def release(self, packet_id: int) -> None:
        assert self.window.release(packet_id) == (packet_id in self.open)
        self.open.discard(packet_id)

    @rule()
    def restart(self) -> None:
        facts = self.window.facts()
        self.window = Incoming()
        self.window.restore(facts)

    @invariant()
    def the_open_ids_are_known(self) -> None:
        assert self.window.facts() == sorted(self.open)
        assert len(self.window) == len(self.open)


TestOutgoing = OutgoingMachine.TestCase
TestIncoming = IncomingMachine.TestCase
