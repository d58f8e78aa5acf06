"""Packets of MQTT 3.1.1 as bytes, and connections that are let in."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Final

__all__ = ["CONNACK", "RESET", "SILENT_S_MAX", "BrokerFailed", "Line", "connect", "idle", "publish", "text"]

SILENT_S_MAX: Final = 30.0
CONNACK: Final = bytes((0x20, 2, 0, 0))
#: Of SO_LINGER: closing is the end at once.
RESET: Final = struct.pack("ii", 1, 0)

_PAYLOAD_BYTES: Final = 100
_KEEP_ALIVE_S: Final = 600
#: Nobody takes over the session of an earlier one.
_numbers: Final = count()


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


def _packet(first: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size, head = len(body), bytearray((first,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + body


def connect(keep_alive_s: int = 0) -> bytes:
    name = f"client-{next(_numbers)}"
    return _packet(0x10, text("MQTT"), bytes((4, 2)), struct.pack(">H", keep_alive_s), text(name))


def publish(topic: str, qos: int, packet_id: int = 0) -> bytes:
    identifier = struct.pack(">H", packet_id) if qos else b""
    return _packet(0x30 | qos << 1, text(topic), identifier, b"x" * _PAYLOAD_BYTES)


class BrokerFailed(Exception):
    """A broker does not do what it must."""


class Line:
    """One connection that is let in."""

    def __init__(self, port: int, *, keep_alive_s: int = 0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SILENT_S_MAX)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(connect(keep_alive_s))
        if self.receive(len(CONNACK)) != CONNACK:
            raise BrokerFailed("the broker does not let a client in")

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise BrokerFailed("the broker has closed a connection")
            data += more
        return data

    def subscribe(self, topic: str, qos: int) -> None:
        self.socket.sendall(_packet(0x82, struct.pack(">H", 1), text(topic), bytes((qos,))))
        if self.receive(5) != bytes((0x90, 3, 0, 1, qos)):
            raise BrokerFailed(f"the broker does not grant a subscription of QoS {qos}")

    def close(self) -> None:
        """At once, and without leaving a port behind that nobody can use for a minute."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.close()


@contextmanager
def idle(port: int, clients: int, *, subscribed: bool) -> Iterator[None]:
    """Many connections that do nothing; each with a subscription of its own, if `subscribed`."""
    with ExitStack() as stack:
        for number in range(clients):
            line = Line(port, keep_alive_s=_KEEP_ALIVE_S)
            stack.callback(line.close)
            if subscribed:
                line.subscribe(f"devices/{number}/commands", 0)
        yield
