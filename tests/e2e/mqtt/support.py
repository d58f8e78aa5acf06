"""A client of MQTT that does exactly what a test says, and the servers it can be pointed at.

The same tests run against Millstream and, with `MILLSTREAM_MQTT_REFERENCE=mosquitto`, against that broker, so that a
test which fails here but not there is right.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest

from millstream.broker.mqtt.session import Session
from millstream.config import Settings
from millstream.mqtt.packets import (
    V4,
    V5,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.writer import encode
from millstream.testing.broker import BrokerForTests

#: The program that is tested in Millstream's place; empty as a rule.
REFERENCE = os.environ.get("MILLSTREAM_MQTT_REFERENCE", "")

#: What both servers are told, so that a test can reach a limit.
KEEP_ALIVE_MAX_S = 600
PACKET_BYTES_MAX = 100_000
RECEIVE_MAXIMUM = 20
TOPIC_ALIAS_MAXIMUM = 10

PATIENCE_S = 5.0
#: How long nothing must come before a test believes that nothing comes.
QUIET_S = 0.15 if REFERENCE else 0.05

SUCCESS = 0
FAREWELL = b"\xe0\x00"

_P = TypeVar("_P", bound=Packet)
_numbers = itertools.count(1)

both_versions = pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])


def not_in_reference(why: str) -> pytest.MarkDecorator:
    """What the reference does not do, or does otherwise, although the standard says so."""
    return pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE}: {why}")


def unique(word: str) -> str:
    """A client id or topic level that no other test uses, also if a broker lives longer than this process."""
    return f"{word}{os.getpid()}x{next(_numbers)}"


# --- servers ---------------------------------------------------------------------------------------------------------


class Server(Protocol):
    host: str
    port: int

    def skip(self, seconds: float) -> None:
        """Let time pass for the server."""

    def stop(self) -> None: ...


class Address(NamedTuple):
    """Where a server is, for those who only connect to it."""

    host: str
    port: int


class Millstream:
    """A broker of ours, whose time can be skipped."""

    host = "127.0.0.1"

    def __init__(self, data: Path | None = None, **sections: dict[str, Any]) -> None:
        settings = {
            "server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100},
            **sections,
            "mqtt": {
                "keep_alive_max_s": KEEP_ALIVE_MAX_S,
                "max_packet_bytes": PACKET_BYTES_MAX,
                "receive_maximum": RECEIVE_MAXIMUM,
                "topic_alias_max": TOPIC_ALIAS_MAXIMUM,
                **sections.get("mqtt", {}),
            },
        }
        self.broker = BrokerForTests(data, settings=Settings.model_validate(settings), mqtt=True).start()
        self.port: int = self.broker.mqtt_port

    def skip(self, seconds: float) -> None:
        self.broker.clock.advance(seconds)

    def stop(self) -> None:
        self.broker.stop()


class Borrowed(Millstream):
    """A broker of ours that somebody else has started, and stops."""

    def __init__(self, broker: BrokerForTests) -> None:
        self.broker = broker
        self.port = broker.mqtt_port

    def stop(self) -> None:
        pass


class Mosquitto:
    """The broker that everybody knows."""

    host = "127.0.0.1"

    def __init__(self, data: Path | None = None) -> None:
        program = shutil.which(REFERENCE or "mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program is not None, f"{REFERENCE} is not installed"
        self._folder = tempfile.TemporaryDirectory(prefix="mosquitto-")
        data = data or Path(self._folder.name)
        data.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        config = Path(self._folder.name) / "mosquitto.conf"
        config.write_text(
            f"listener {self.port} {self.host}\nallow_anonymous true\npersistence true\n"
            f"persistence_location {data}/\nmax_keepalive {KEEP_ALIVE_MAX_S}\nmax_packet_size {PACKET_BYTES_MAX}\n"
            f"max_inflight_messages {RECEIVE_MAXIMUM}\nmax_topic_alias {TOPIC_ALIAS_MAXIMUM}\n"
            "log_type none\nuser root\n"
        )
        self._process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
        wait_for_port(self.host, self.port)

    def skip(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()


def start_server(data: Path | None = None) -> Server:
    return Mosquitto(data) if REFERENCE else Millstream(data)


@contextlib.contextmanager
def running_server(data: Path | None = None) -> Iterator[Server]:
    """Stopped also when what is done with it fails."""
    server = start_server(data)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def wait_for_port(host: str, port: int) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, f"nobody listens on port {port}"
            time.sleep(0.01)


# --- the client ------------------------------------------------------------------------------------------------------


class Closed(Exception):
    """The server closed the connection."""


class Silence(AssertionError):
    """What was waited for did not come."""


class Wire:
    """One connection.  Packets wait in `inbox` until a test asks for their kind."""

    def __init__(self, server: Server | Address, version: int = V5) -> None:
        self.version = version
        self.client_id = ""
        self.connack = Connack()
        self.inbox: list[Packet] = []
        self._socket = socket.create_connection((server.host, server.port), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = PacketReader(bytes_max=2**28)
        self._reader.peer = "server"
        self._reader.version = version
        self._packet_ids = itertools.cycle(range(1, 65_536))

    # sending and receiving

    def send(self, *packets: Packet) -> None:
        self.send_bytes(b"".join(self._encode(packet) for packet in packets))

    def _encode(self, packet: Packet) -> bytes:
        # The writer is a server's, which says nothing to a client of 3.1.1 before it closes.
        return FAREWELL if isinstance(packet, Disconnect) and self.version == V4 else encode(packet, self.version)

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def packet_id(self) -> int:
        return next(self._packet_ids)

    def receive(self, kind: type[_P], timeout_s: float = PATIENCE_S) -> _P:
        """The next packet of a kind; others stay where they are."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for at, packet in enumerate(self.inbox):
                if isinstance(packet, kind):
                    del self.inbox[at]
                    return packet
            self._read(deadline_s, f"no {kind.__name__}")

    def next(self, timeout_s: float = PATIENCE_S) -> Packet:
        """The very next packet."""
        deadline_s = time.monotonic() + timeout_s
        while not self.inbox:
            self._read(deadline_s, "nothing")
        return self.inbox.pop(0)

    def _read(self, deadline_s: float, what: str) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise Silence(f"{what} came; waiting: {self.inbox}")
        self._socket.settimeout(left_s)
        try:
            data = self._socket.recv(65_536)
        except TimeoutError:
            raise Silence(f"{what} came; waiting: {self.inbox}") from None
        except ConnectionError:
            data = b""
        if not data:
            raise Closed(f"the connection was closed; waiting: {self.inbox}")
        self._reader.feed(data)
        self.inbox.extend(self._reader.packets())

    def nothing(self, kind: type[Packet] = Publish, seconds: float = QUIET_S) -> None:
        """No packet of this kind comes, although the server has had its time, and it is still there."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            try:
                self._read(deadline_s, "nothing")
            except Silence:
                break
        self.ping()
        found = [packet for packet in self.inbox if isinstance(packet, kind)]
        assert not found, f"unexpected: {found}"

    def ping(self) -> None:
        self.send(Pingreq())
        self.receive(Pingresp)

    def end(self) -> list[Packet]:
        """Wait until the server closes the connection; returns everything that it said before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._read(deadline_s, "the connection stays open: nothing")
            except Closed:
                self.close()
                return self.inbox

    def end_bytes(self) -> bytes:
        """As `end`, for answers in whatever version the server chooses."""
        self._socket.settimeout(PATIENCE_S)
        data = b""
        while more := self._socket.recv(65_536):
            data += more
        return data

    def refused(self, *reasons: int) -> None:
        """The server closes the connection, and with version 5 it may say why, but nothing else than this."""
        for packet in self.end():
            if isinstance(packet, Disconnect) or (isinstance(packet, Connack) and packet.reason):
                assert not reasons or packet.reason in reasons, f"reason {packet.reason:#x}"
                assert not isinstance(packet, Disconnect) or self.version == V5, "3.1.1 knows no DISCONNECT of a server"

    def close(self) -> None:
        self._socket.close()

    def drop(self) -> None:
        """The network is gone: no DISCONNECT, no farewell of TCP."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    # whole exchanges

    def connect(self, packet: Connect, timeout_s: float = PATIENCE_S) -> Connack:
        self.client_id = packet.client_id
        self.send(packet)
        first = self.next(timeout_s)
        assert isinstance(first, Connack), f"the first packet is {first}"
        self.connack = first
        return first

    def disconnect(self, reason: int = 0, properties: Properties | None = None) -> None:
        self.send(Disconnect(reason, properties or Properties()))
        self.end()

    def subscribe(self, *filters: str | Filter, qos: int = 2, properties: Properties | None = None) -> tuple[int, ...]:
        """Returns one reason for each filter."""
        packet_id = self.packet_id()
        wanted = tuple(Filter(entry, qos) if isinstance(entry, str) else entry for entry in filters)
        self.send(Subscribe(packet_id, wanted, properties or Properties()))
        answer = self.receive(Suback)
        assert answer.packet_id == packet_id
        return answer.reasons

    def subscribe_refused(self, filter_: Filter, *reasons: int) -> None:
        """The server says no, or ends the connection with one of these reasons."""
        self.send(Subscribe(self.packet_id(), (filter_,)))
        try:
            answer = self.next()
        except Closed:
            return
        if isinstance(answer, Suback):
            assert answer.reasons[0] >= 0x80, f"{filter_} was granted"
            return
        assert isinstance(answer, Disconnect)
        assert answer.reason in reasons
        self.end()

    def unsubscribe(self, *filters: str) -> tuple[int, ...]:
        packet_id = self.packet_id()
        self.send(Unsubscribe(packet_id, filters))
        answer = self.receive(Unsuback)
        assert answer.packet_id == packet_id
        return answer.reasons

    def publish(
        self, topic: str, payload: bytes = b"", qos: int = 0, retain: bool = False, properties: Properties | None = None
    ) -> int:
        """With the whole handshake; returns the reason that the server gave."""
        packet_id = self.packet_id() if qos else 0
        self.send(Publish(topic, payload, qos, retain, packet_id=packet_id, properties=properties or Properties()))
        if qos == 1:
            taken = self.receive(Puback)
            assert taken.packet_id == packet_id
            return taken.reason
        if qos == 2:
            received = self.receive(Pubrec)
            assert received.packet_id == packet_id
            if received.reason >= 0x80:
                return received.reason
            self.send(Pubrel(packet_id))
            assert self.receive(Pubcomp).packet_id == packet_id
            return received.reason
        return 0

    def message(self, timeout_s: float = PATIENCE_S) -> Publish:
        """The next message, with the whole handshake."""
        found = self.receive(Publish, timeout_s)
        if found.qos == 1:
            self.send(Puback(found.packet_id))
        elif found.qos == 2:
            self.send(Pubrec(found.packet_id))
            released = self.receive(Pubrel)
            assert released.packet_id == found.packet_id
            self.send(Pubcomp(found.packet_id))
        return found

    def messages(self, count: int) -> list[Publish]:
        return [self.message() for _ in range(count)]

    def payloads(self, count: int) -> list[bytes]:
        return [message.payload for message in self.messages(count)]


class Wires:
    """Connections of one test, which end with it."""

    def __init__(self, server: Server | Address) -> None:
        self.server = server
        self._open: list[Wire] = []

    def open(self, version: int = V5) -> Wire:
        """A connection on which nothing was said yet."""
        wire = Wire(self.server, version)
        self._open.append(wire)
        return wire

    def connect(
        self,
        version: int = V5,
        client_id: str | None = None,
        *,
        clean: bool = True,
        expiry_s: int | None = None,
        keep_alive_s: int = KEEP_ALIVE_MAX_S,
        will: Will | None = None,
        **properties: Any,
    ) -> Wire:
        """A client that was let in.  `expiry_s` is for version 5; 3.1.1 has `clean`."""
        wire = self.open(version)
        said = Properties(session_expiry_s=expiry_s, **properties) if version == V5 else Properties()
        client_id = unique("c") if client_id is None else client_id
        answer = wire.connect(Connect(version, client_id, clean, keep_alive_s, None, None, will, said))
        assert answer.reason == SUCCESS, answer
        return wire

    def durable(self, version: int = V5, client_id: str | None = None, *, clean: bool = False, **options: Any) -> Wire:
        """A client whose session outlives the connection."""
        expiry_s = options.pop("expiry_s", 3600) if version == V5 else None
        return self.connect(version, client_id, clean=clean, expiry_s=expiry_s, **options)

    def skip(self, seconds: float) -> None:
        assert not isinstance(self.server, Address), "time passes as it likes there"
        self.server.skip(seconds)

    def close(self) -> None:
        for wire in self._open:
            wire.close()


def payloads(messages: Iterable[Publish]) -> list[bytes]:
    return [message.payload for message in messages]


def session_of(server: Millstream, client_id: str, namespace: str = "default") -> Session:
    """What the broker knows of a client."""
    return server.broker.broker.mqtt.worlds[namespace].sessions[client_id]
