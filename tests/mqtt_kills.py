"""kill -9 of a broker in the middle of QoS 1 and QoS 2 exchanges of many MQTT clients, in both directions.

The clients do what the standard asks of them: they keep what is unconfirmed, and when they are back they repeat it.
Audited is what the standard promises for that: QoS 1 at least once, QoS 2 exactly once, each publisher's messages in
their order, and no session forgotten.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Self

import millstream
from millstream.mqtt.packets import (
    V4,
    V5,
    Connect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
)
from millstream.testing.broker import BrokerProcess
from tests.e2e.mqtt.support import Address, Closed, Silence, Wire, free_port

#: Unconfirmed publishes of one publisher.
WINDOW = 10
#: Messages that a reader leaves unconfirmed for a while.
LATE = 5
ANSWER_S = 30.0


class Gone(Exception):
    """The broker is away for the moment."""


class KillClient(threading.Thread):
    """A client with a durable session that comes back whenever the broker does."""

    def __init__(self, server: Address, name: str, version: int, seed: str) -> None:
        super().__init__(name=name, daemon=True)
        self.server = server
        self.version = version
        self.rng = random.Random(seed)
        self.stopping = threading.Event()
        self.begun = threading.Event()
        self.failure: BaseException | None = None
        self.resumed = 0

    def run(self) -> None:
        try:
            while not self.is_done():
                try:
                    wire = self._connect()
                except Gone:
                    time.sleep(0.02)
                    continue
                try:
                    self.serve(wire)
                except (Closed, OSError):
                    continue
                finally:
                    wire.close()
        except BaseException as failure:
            self.failure = failure
        finally:
            self.begun.set()

    def _connect(self) -> Wire:
        expiry = Properties(session_expiry_s=3600, receive_maximum=20) if self.version == V5 else Properties()
        try:
            wire = Wire(self.server, self.version)
            answer = wire.connect(Connect(self.version, self.name, False, 0, None, None, None, expiry), ANSWER_S)
        except (Closed, OSError):
            raise Gone from None
        assert answer.reason == 0, f"{self.name}: {answer}"
        if self.begun.is_set():
            assert answer.session_present, f"the session of {self.name} was forgotten"
            self.resumed += 1
        return wire

    def is_done(self) -> bool:
        raise NotImplementedError

    def serve(self, wire: Wire) -> None:
        """Until the connection ends, or everything is done."""
        raise NotImplementedError

    def end(self) -> None:
        self.stopping.set()
        self.join(120)
        assert not self.is_alive(), f"{self.name} does not come to an end"
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError(f"{self.name}: {self.failure!r}") from self.failure


class Publisher(KillClient):
    """Publishes numbers with one QoS, several at a time."""

    def __init__(self, server: Address, name: str, version: int, seed: str, qos: int) -> None:
        super().__init__(server, name, version, seed)
        self.qos = qos
        self.topic = f"kills/{name}"
        self.sent = 0
        self.confirmed = 0
        # Few, so that one that the server did not release in time is used again before long.
        self._packet_ids = itertools.cycle(range(1, 50))
        #: By packet id, in the order of sending: the number of the message, or None once it was received.
        self._unconfirmed: OrderedDict[int, int | None] = OrderedDict()

    def is_done(self) -> bool:
        return self.stopping.is_set() and not self._unconfirmed

    def serve(self, wire: Wire) -> None:
        # Repetitions in the original order: first what was received already, then what was not (4.4.0-1).
        for packet_id, number in self._unconfirmed.items():
            wire.send(Pubrel(packet_id) if number is None else self._publish(packet_id, number, dup=True))
        self.begun.set()
        while not self.is_done():
            while len(self._unconfirmed) < WINDOW and not self.stopping.is_set():
                packet_id = next(self._packet_ids)
                self._unconfirmed[packet_id] = self.sent
                self.sent += 1
                wire.send(self._publish(packet_id, self.sent - 1))
            self._take(wire, wire.next(ANSWER_S))

    def _publish(self, packet_id: int, number: int, dup: bool = False) -> Publish:
        return Publish(self.topic, b"%d" % number, self.qos, dup=dup, packet_id=packet_id)

    def _take(self, wire: Wire, packet: Packet) -> None:
        assert isinstance(packet, Puback | Pubrec | Pubcomp), f"unexpected: {packet}"
        # To repeat a PUBREL for what was completed is right, and so is the answer that nothing is known of it.
        assert packet.reason < 0x80 or isinstance(packet, Pubcomp), f"refused: {packet}"
        if isinstance(packet, Pubrec):
            if packet.packet_id in self._unconfirmed:
                self._unconfirmed[packet.packet_id] = None
            wire.send(Pubrel(packet.packet_id))
        elif self._unconfirmed.pop(packet.packet_id, self) is not self:
            self.confirmed += 1


class Reader(KillClient):
    """Subscribes to everything with one QoS and confirms some of it late."""

    def __init__(self, server: Address, name: str, version: int, seed: str, qos: int) -> None:
        super().__init__(server, name, version, seed)
        self.qos = qos
        #: (publisher, number) in the order of their arrival, repetitions included.
        self.found: list[tuple[str, int]] = []
        #: QoS 2: received and not released.
        self._received: set[int] = set()
        self._late: deque[Packet] = deque()

    def is_done(self) -> bool:
        return self.stopping.is_set()

    def serve(self, wire: Wire) -> None:
        self._late.clear()
        if not self.begun.is_set():
            wire.subscribe("kills/#", qos=self.qos)
            self.begun.set()
        while not self.is_done():
            try:
                packet = wire.next(0.05)
            except Silence:
                self._confirm(wire, 0)
                continue
            self._take(wire, packet)
            self._confirm(wire, self.rng.choice((0, LATE)))
        self._confirm(wire, 0)
        wire.send(Pingreq())
        while not isinstance(packet := wire.next(ANSWER_S), Pingresp):
            self._take(wire, packet)
            self._confirm(wire, 0)

    def _take(self, wire: Wire, packet: Packet) -> None:
        if isinstance(packet, Pubrel):
            self._received.discard(packet.packet_id)
            wire.send(Pubcomp(packet.packet_id))
            return
        assert isinstance(packet, Publish), f"unexpected: {packet}"
        if packet.qos == 2:
            self._late.append(Pubrec(packet.packet_id))
            if packet.packet_id in self._received:
                assert packet.dup, "a packet id was used for a second message before the first was released"
                return
            self._received.add(packet.packet_id)
        elif packet.qos == 1:
            self._late.append(Puback(packet.packet_id))
        self.found.append((packet.topic.rpartition("/")[2], int(packet.payload)))

    def _confirm(self, wire: Wire, leave: int) -> None:
        while len(self._late) > leave:
            wire.send(self._late.popleft())


class MqttKillRun:
    """A broker under load that is killed again and again; `audit` says what was not as it should be."""

    def __init__(self, folder: Path, seed: int, *, brief: bool = False) -> None:
        self._pace = 0.3 if brief else 1.0
        self._rng = random.Random(seed)
        self.server = Address("127.0.0.1", free_port())
        self.broker = BrokerProcess(folder / "data", arguments=("--mqtt-port", str(self.server.port)))
        publishers = [(1, V4), (2, V5), (2, V4), (1, V5)]
        self.publishers = [
            Publisher(self.server, f"p{qos}v{version}", version, f"{seed} p {at}", qos)
            for at, (qos, version) in enumerate(publishers)
        ]
        readers = [(1, V5), (2, V4), (2, V5)]
        self.readers = [
            Reader(self.server, f"r{qos}v{version}", version, f"{seed} r {at}", qos)
            for at, (qos, version) in enumerate(readers)
        ]

    def __enter__(self) -> Self:
        self.broker.start()
        for client in (*self.readers, *self.publishers):
            client.start()
            assert client.begun.wait(30)
            client.check()
        return self

    def __exit__(self, *_: object) -> None:
        for client in (*self.publishers, *self.readers):
            client.stopping.set()
        self.broker.__exit__(None, None, None)

    def round(self) -> None:
        time.sleep(self._pace * self._rng.choice((self._rng.uniform(0.02, 0.5), self._rng.uniform(0.5, 2.0))))
        self._kill()
        for client in (*self.publishers, *self.readers):
            client.check()

    def _kill(self) -> None:
        self.broker.kill()
        self.broker.start()

    def finish(self) -> None:
        """Let everything arrive, then kill once more: nothing comes a second time that was confirmed."""
        for publisher in self.publishers:
            publisher.end()
        for reader in self.readers:
            self._wait_for(reader)
        self._kill()
        time.sleep(0.3)
        for reader in self.readers:
            reader.end()

    def _expected(self) -> set[tuple[str, int]]:
        return {(publisher.name, number) for publisher in self.publishers for number in range(publisher.sent)}

    def _wait_for(self, reader: Reader) -> None:
        """As long as something comes."""
        before, since_s = 0, time.monotonic()
        while missing := self._expected() - set(reader.found):
            reader.check()
            if len(reader.found) > before:
                before, since_s = len(reader.found), time.monotonic()
            assert time.monotonic() - since_s < 20, f"{reader.name} lacks {len(missing)}: {sorted(missing)[:10]}"
            time.sleep(0.05)
        reader.check()

    def audit(self) -> dict[str, int]:
        exactly = {publisher.name for publisher in self.publishers if publisher.qos == 2}
        expected = self._expected()
        for reader in self.readers:
            counts = Counter(reader.found)
            assert counts.keys() == expected, f"{reader.name} lost {sorted(expected - counts.keys())[:10]}"
            if reader.qos == 2:
                twice = [it for it, count in counts.items() if count > 1 and it[0] in exactly]
                assert not twice, f"{reader.name} got more than once: {twice[:10]}"
            first: dict[str, int] = {}
            for name, number in OrderedDict.fromkeys(reader.found):
                assert number == first.get(name, -1) + 1, f"{reader.name} got {name} {number} after {first.get(name)}"
                first[name] = number
        with millstream.connect(self.broker.address) as client:
            for publisher in self.publishers:
                self._audit_log(client, publisher)
        return {
            "published": len(expected),
            "delivered": sum(len(reader.found) for reader in self.readers),
            "resumed": sum(client.resumed for client in (*self.publishers, *self.readers)),
        }

    def _audit_log(self, client: millstream.Client, publisher: Publisher) -> None:
        """What is stored is what native readers get."""
        topic = publisher.topic.replace("/", ".")
        with client.stream(topic, start="earliest") as stream:
            stored = [int(stream.next(timeout_s=10).text) for _ in range(sum(client.offsets(topic).values()))]
        assert set(stored) == set(range(publisher.sent)), f"{publisher.name}: stored {len(set(stored))}"
        if publisher.qos == 2:
            assert stored == list(range(publisher.sent)), f"{publisher.name}: not once each, in order"
