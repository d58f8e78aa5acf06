"""The MQTT door without what is behind it: bytes become packets, silence is noticed, and nobody can hold it up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from millstream.config import Settings
from millstream.errors import InternalError, MillstreamError, ProtocolViolation
from millstream.mqtt.packets import (
    V4,
    V5,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
)
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from millstream.testing.broker import BrokerForTests
from tests.still import limits_stand_still

MQTT = [Subprotocol("mqtt")]
PATIENCE_S = 10


class FakeClient:
    """The broker's side of a connection, as far as the door is concerned."""

    def __init__(self, line: Any, address: str) -> None:
        self.who = None
        self.line, self.address = line, address
        #: What happened to it, in order: packets, and the names of what else was said.
        self.heard: list[Any] = []
        self.error: MillstreamError | None = None
        self.version = 0
        self.full = False
        self.told = threading.Condition()

    def _note(self, what: Any) -> None:
        with self.told:
            self.heard.append(what)
            self.told.notify_all()

    def wait_for(self, what: Any, times: int = 1) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.heard.count(what) >= times, PATIENCE_S), self.heard

    def handle(self, packets: Iterable[Packet]) -> None:
        try:
            for packet in packets:
                self._handle(packet)
                if not self.line.busy:
                    break
        finally:
            self._note("end of read")

    def _handle(self, packet: Packet) -> None:
        self._note(packet)
        if isinstance(packet, Connect):
            self.version = packet.version
            self.line.set_keep_alive(packet.keep_alive_s)
            self.line.send(encode(Connack(), packet.version))
        elif isinstance(packet, Pingreq):
            self.line.send(encode(Pingresp(), V4))
        elif isinstance(packet, Disconnect):
            self.line.close()
        elif isinstance(packet, Publish) and packet.topic == "fill":
            self.full = True
        elif isinstance(packet, Publish) and packet.topic == "flood":
            self.line.send(bytes(int(packet.payload)))
        elif isinstance(packet, Publish) and packet.topic == "bug":
            raise ZeroDivisionError

    def is_full(self) -> bool:
        return self.full

    def violated(self, error: MillstreamError) -> None:
        self.error = error
        self._note("violated")
        self.line.close()

    def drained(self) -> None:
        self._note("drained")

    def lost(self) -> None:
        self._note("lost")

    def silent(self) -> None:
        self._note("silent")
        self.line.close()

    def shutting_down(self) -> None:
        self._note("shutting down")
        self.line.close()


class FakeRoom:
    def __init__(self) -> None:
        self.clients: list[FakeClient] = []
        self._came = threading.Event()

    def client(self, line: Any, address: str) -> FakeClient:
        self.clients.append(FakeClient(line, address))
        self._came.set()
        return self.clients[-1]

    def first(self) -> FakeClient:
        assert self._came.wait(PATIENCE_S)
        return self.clients[0]


class Wire:
    """A client that sends what it is told to."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._reader = PacketReader(bytes_max=1_000_000, peer="server", version=V5)

    def send(self, *packets: Packet) -> None:
        self.socket.sendall(b"".join(encode(packet, V5) for packet in packets))

    def receive(self) -> Packet:
        while True:
            for packet in self._reader.packets():
                return packet
            data = self.socket.recv(65_536)
            assert data, "the broker closed the connection"
            self._reader.feed(data)

    def connect(self, keep_alive_s: int = 0) -> Wire:
        self.send(Connect(V5, "me", keep_alive_s=keep_alive_s))
        assert self.receive() == Connack()
        return self

    def is_closed(self) -> bool:
        try:
            return self.socket.recv(65_536) == b""
        except ConnectionError:
            return True


Start = Callable[..., tuple[BrokerForTests, FakeRoom]]


@pytest.fixture
def start() -> Iterator[Start]:
    brokers = []

    def run(**sections: dict[str, Any]) -> tuple[BrokerForTests, FakeRoom]:
        server = {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100} | sections.pop("server", {})
        settings = Settings.model_validate({"server": server, **sections})
        broker = BrokerForTests(settings=settings, http=True, mqtt=True).start()
        brokers.append(broker)
        room = FakeRoom()
        broker.broker.mqtt.client = room.client  # type: ignore[assignment, method-assign]
        return broker, room

    yield run
    for broker in brokers:
        broker.stop()


def open_socket(broker: BrokerForTests, **options: Any) -> ClientConnection:
    options.setdefault("subprotocols", MQTT)
    return connect(broker.url.replace("http", "ws") + "/mqtt", open_timeout=PATIENCE_S, **options)


def unread_socket(broker: BrokerForTests) -> tuple[Wire, Callable[[bytes], None]]:
    """A WebSocket from which nobody reads, and how to send something to it."""
    wire = Wire(int(broker.url.rpartition(":")[2]))
    protocol = ClientProtocol(parse_uri(broker.url.replace("http", "ws") + "/mqtt"), subprotocols=MQTT)

    def speak(data: bytes) -> None:
        if data:
            protocol.send_binary(data)
        wire.socket.sendall(b"".join(protocol.data_to_send()))

    protocol.send_request(protocol.connect())
    speak(b"")
    protocol.receive_data(wire.socket.recv(10_000))
    return wire, speak


# --- bytes and packets -----------------------------------------------------------------------------------------------


def test_all_packets_of_a_read_are_handled_before_it_ends(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    (client,) = room.clients
    client.wait_for("end of read")
    packets = [Publish("a", b"1"), Publish("b", b"2"), Pingreq()]
    wire.send(*packets)
    assert wire.receive() == Pingresp()
    client.wait_for("end of read", 2)
    assert client.heard[2:] == [*packets, "end of read"]
    assert client.address == "{}:{}".format(*wire.socket.getsockname())


def test_a_packet_may_come_in_pieces(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port)
    for byte in encode(Connect(V5, "slow and steady"), V5):
        wire.socket.sendall(bytes([byte]))
    assert wire.receive() == Connack()
    assert [packet for packet in room.clients[0].heard if packet != "end of read"] == [Connect(V5, "slow and steady")]


def test_what_is_no_packet_ends_the_connection_and_no_other(start: Start) -> None:
    broker, room = start()
    good, bad = Wire(broker.mqtt_port).connect(), Wire(broker.mqtt_port).connect()
    bad.socket.sendall(encode(Publish("a", b"in order"), V5) + b"\xf7\x00")
    assert bad.is_closed()
    client = room.clients[1]
    client.wait_for("lost")
    assert isinstance(client.error, ProtocolViolation)
    carried_out = [Publish("a", b"in order"), "end of read"]
    assert client.heard[-4:] == [*carried_out, "violated", "lost"], "what came before the mistake is carried out"
    good.send(Pingreq())
    assert good.receive() == Pingresp()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"\x10\x0c\0\x04MQTT\x04\x01\0\0\0\0", b""),  # a reserved flag, in 3.1.1
        (b"\x10\x0d\0\x04MQTT\x05\x01\0\0\0\0\0", b"\x81"),  # in version 5
        (b"\x10\x0c\0\x04MQTT\x03\x02\0\0\0\0", b"\x01"),  # an old version
        (b"\x10\x0c\0\x04MQTT\x06\x02\0\0\0\0", b"\x84"),  # a new one
        (b"GET / HTTP/1.1\r\n\r\n", b""),
    ],
)
def test_a_connect_that_cannot_be_read_is_answered_where_there_is_an_answer(
    start: Start, said: bytes, answer: bytes
) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port)
    wire.socket.sendall(said)
    assert wire.socket.recv(1000)[3:4] == answer
    room.first().wait_for("lost")
    assert room.first().heard == ["end of read", "lost"]
    assert broker.broker.metrics.protocol_errors == 1


def test_a_mistake_of_the_broker_is_no_traceback_for_a_client(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    wire.send(Publish("bug", b""))
    assert wire.is_closed()
    assert isinstance(room.clients[0].error, InternalError)


def test_after_a_farewell_nothing_is_heard(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    wire.send(Disconnect(), Publish("a", b"too late"))
    assert wire.is_closed()
    room.clients[0].wait_for("lost")
    assert Publish("a", b"too late") not in room.clients[0].heard


# --- who is silent, slow or too many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"\x10"])
def test_who_does_not_say_who_he_is_is_not_waited_for(start: Start, said: bytes) -> None:
    broker, _ = start(mqtt={"connect_timeout_ms": 5_000})
    wire = Wire(broker.mqtt_port)
    wire.socket.sendall(said)
    known = Wire(broker.mqtt_port).connect()
    broker.clock.advance("7s")
    assert wire.is_closed()
    known.send(Pingreq())
    assert known.receive() == Pingresp()


def test_a_client_that_is_silent_for_one_and_a_half_keep_alives_is_gone(start: Start) -> None:
    broker, room = start()
    quiet, alive = (Wire(broker.mqtt_port).connect(keep_alive_s=10) for _ in range(2))
    for _ in range(3):
        broker.clock.advance("4600ms")
        alive.send(Pingreq())
        assert alive.receive() == Pingresp()
    assert "silent" not in room.clients[0].heard, "after 13.8 of 15 seconds"
    broker.clock.advance("3s")
    assert quiet.is_closed()
    room.clients[0].wait_for("lost")
    assert room.clients[0].heard[-2:] == ["silent", "lost"]
    assert "silent" not in room.clients[1].heard


def test_without_a_keep_alive_silence_is_golden(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect(keep_alive_s=0)
    broker.clock.advance("1h")
    wire.send(Pingreq())
    assert wire.receive() == Pingresp()
    assert "silent" not in room.clients[0].heard


def test_a_client_for_which_there_is_no_room_is_not_read_from(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect(keep_alive_s=10)
    client = room.clients[0]
    wire.send(Publish("fill", b""))
    client.wait_for(Publish("fill", b""))
    client.wait_for("end of read", 2)
    wire.send(Publish("a", b""))
    broker.clock.advance("1m")
    assert client.heard[-1] == "end of read", "neither read from nor called silent"
    assert Publish("a", b"") not in client.heard

    def make_room() -> None:
        client.full = False
        client.line.resume()

    broker._loop.call_soon_threadsafe(make_room)
    client.wait_for(Publish("a", b""))


def test_a_client_that_does_not_read_is_slow_until_it_does(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    client = room.clients[0]
    size = 30_000_000
    wire.send(Publish("flood", str(size).encode()), Publish("a", b""))
    client.wait_for("end of read", 2)
    assert client.line.is_slow
    wire.send(Publish("b", b"of one who does not listen"))
    broker.clock.advance("1s")
    assert Publish("b", b"of one who does not listen") not in client.heard
    while size:
        size -= len(wire.socket.recv(min(size, 1_000_000)))
    client.wait_for("drained")
    assert not client.line.is_slow
    client.wait_for(Publish("b", b"of one who does not listen"))


@pytest.mark.parametrize("over", ["tcp", "websocket"])
def test_last_words_that_nobody_reads_are_not_kept_for_ever(start: Start, over: str) -> None:
    broker, room = start()
    words = encode(Connect(V5, "me"), V5) + encode(Publish("flood", b"30000000"), V5) + encode(Disconnect(), V5)
    if over == "websocket":
        _wire, speak = unread_socket(broker)
        speak(words)
    else:
        wire = Wire(broker.mqtt_port)
        wire.socket.sendall(words)
    client = room.first()
    client.wait_for(Disconnect())
    broker.clock.advance("1s")
    assert "lost" not in client.heard
    broker.clock.advance("10s")
    client.wait_for("lost")


def test_clients_beyond_the_limit_hear_why(start: Start) -> None:
    broker, room = start(server={"max_connections": 2})
    first, second = (Wire(broker.mqtt_port).connect() for _ in range(2))
    third = Wire(broker.mqtt_port)
    third.send(Connect(V5, "third"))
    answer = third.receive()
    assert isinstance(answer, Connack)
    assert answer.reason >= Reason.UNSPECIFIED_ERROR
    assert answer.properties.reason_string == "the broker serves 2 connections, its limit"
    assert third.is_closed()
    assert len(room.clients) == 2
    assert broker.broker.metrics.connections_refused == 1
    first.send(Disconnect())
    room.clients[0].wait_for("lost")
    Wire(broker.mqtt_port).connect()
    second.send(Pingreq())
    assert second.receive() == Pingresp()


def test_a_crowd_beyond_the_limit_is_cut_off_without_a_word(start: Start) -> None:
    broker, _ = start(server={"max_connections": 1})
    known = Wire(broker.mqtt_port).connect()
    crowd = [Wire(broker.mqtt_port) for _ in range(70)]
    assert all(wire.is_closed() for wire in crowd[64:])
    broker.clock.advance("6s")
    assert all(wire.is_closed() for wire in crowd), "nor is there all the time in the world to ask why"
    known.send(Pingreq())
    assert known.receive() == Pingresp()


def test_connections_from_one_address_are_limited(start: Start) -> None:
    broker, _ = start(limits={"connections_per_s_per_address": 1})
    with limits_stand_still(broker):
        Wire(broker.mqtt_port).connect()
        hasty = Wire(broker.mqtt_port)
        hasty.send(Connect(V5, "hasty"))
        answer = hasty.receive()
    assert isinstance(answer, Connack)
    assert answer.reason == Reason.CONNECTION_RATE_EXCEEDED


# --- WebSocket -------------------------------------------------------------------------------------------------------


def test_packets_need_not_be_frames(start: Start) -> None:
    broker, room = start()
    with open_socket(broker) as wire:
        assert wire.subprotocol == "mqtt"
        said = encode(Connect(V5, "browser"), V5) + encode(Publish("a", bytes(1000)), V5) + encode(Pingreq(), V5)
        for piece in (said[:1], said[1:20], said[20:]):
            wire.send(piece)
        answer = b""
        while len(answer) < len(encode(Connack(), V5)) + 2:
            frame = wire.recv(PATIENCE_S)
            assert isinstance(frame, bytes)
            answer += frame
        assert answer == encode(Connack(), V5) + encode(Pingresp(), V5)
        wire.send(encode(Disconnect(), V5))
        with pytest.raises(ConnectionClosed):
            wire.recv(PATIENCE_S)
    client = room.clients[0]
    client.wait_for("lost")
    assert [said for said in client.heard if not isinstance(said, str)] == [
        Connect(V5, "browser"), Publish("a", bytes(1000)), Pingreq(), Disconnect(),
    ]  # fmt: skip


def test_text_is_not_mqtt(start: Start) -> None:
    broker, room = start()
    with open_socket(broker) as wire:
        wire.send(encode(Connect(V5, "browser"), V5))
        wire.recv(PATIENCE_S)
        wire.send("hello")
        with pytest.raises(ConnectionClosed):
            wire.recv(PATIENCE_S)
    room.clients[0].wait_for("lost")
    assert room.clients[0].error is None, "there was nothing to fail at"


def test_a_websocket_says_that_it_speaks_mqtt(start: Start) -> None:
    broker, _ = start()
    with pytest.raises(InvalidStatus) as refused:
        open_socket(broker, subprotocols=[Subprotocol("chat")])
    assert refused.value.response.status_code == 400
    assert b"'mqtt'" in (refused.value.response.body or b"")
    answer = httpx.get(broker.url + "/mqtt")
    assert answer.status_code == 400
    assert "ws://" in answer.text


def test_pages_of_other_sites_are_not_let_in(start: Start) -> None:
    broker, _ = start()
    with pytest.raises(InvalidStatus) as refused:
        open_socket(broker, origin="https://evil.example")
    assert refused.value.response.status_code == 403


def test_silence_on_a_websocket_is_noticed(start: Start) -> None:
    broker, room = start()
    with open_socket(broker) as wire:
        wire.send(encode(Connect(V5, "browser", keep_alive_s=10), V5))
        wire.recv(PATIENCE_S)
        broker.clock.advance("17s")
        room.clients[0].wait_for("silent")
        with pytest.raises(ConnectionClosed):
            wire.recv(PATIENCE_S)


def test_a_slow_websocket_is_slow_until_it_reads(start: Start) -> None:
    broker, room = start()
    wire, speak = unread_socket(broker)
    flood = encode(Publish("flood", b"10000000"), V5)
    speak(encode(Connect(V5, "browser"), V5) + 5 * flood)
    client = room.first()
    client.wait_for("end of read")
    assert client.line.is_slow
    speak(encode(Publish("b", b"of one who does not listen"), V5))
    broker.clock.advance("1s")
    assert Publish("b", b"of one who does not listen") not in client.heard
    unread = 50_000_000
    while unread > 0:
        unread -= len(wire.socket.recv(1_000_000))
    client.wait_for("drained")
    client.wait_for(Publish("b", b"of one who does not listen"))
    assert not client.line.is_slow


# --- the end, and numbers --------------------------------------------------------------------------------------------


def test_who_is_connected_hears_that_the_broker_stops(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    with open_socket(broker) as page:
        page.send(encode(Connect(V5, "browser"), V5))
        page.recv(PATIENCE_S)
        broker.stop()
        assert wire.is_closed()
        with pytest.raises(ConnectionClosed):
            page.recv(PATIENCE_S)
    for client in room.clients:
        assert client.heard[-2:] == ["shutting down", "lost"]


def test_connections_are_counted_by_door(start: Start) -> None:
    broker, room = start()
    wire = Wire(broker.mqtt_port).connect()
    with open_socket(broker) as page:
        page.send(encode(Connect(V5, "browser"), V5))
        page.recv(PATIENCE_S)
        text = httpx.get(broker.url + "/metrics").text
        assert 'millstream_connections{door="mqtt"} 1' in text
        assert 'millstream_connections{door="mqtt-websocket"} 1' in text
        assert broker.broker.metrics.connections == 2
    wire.send(Disconnect())
    for client in room.clients:
        client.wait_for("lost")
    assert broker.broker.metrics.connections == 0


def test_mqtt_can_be_switched_off(start: Start) -> None:
    broker, _ = start(mqtt={"enabled": False})
    with pytest.raises(InvalidStatus):
        open_socket(broker)
