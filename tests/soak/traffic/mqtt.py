"""MQTT: publishers and subscribers with QoS 1 and 2, whose sessions outlive connections and their own processes.

The standard asks clients to keep what is unconfirmed.  These keep it in their ledgers, so that a client that is killed
goes on with the same packet ids as if nothing had happened.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from typing import Final

from millstream.mqtt.packets import (
    V4,
    V5,
    Connect,
    Disconnect,
    Packet,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
)
from tests.e2e.mqtt.support import Address, Closed, Silence, Wire
from tests.soak.ledger import Ledger, read_ledger
from tests.soak.traffic.world import Worker

TOPIC: Final = "soak"
#: Name, version and QoS of each client.
PUBLISHERS: Final = (("p1", V5, 1), ("p2", V5, 2), ("p3", V4, 2))
READERS: Final = (("r1", V5, 1), ("r2", V4, 2), ("r3", V5, 2))
WINDOW: Final = 10
LATE: Final = 5
ANSWER_S: Final = 15.0


class Session:
    """A client that comes back, whatever happens; each runs on a thread of its own."""

    def __init__(self, worker: Worker, name: str, version: int, qos: int) -> None:
        self.worker = worker
        self.name = name
        self.version = version
        self.qos = qos
        path = worker.world.ledgers / f"mqtt-{name}.tsv"
        self.begun = False
        for note in read_ledger(path):
            self.begun |= note.what == "begun"
            self.remember(note.what, note.name, note.first, note.more)
        self.ledger = Ledger(path)

    def note(self, what: str, name: str = "", number: int = 0, more: str = "") -> None:
        self.ledger.note(what, TOPIC, name or self.name, number, number, more)

    def run(self) -> None:
        while not self.done():
            try:
                wire = self._connect()
            except (Closed, OSError, AssertionError):  # nobody there, or nobody who answers
                self.worker.over.wait(0.05)
                time.sleep(0.02)
                continue
            try:
                self.serve(wire)
            except (Closed, OSError, Silence):
                continue
            finally:
                wire.drop()

    def _connect(self) -> Wire:
        host, _, port = self.worker.world.mqtt.rpartition(":")
        wire = Wire(Address(host, int(port)), self.version)
        properties = Properties(session_expiry_s=7200, receive_maximum=20) if self.version == V5 else Properties()
        try:
            answer = wire.connect(Connect(self.version, self.name, False, 0, None, None, None, properties), ANSWER_S)
            if answer.reason:
                raise Closed(f"refused: {answer}")
        except BaseException:
            wire.drop()
            raise
        if self.begun and not answer.session_present:
            self.note("forgotten")
        return wire

    def remember(self, what: str, name: str, number: int, more: str) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        raise NotImplementedError

    def serve(self, wire: Wire) -> None:
        raise NotImplementedError


class Publisher(Session):
    """Numbers, several under way at a time."""

    def __init__(self, worker: Worker, name: str, version: int, qos: int) -> None:
        self._next = 0
        #: By packet id, in the order of sending: the number of the message, or None once it was received.
        self._unconfirmed: OrderedDict[int, int | None] = OrderedDict()
        self._refused: deque[int] = deque()
        super().__init__(worker, name, version, qos)
        last = next(reversed(self._unconfirmed), 0)
        self._packet_ids = itertools.cycle(range(1, 200))
        while last and next(self._packet_ids) != last:
            pass

    def remember(self, what: str, name: str, number: int, more: str) -> None:
        if what == "sent":
            self._next = max(self._next, number + 1)
            if number in self._refused:
                self._refused.remove(number)
            self._unconfirmed[int(more)] = number
        elif what == "received":
            self._unconfirmed[int(more)] = None
        elif what == "sure":
            self._unconfirmed.pop(int(more), None)
        elif what == "refused":
            self._unconfirmed.pop(int(more), None)
            self._refused.append(number)

    def done(self) -> bool:
        return self.worker.over.is_set() and not self._unconfirmed and not self._refused

    def serve(self, wire: Wire) -> None:
        # Repetitions in their order: first what was received already, then what was not (4.4.0-1).
        for packet_id, number in self._unconfirmed.items():
            wire.send(Pubrel(packet_id) if number is None else self._publish(packet_id, number, dup=True))
        if not self.begun:
            self.note("begun")
            self.begun = True
        answered_s = next_s = time.monotonic()
        while not self.done():
            now_s = time.monotonic()
            if now_s >= next_s and (self._refused or not self.worker.over.is_set()):
                next_s = now_s + self.worker.rng.uniform(0.0, 1.0) / self.worker.world.pace
                for _ in range(self.worker.rng.choice((1, 3, 8))):
                    if len(self._unconfirmed) < WINDOW:
                        self._send(wire)
            try:
                packet = wire.next(max(0.001, min(next_s - now_s, 0.1)))
            except Silence:
                if self._unconfirmed and time.monotonic() > answered_s + ANSWER_S:
                    raise
                continue
            answered_s = time.monotonic()
            self._take(wire, packet)

    def _send(self, wire: Wire) -> None:
        number = self._refused[0] if self._refused else self._next
        packet_id = next(each for each in self._packet_ids if each not in self._unconfirmed)
        self.note("sent", number=number, more=str(packet_id))
        self.remember("sent", self.name, number, str(packet_id))
        wire.send(self._publish(packet_id, number))

    def _publish(self, packet_id: int, number: int, dup: bool = False) -> Publish:
        return Publish(f"{TOPIC}/{self.name}", b"%d" % number, self.qos, dup=dup, packet_id=packet_id)

    def _take(self, wire: Wire, packet: Packet) -> None:
        if isinstance(packet, Disconnect):
            raise Closed("the broker says farewell")
        assert isinstance(packet, Puback | Pubrec | Pubcomp), f"unexpected: {packet}"
        packet_id = packet.packet_id
        if packet_id not in self._unconfirmed:
            return
        number = self._unconfirmed[packet_id]
        if packet.reason >= 0x80 and not isinstance(packet, Pubcomp):
            assert number is not None, f"refused after it was received: {packet}"
            self.note("refused", number=number, more=str(packet_id))
            self.remember("refused", self.name, number, str(packet_id))
            time.sleep(0.05)
        elif isinstance(packet, Pubrec):
            if number is not None:
                self.note("received", number=number, more=str(packet_id))
                self._unconfirmed[packet_id] = None
            wire.send(Pubrel(packet_id))
        else:
            self.note("sure", number=-1 if number is None else number, more=str(packet_id))
            del self._unconfirmed[packet_id]


class Reader(Session):
    """Everything that the publishers say; some of it is confirmed late."""

    def __init__(self, worker: Worker, name: str, version: int, qos: int) -> None:
        #: QoS 2: received and not released.
        self._received: set[int] = set()
        self._late: deque[Packet] = deque()
        super().__init__(worker, name, version, qos)

    def remember(self, what: str, name: str, number: int, more: str) -> None:
        if what == "got2":
            self._received.add(int(more))
        elif what == "released":
            self._received.discard(int(more))

    def done(self) -> bool:
        return self.worker.over.is_set()

    def serve(self, wire: Wire) -> None:
        self._late.clear()
        if not self.begun:
            wire.subscribe(f"{TOPIC}/#", qos=self.qos)
            self.note("begun")
            self.begun = True
        while not self.done():
            try:
                packet = wire.next(0.1)
            except Silence:
                self._confirm(wire, 0)
                continue
            self._take(wire, packet)
            self._confirm(wire, self.worker.rng.choice((0, LATE)))
        self._confirm(wire, 0)

    def _take(self, wire: Wire, packet: Packet) -> None:
        if isinstance(packet, Disconnect):
            raise Closed("the broker says farewell")
        if isinstance(packet, Pubrel):
            if packet.packet_id in self._received:
                self.note("released", more=str(packet.packet_id))
                self._received.discard(packet.packet_id)
            wire.send(Pubcomp(packet.packet_id))
            return
        assert isinstance(packet, Publish), f"unexpected: {packet}"
        publisher, number = packet.topic.rpartition("/")[2], int(packet.payload)
        if packet.qos == 2:
            if packet.packet_id not in self._received:
                self.note("got2", publisher, number, str(packet.packet_id))
                self._received.add(packet.packet_id)
            self._late.append(Pubrec(packet.packet_id))
        else:
            self.note("got1", publisher, number, str(packet.packet_id))
            if packet.qos == 1:
                self._late.append(Puback(packet.packet_id))

    def _confirm(self, wire: Wire, leave: int) -> None:
        while len(self._late) > leave:
            wire.send(self._late.popleft())


def publish(worker: Worker) -> None:
    _run([Publisher(worker, *each) for each in PUBLISHERS])


def subscribe(worker: Worker) -> None:
    _run([Reader(worker, *each) for each in READERS])


def _run(sessions: list[Publisher] | list[Reader]) -> None:
    failures: list[BaseException] = []

    def run(session: Session) -> None:
        try:
            session.run()
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=run, args=(session,), name=session.name) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(1)
