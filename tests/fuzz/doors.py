"""The doors: what one client sends, from its first byte on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random
from struct import Struct
from typing import Any, Final, get_args
from urllib.parse import quote

import msgspec
from crc32c import crc32c
from websockets.frames import Frame, Opcode

from millstream.headers import encode_headers
from millstream.mqtt import packets as mqtt
from millstream.mqtt.packets import V4, V5, Properties
from millstream.mqtt.writer import encode as encode_packet
from millstream.records import encode_batch
from millstream.server.http.app import API
from millstream.server.http.site import FAMILIES
from millstream.server.http.socket import frames
from millstream.server.tcp import NativeConnection
from millstream.wire.calls import Call
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.leases import LeaseRequest, Scope, Settle, SettleEntry, encode_lease, encode_settle
from millstream.wire.messages import FetchRequest, encode_fetch, encode_publish_head
from tests.fuzz.examples import example_of
from tests.fuzz.mutation import bend, bend_json
from tests.fuzz.world import DoorTarget, Wire, World

__all__ = ["HttpTarget", "MqttTarget", "NativeTarget", "WebSocketTarget"]

_HEADER: Final = Struct(">4sBBBBI")
_json: Final = msgspec.json.encode


def _by_json(random: Random, text: bytes) -> bytes:
    bent = bend_json(random, text) if random.random() < 0.8 else None
    return bend(random, text) if bent is None else bent


# --- batches -----------------------------------------------------------------------------------------------------


def batches() -> list[bytes]:
    """As producers make them: every column, every codec."""
    headers = [encode_headers({"trace": b"1"}), encode_headers({"a": b"", "b": b"2"})]
    made = [encode_batch([b"one", b"two"], base_timestamp_us=1)]
    for codec in (0, 1, 2):
        made += [
            encode_batch([b"x" * 40, None], keys=[b"k", None], base_timestamp_us=1, codec=codec),
            encode_batch([b"a", b"b"], keys=[b"k", b"l"], headers=headers, base_timestamp_us=1, codec=codec),
            encode_batch([b"a", b"b"], priorities=[0, 4], base_timestamp_us=1, codec=codec),
            encode_batch([b"a", b"b"], deliver_at_us=[0, 1_767_225_700_000_000], base_timestamp_us=1, codec=codec),
            encode_batch([b"a", b"b"], expiry_us=[0, 1_767_225_700_000_000], base_timestamp_us=1, codec=codec),
            encode_batch([b"a", b"b"], timestamps_us=[1, 2], base_timestamp_us=1, codec=codec),
        ]
    made.append(encode_batch([b"a"], base_timestamp_us=1, producer=1 << 16, first_sequence=0))
    return [bytes(batch) for batch in made]


def mended(batch: bytes) -> bytes:
    """A batch with the length and the checksum that belong to what is in it."""
    if len(batch) < 64:
        return batch
    whole = bytearray(batch + bytes(-len(batch) % 8))
    whole[0:3] = b"MS\x01"
    whole[4:8] = len(whole).to_bytes(4, "little")
    whole[8:12] = crc32c(memoryview(whole)[36:]).to_bytes(4, "little")
    return bytes(whole)


# --- native ------------------------------------------------------------------------------------------------------


class NativeTarget(DoorTarget):
    """Frames."""

    name = "native"

    def protocol(self, world: World) -> Any:
        return NativeConnection(world.native)

    def seeds(self) -> list[bytes]:
        hello = encode_frame(FrameType.HELLO, b'{"versions":[1],"client_id":"f"}', correlation=1)
        calls = [_json(example_of(kind)) for kind in get_args(Call)]
        small = [_json({"op": document["op"]} | _required(document)) for document in map(_parsed, calls)]
        topic = b'{"op":"topic.create","name":"orders","partitions":2,"if_missing":true}'
        consumer = b'{"op":"queue.open","topic":"orders"}'

        def call(text: bytes, number: int = 2) -> bytes:
            return encode_frame(FrameType.CALL, text, correlation=number)

        def publish(batch: bytes, partition: int = 0) -> bytes:
            head = encode_publish_head(b"orders", partition, acks=1, fsync=0, batch_size=len(batch), correlation=3)
            return head + batch

        settles = [SettleEntry(kind, 1, scope, 0, 0, 1, "no") for kind in Settle for scope in Scope]
        fetch = encode_fetch(FetchRequest("orders", 0, 0, 65_536, 100), 4)
        lease = encode_lease(LeaseRequest(1, 10, 65_536, 100), 5)
        subscribe = call(b'{"op":"subscription.open","patterns":["orders.*","#"]}')
        begin = hello + call(topic)
        return [
            *(begin + call(text) for text in calls),
            *(begin + call(text) for text in small),
            *(begin + publish(batch) + fetch for batch in batches()),
            begin + subscribe + publish(batches()[0]),
            begin + call(consumer) + publish(batches()[1]) + lease + encode_settle(settles, 6) + lease,
            *(begin + call(consumer) + publish(batches()[0]) + call(text) for text in calls if b"queue" in text),
            hello + encode_frame(FrameType.HEARTBEAT, b""),
        ]

    def split(self, data: bytes) -> list[bytes]:
        units, at = [], 0
        while data[at : at + 4] == b"MQUE" and len(data) - at >= _HEADER.size:
            stop = at + _HEADER.size + int.from_bytes(data[at + 8 : at + 12])
            units.append(data[at:stop])
            at = stop
        return [*units, data[at:]] if at < len(data) else units

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"".join(map(self._framed, units))

    def _framed(self, unit: bytes) -> bytes:
        if len(unit) < _HEADER.size or unit[:4] != b"MQUE":
            return unit
        payload = unit[_HEADER.size :]
        if unit[5] == FrameType.PUBLISH and len(payload) > 12:
            at = 12 + int.from_bytes(payload[10:12])
            payload = payload[:at] + mended(payload[at:])
        return unit[:8] + len(payload).to_bytes(4) + payload

    def change(self, random: Random, unit: bytes) -> bytes:
        start = _HEADER.size + 4
        if unit[:4] != b"MQUE" or len(unit) < start or not random.randrange(20):
            return bend(random, unit)
        if unit[5] in (FrameType.CALL, FrameType.HELLO):
            return unit[:start] + _by_json(random, unit[start:])
        return unit[:start] + bend(random, unit[start:])


def _parsed(text: bytes) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(text)
    return document


def _required(document: dict[str, Any]) -> dict[str, Any]:
    kind = next(kind for kind in get_args(Call) if kind.__struct_config__.tag == document["op"])
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: document[field.encode_name] for field in fields if field.required}


# --- MQTT --------------------------------------------------------------------------------------------------------


class MqttTarget(DoorTarget):
    """Packets of both versions."""

    name = "mqtt"

    def protocol(self, world: World) -> Any:
        return world.mqtt.connection()

    def seeds(self) -> list[bytes]:
        return list(self._seeds())

    def _seeds(self) -> Iterator[bytes]:
        for version in (V4, V5):
            for connect in self._connects(version):
                hello = encode_packet(connect, version)
                yield hello
            hello = encode_packet(mqtt.Connect(version=version, client_id="f", keep_alive_s=60), version)
            for said in self._conversations(version):
                yield hello + b"".join(encode_packet(packet, version) for packet in said)

    def _connects(self, version: int) -> list[mqtt.Connect]:
        will = mqtt.Will("wills/a", b"gone", qos=1, retain=True)
        made = [
            mqtt.Connect(version=version, client_id="", clean_start=True),
            mqtt.Connect(version=version, client_id="f", clean_start=False, keep_alive_s=1, will=will),
            mqtt.Connect(version=version, client_id="f", username="default", password=b"ms_key"),
        ]
        if version == V5:
            properties = Properties(
                session_expiry_s=100,
                receive_maximum=2,
                maximum_packet_bytes=1000,
                topic_alias_maximum=3,
                user=(("namespace", "default"), ("a", "b")),
            )
            made.append(mqtt.Connect(version=version, client_id="f", clean_start=False, properties=properties))
        return made

    def _conversations(self, version: int) -> list[list[Any]]:
        def publish(topic: str, qos: int = 0, *, retain: bool = False, **said: Any) -> mqtt.Publish:
            properties = Properties(**said) if said and version == V5 else Properties()
            packet_id = 7 + qos if qos else 0
            return mqtt.Publish(topic, b'{"a":1}', qos=qos, retain=retain, packet_id=packet_id, properties=properties)

        def subscribe(*topics: str, qos: int = 1) -> mqtt.Subscribe:
            return mqtt.Subscribe(5, tuple(mqtt.Filter(topic, qos) for topic in topics))

        many = (("delay-ms", "100"), ("priority", "high"), ("dedup-id", "1"), ("key", "k"))
        return [
            [subscribe("a/#", "+/b", "$SYS/#"), publish("a/b"), publish("a/b", 1), mqtt.Puback(1)],
            [subscribe("#", qos=2), publish("a/b", 2), mqtt.Pubrel(9), mqtt.Pubrec(1), mqtt.Pubcomp(1)],
            [publish("a/b", 1, retain=True), subscribe("a/b"), mqtt.Unsubscribe(6, ("a/b", "#")), mqtt.Pingreq()],
            [subscribe("$share/g/a/#", "$queue/a/b"), publish("$queue/a/b", 1), mqtt.Puback(1), mqtt.Disconnect()],
            [publish("$queue/a/b", 1, user=many), subscribe("$queue/a/b")],
            [subscribe("$queue/a/b"), publish("$queue/a/b"), publish("$ack/a/b"), publish("$nack/a/b/1")],
            [publish("$admin/queue/a/b/create", 1, response_topic="r/1"), subscribe("r/#")],
            [publish("$admin/queue/a/b/purge"), publish("$admin/queue/a/b/stats")],
            [publish("a/b", 1, topic_alias=1, message_expiry_s=5), publish("", 1, topic_alias=1)],
            [publish("a/b", response_topic="r", correlation_data=b"x", content_type="t", payload_format=1)],
            [publish(" /ü/..//", 1), publish("/", 1), subscribe("/", "//", "+/+/#")],
            [mqtt.Auth(0x18), mqtt.Disconnect(4)] if version == V5 else [mqtt.Disconnect()],
        ]

    def split(self, data: bytes) -> list[bytes]:
        units, at = [], 0
        while at < len(data):
            size, start = _remaining(data, at + 1)
            units.append(data[at : start + size])
            at = start + size
        return units

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"".join(map(_packet, units))

    def change(self, random: Random, unit: bytes) -> bytes:
        _, start = _remaining(unit, 1)
        if not random.randrange(10):
            return bend(random, unit)
        return unit[:start] + bend(random, unit[start:])


def _remaining(data: bytes, at: int) -> tuple[int, int]:
    """A length of MQTT, and where it ends."""
    size = 0
    for place in range(4):
        if at >= len(data):
            break
        size |= (data[at] & 127) << 7 * place
        at += 1
        if data[at - 1] < 128:
            break
    return size, at


def _packet(unit: bytes) -> bytes:
    _, start = _remaining(unit, 1)
    body, length = unit[start:], bytearray()
    size = len(body)
    while True:
        length.append(size & 127 | (128 if size > 127 else 0))
        size >>= 7
        if not size:
            return unit[:1] + bytes(length) + body


# --- HTTP --------------------------------------------------------------------------------------------------------

_REQUEST: Final = re.compile(rb"(?=(?:GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) [^\r\n]* HTTP/1\.[01]\r\n)")
_LENGTH: Final = re.compile(rb"(?i)(?<=\r\ncontent-length: )\d+(?=\r\n)")
_VARIABLE: Final = {"topic": "orders", "namespace": "default", "group": "default", "name": "orders", "partition": "0"}


class HttpTarget(DoorTarget):
    """Requests, one behind the other."""

    name = "http"

    def protocol(self, world: World) -> Any:
        return world.http()

    def seeds(self) -> list[bytes]:
        paths = ("/", "/metrics", "/x")
        made = [self._request(method, path) for method in ("GET", "POST", "OPTIONS") for path in paths]
        made += [self._request("GET", path) for path in ("/health", "/ready", "/openapi.json", f"{API}/openapi.json")]
        for family in FAMILIES:
            for endpoint in family.endpoints:
                made.append(self._seed(endpoint))
        topic = self._request("POST", f"{API}/topics", b'{"name":"orders","partitions":2}')
        place = f"{API}/topics/orders/messages"
        message = self._request("POST", place, b'{"value":{"a":1},"key":"k","priority":"high"}')
        event = b"ce-id: 1\r\nce-source: s\r\nce-type: t\r\nce-specversion: 1.0\r\ncontent-type: text/plain\r\n"
        chunks = f"POST {place} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\n[1,2]\r\n0\r\n\r\n".encode()
        return [
            *(topic + message + one for one in made),
            topic + self._request("POST", f"{place}?dedup=true", b"raw", event),
            topic + chunks,
        ]

    def _seed(self, endpoint: Any) -> bytes:
        path = re.sub(r"\{(\w+)\}", lambda found: _VARIABLE.get(found[1], "1"), endpoint.path)
        query = {name: value for name, value in example_of(endpoint.query).items() if name not in ("follow", "stream")}
        words = "&".join(f"{name}={quote(_word(value))}" for name, value in query.items())
        body = b""
        if endpoint.body is bytes:
            body = b'[{"value":1}]'
        elif endpoint.body is not None:
            body = _json(example_of(endpoint.body))
        return self._request(endpoint.method, f"{API}{path}" + (f"?{words}" if words else ""), body)

    def _request(self, method: str, path: str, body: bytes = b"", headers: bytes = b"") -> bytes:
        size = b"content-length: %d\r\n" % len(body) if body else b""
        kind = b"" if b"content-type" in headers or not body else b"content-type: application/json\r\n"
        return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + kind + size + headers + b"\r\n" + body

    def split(self, data: bytes) -> list[bytes]:
        return [unit for unit in _REQUEST.split(data) if unit]

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"".join(map(self._measured, units))

    def _measured(self, unit: bytes) -> bytes:
        _, _, body = unit.partition(b"\r\n\r\n")
        return _LENGTH.sub(str(len(body)).encode(), unit, 1)

    def change(self, random: Random, unit: bytes) -> bytes:
        head, blank, body = unit.partition(b"\r\n\r\n")
        if body and random.random() < 0.6:
            return head + blank + _by_json(random, body)
        line, newline, rest = head.partition(b"\r\n")
        if random.random() < 0.7:
            method, _, place = line.partition(b" ")
            path, _, version = place.rpartition(b" ")
            bent = bend(random, path).replace(b" ", b"%20").replace(b"\r", b"%0d").replace(b"\n", b"%0a")
            return b" ".join((method, bent, version)) + newline + rest + blank + body
        return line + newline + bend(random, rest) + blank + body


def _word(value: Any) -> str:
    if isinstance(value, list):
        return _word(value[0]) if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- WebSocket ---------------------------------------------------------------------------------------------------

_UPGRADE: Final = (
    b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n"
)


class WebSocketTarget(DoorTarget):
    """Lines, each of which is sent as a frame of text; what begins with a 0 is sent as it is."""

    name = "websocket"

    def protocol(self, world: World) -> Any:
        return world.http()

    def begin(self, wire: Wire) -> None:
        wire.receive(_UPGRADE % (f"{API}/ws".encode(), b""))

    def seeds(self) -> list[bytes]:
        kinds = [_json(example_of(kind)) for kind in get_args(frames.ClientFrame)]
        publish = b'{"type":"publish","topic":"orders","messages":[{"value":"x","key":"k"},{"value":null,"key":"k"}]}'
        consume = b'{"type":"consume","topic":"orders","credit":2,"id":1}'
        subscribe = b'{"type":"subscribe","patterns":["#"],"credit":1,"id":"s"}'
        raw = [Frame(code, b"x" * 3).serialize(mask=True) for code in Opcode]
        parts = [Frame(Opcode.TEXT, b'{"type":', fin=False), Frame(Opcode.CONT, b'"ping"}')]
        return [
            *(b"\n".join((publish, kind)) for kind in kinds),
            b"\n".join((subscribe, consume, publish, *kinds)),
            b"\n".join((consume, publish, b'{"type":"ack","receipts":["orders:0:0:1:1"]}')),
            *(b"\0" + frame for frame in raw),
            b"\0" + b"".join(part.serialize(mask=True) for part in parts),
        ]

    def sent(self, data: bytes) -> list[bytes]:
        if data[:1] == b"\0":
            return super().sent(data[1:])
        return [Frame(Opcode.TEXT, line).serialize(mask=True) for line in data.split(b"\n")]

    def split(self, data: bytes) -> list[bytes]:
        return [data] if data[:1] == b"\0" else data.split(b"\n")

    def join(self, units: Sequence[bytes]) -> bytes:
        return b"\n".join(units)

    def change(self, random: Random, unit: bytes) -> bytes:
        return bend(random, unit) if unit[:1] == b"\0" else _by_json(random, unit)
