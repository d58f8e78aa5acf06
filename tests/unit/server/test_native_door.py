"""The native door as a client sees it: what is answered, what is refused, and that nobody else suffers."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from crc32c import crc32c

from millstream.config import ServerSettings, Settings
from millstream.errors import (
    BatchDamaged,
    InvalidArgument,
    InvalidName,
    MillstreamError,
    NamespaceNotFound,
    OffsetOutOfRange,
    OutOfSequence,
    PartitionNotFound,
    PayloadTooLarge,
    ProtocolViolation,
    QuotaExceeded,
    TopicExists,
    TopicNotFound,
    UnsupportedVersion,
)
from millstream.records import Batch, encode_batch
from millstream.server import tcp
from millstream.server.tcp import NativeConnection
from millstream.testing.broker import BrokerForTests
from millstream.wire.frames import FrameType, encode_frame, frame_head
from millstream.wire.messages import decode_error, decode_fetch_result, decode_publish_result, encode_publish_head
from tests.native import NativeClient


def values_of(data: memoryview) -> list[bytes | None]:
    values: list[bytes | None] = []
    at = 0
    while at < len(data):
        batch = Batch.parse(bytes(data), at)
        values += batch.values()
        at += batch.header.length
    return values


@pytest.fixture
def client(broker: BrokerForTests) -> NativeClient:
    return NativeClient(broker.address)


def test_what_is_published_can_be_fetched(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    first = client.publish("orders", [b"a", b"b"])
    second = client.publish("orders", [b"c"])
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert first.label == "disk", "the default policy syncs before it confirms"
    result = client.fetch("orders", 0)
    assert values_of(result.batches) == [b"a", b"b", b"c"]
    assert (result.next_offset, result.high_watermark, result.start_offset) == (3, 3, 0)


@pytest.mark.parametrize(
    ("fsync", "label"), [("group", "disk"), ("always", "disk"), ("interval", "os"), ("never", "os")]
)
def test_the_label_says_what_the_message_survives(client: NativeClient, fsync: str, label: str) -> None:
    client.call("topic.create", name="orders", config={"fsync": fsync})
    assert client.publish("orders", [b"x"]).label == label


def test_an_ephemeral_topic_promises_memory_only(client: NativeClient) -> None:
    client.call("topic.create", name="scratch", config={"mode": "ephemeral"})
    assert client.publish("scratch", [b"x"]).label == "memory"
    assert values_of(client.fetch("scratch", 0).batches) == [b"x"]


def test_a_publish_may_ask_for_more_or_less_than_its_topic(client: NativeClient) -> None:
    client.call("topic.create", name="orders", config={"fsync": "never"})
    assert client.publish("orders", [b"x"], fsync=1).label == "disk"
    assert client.publish("orders", [b"x"], fsync=4).label == "os"


def test_a_fetch_at_the_end_waits_for_the_next_message(broker: BrokerForTests, client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    waiting = client.send_fetch("orders", 0, wait_ms=10_000)
    with NativeClient(broker.address) as other:
        other.publish("orders", [b"late"])
    assert values_of(decode_fetch_result(client.answer(waiting)).batches) == [b"late"]


@pytest.mark.parametrize("fsync", ["group", "interval"])
def test_who_waits_for_a_message_gets_it_before_its_publisher_is_answered(
    broker: BrokerForTests, client: NativeClient, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    client.call("topic.create", name="orders", config={"fsync": fsync})
    waiting = client.send_fetch("orders", 0, wait_ms=10_000)
    client.call("topic.list")  # so the fetch is there
    sent: list[int] = []
    send = NativeConnection.send

    def noted(connection: NativeConnection) -> None:
        sent.extend(map(len, connection._outgoing))
        send(connection)

    with NativeClient(broker.address) as other:
        monkeypatch.setattr(NativeConnection, "send", noted)
        other.publish("orders", [bytes(1000)])
    assert values_of(decode_fetch_result(client.answer(waiting)).batches) == [bytes(1000)]
    assert max(sent) > 1000
    assert sent.index(max(sent)) < len(sent) - 1, "the confirmation comes last"


def test_a_fetch_that_waits_in_vain_is_answered_empty(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    result = client.fetch("orders", 0, wait_ms=20)
    assert (result.next_offset, len(result.batches)) == (0, 0)


def test_a_repeated_batch_is_confirmed_again_and_stored_once(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    first = client.publish("orders", [b"a", b"b"], producer=9, sequence=0)
    again = client.publish("orders", [b"a", b"b"], producer=9, sequence=0)
    assert not first.duplicate
    assert again.duplicate
    assert (again.label, again.base_offset, again.append_time_us) == (
        first.label,
        first.base_offset,
        first.append_time_us,
    )
    assert values_of(client.fetch("orders", 0).batches) == [b"a", b"b"]


def test_a_gap_in_a_producers_sequence_is_refused(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    client.publish("orders", [b"a"], producer=9, sequence=0)
    with pytest.raises(OutOfSequence):
        client.publish("orders", [b"c"], producer=9, sequence=2)
    client.publish("orders", [b"b"], producer=9, sequence=1)


def test_pipelined_batches_of_one_producer_arrive_in_order(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    sent = [client.send_publish("orders", [b"%d" % i], producer=3, sequence=i) for i in range(200)]
    for correlation in sent:
        client.answer(correlation)
    assert values_of(client.fetch("orders", 0).batches) == [b"%d" % i for i in range(200)]


def test_without_acks_nothing_is_answered_and_everything_is_stored(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    client.send_publish("orders", [b"quiet"], acks=0)
    assert client.publish("orders", [b"loud"]).base_offset == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"op": "topic.create", "name": "bad name"}, InvalidName),
        ({"op": "topic.create", "name": "../../etc"}, InvalidName),
        ({"op": "topic.create", "name": "a..b"}, InvalidName),
        ({"op": "topic.create", "name": "x" * 300}, InvalidName),
        ({"op": "topic.create", "name": "exists"}, TopicExists),
        ({"op": "topic.create", "name": "many", "partitions": 0}, InvalidArgument),
        ({"op": "topic.create", "name": "odd", "config": {"retention_s": 5}}, MillstreamError),
        ({"op": "topic.describe", "name": "missing"}, TopicNotFound),
        ({"op": "topic.describe"}, InvalidArgument),
        ({"op": "no.such.call"}, InvalidArgument),
        ({"op": "topic.list", "limit": 0}, InvalidArgument),
        ({"op": "group.join", "group": "bad group", "topics": ["exists"]}, InvalidName),
        ({"op": "group.describe", "name": "missing"}, MillstreamError),
        ({"op": "namespace.delete", "name": "missing"}, NamespaceNotFound),
        ({"op": "namespace.delete", "name": "default"}, InvalidArgument),
    ],
)
def test_a_bad_call_gets_one_sentence_and_the_connection_goes_on(
    client: NativeClient, call: dict[str, object], error: type[MillstreamError]
) -> None:
    client.call("topic.create", name="exists")
    with pytest.raises(error) as caught:
        client.call(**call)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert client.call("topic.describe", name="exists")["name"] == "exists"


@pytest.mark.parametrize(
    "call",
    [
        {"op": "group.list"},
        {"op": "group.describe", "name": "audit"},
        {"op": "group.pause", "name": "audit", "paused": True},
        {"op": "queue.list"},
        {"op": "webhook.list"},
        {"op": "webhook.show", "id": "wh-1"},
        {"op": "mqtt.overview"},
        {"op": "mqtt.sessions"},
        {"op": "mqtt.retained"},
        {"op": "dlq.list"},
        {"op": "dlq.replays"},
        {"op": "schedule.repeating"},
        {"op": "pipeline.list"},
        {"op": "stage.list"},
        {"op": "stats.overview"},
        {"op": "sub.open", "patterns": ["#"]},
    ],
    ids=lambda call: str(call["op"]),
)
def test_a_namespace_that_is_not_there_is_not_taken_for_an_empty_one(
    broker: BrokerForTests, call: dict[str, object]
) -> None:
    with NativeClient(broker.address, namespace="typo") as client:
        with pytest.raises(NamespaceNotFound, match="'typo'"):
            client.call(**call)  # type: ignore[arg-type]
        assert client.call("broker.describe")
        assert client.call("stats.overview", everywhere=True)
        assert client.call("stats.history", metric="published_rate")
        assert client.call("namespace.list") == ["default"]


def test_who_waits_in_a_namespace_that_is_not_there_yet_is_shown(broker: BrokerForTests) -> None:
    with NativeClient(broker.address, namespace="later") as client:
        client.call("group.join", group="audit", topics=["orders.#"])
        assert [group["name"] for group in client.call("group.list")] == ["audit"]


def test_requests_for_what_is_not_there_say_what_is_missing(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    with pytest.raises(TopicNotFound, match="'missing'"):
        client.publish("missing", [b"x"])
    with pytest.raises(PartitionNotFound, match="not 7"):
        client.publish("orders", [b"x"], partition=7)
    with pytest.raises(OffsetOutOfRange):
        client.fetch("orders", 1)
    with pytest.raises(TopicNotFound):
        client.fetch("missing", 0)


def test_a_message_beyond_the_topics_limit_is_refused(client: NativeClient) -> None:
    client.call("topic.create", name="small", config={"max_message_bytes": 1000})
    with pytest.raises(PayloadTooLarge, match="allows 1000"):
        client.publish("small", [b"x" * 1001])
    client.publish("small", [b"x" * 600] * 10)
    with pytest.raises(PayloadTooLarge):
        client.publish("small", [b"\0" * 5000], codec=1)


def test_a_damaged_batch_is_refused(client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    batch = encode_batch([b"hello"], base_timestamp_us=0)
    batch[-1] ^= 1
    answer = client.answer(client.send_batch("orders", bytes(batch)))
    error = decode_error(answer)
    assert error is not None
    assert error.code == "BATCH_DAMAGED"
    assert client.fetch("orders", 0).high_watermark == 0


@pytest.mark.parametrize(
    ("noise", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolViolation),
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00", ProtocolViolation),
        (frame_head(FrameType.CALL, 11 * 1024 * 1024, 1), PayloadTooLarge),
        (encode_frame(FrameType.CALL, b"not json", 1), ProtocolViolation),
        (encode_frame(FrameType.CALL, b"{}"), ProtocolViolation),
        (encode_frame(FrameType.PUBLISH, b"\0", 1), ProtocolViolation),
        (encode_frame(FrameType.FETCH, b"\0" * 21, 1), ProtocolViolation),
        (encode_frame(FrameType.GOAWAY, b"{}", 1), ProtocolViolation),
        (b"MQUE\x07" + bytes(7), UnsupportedVersion),
        (b"MQUE\x01\xee" + bytes(6), UnsupportedVersion),
    ],
)
def test_bytes_that_break_the_protocol_close_that_connection_only(
    broker: BrokerForTests, client: NativeClient, noise: bytes, error: type[MillstreamError]
) -> None:
    client.call("topic.create", name="orders")
    with NativeClient(broker.address) as rude:
        rude.socket.sendall(noise)
        assert isinstance(rude.closing_error(), error)
    assert client.publish("orders", [b"still here"]).base_offset == 0


def test_a_client_of_another_version_is_told_which_one_to_speak(broker: BrokerForTests) -> None:
    with NativeClient(broker.address, hello=False) as client:
        client.socket.sendall(encode_frame(FrameType.HELLO, b'{"versions":[99]}', 1))
        error = client.closing_error()
        assert isinstance(error, UnsupportedVersion)
        assert "speaks 1" in str(error)


def test_frames_in_tiny_pieces_are_put_together(broker: BrokerForTests, client: NativeClient) -> None:
    client.call("topic.create", name="orders")
    batch = bytes(encode_batch([b"slow"], base_timestamp_us=0))
    data = encode_publish_head(b"orders", 0, acks=1, fsync=0, batch_size=len(batch), correlation=77) + batch
    for i in range(0, len(data), 3):
        client.socket.sendall(data[i : i + 3])
    assert decode_publish_result(client.answer(77)).base_offset == 0


def test_connections_beyond_the_limit_are_refused_politely(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(max_connections=2))
    with BrokerForTests(tmp_path, settings=settings) as broker:
        first, second = NativeClient(broker.address), NativeClient(broker.address)
        with NativeClient(broker.address, hello=False) as third:
            assert isinstance(third.closing_error(), QuotaExceeded)
        assert first.call("topic.list") == second.call("topic.list") == []
        first.close()
        second.close()


def test_a_client_that_does_not_read_stops_being_served_not_the_others(tmp_path: Path) -> None:
    """Its answers wait in a bounded buffer; everybody else goes on."""
    settings = Settings(server=ServerSettings(connection_memory_bytes=256 * 1024))
    with BrokerForTests(tmp_path, settings=settings) as broker, NativeClient(broker.address) as good:
        good.call("topic.create", name="orders")
        for _ in range(20):
            good.publish("orders", [b"x" * 500_000])
        lazy = NativeClient(broker.address)
        lazy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        asked = [lazy.send_fetch("orders", i) for i in range(20)]
        assert good.publish("orders", [b"y"]).base_offset == 20
        assert sorted(asked) == sorted(correlation for _, correlation, _ in (lazy.receive() for _ in asked))
        lazy.close()


def test_stopping_says_goodbye_and_answers_what_is_under_way(tmp_path: Path) -> None:
    broker = BrokerForTests(tmp_path).start()
    client = NativeClient(broker.address)
    client.call("topic.create", name="orders")
    waiting = client.send_fetch("orders", 0, wait_ms=60_000)
    stopping = threading.Thread(target=broker.stop)
    stopping.start()
    kind, _, payload = client.receive()
    assert kind == FrameType.GOAWAY
    assert b"shutting down" in bytes(payload)
    kind, correlation, _ = client.receive()
    assert (kind, correlation) == (FrameType.RESPONSE, waiting)
    stopping.join(5)
    assert not stopping.is_alive()
    client.close()


def test_stopping_waits_until_a_client_goes_that_publishes_without_being_answered(tmp_path: Path) -> None:
    """What it had sent before it could know was lost with the connection."""
    broker = BrokerForTests(tmp_path).start()
    client = NativeClient(broker.address)
    client.call("topic.create", name="orders")
    client.send_publish("orders", [b"before"], acks=0)
    stopping = threading.Thread(target=broker.stop)
    stopping.start()
    assert client.receive()[0] == FrameType.GOAWAY
    client.send_publish("orders", [b"on its way"], acks=0)
    assert client.call("broker.describe")["software"], "everything before this has been read"
    assert stopping.is_alive()
    client.close()
    stopping.join(5)
    assert not stopping.is_alive()
    with BrokerForTests(tmp_path) as again, NativeClient(again.address) as reader:
        assert reader.fetch("orders", 0).high_watermark == 2


def test_stopping_does_not_wait_for_ever_for_a_client_that_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_PATIENCE_S", 0.05)
    broker = BrokerForTests(tmp_path).start()
    with NativeClient(broker.address) as client:
        client.call("topic.create", name="orders")
        client.send_publish("orders", [b"x"], acks=0)
        stopping = threading.Thread(target=broker.stop)
        stopping.start()
        stopping.join(5)
        assert not stopping.is_alive(), "it waited for as long as what is under way may take"


def test_namespaces_keep_names_apart(broker: BrokerForTests) -> None:
    with NativeClient(broker.address, namespace="eu") as eu, NativeClient(broker.address) as default:
        eu.call("topic.create", name="orders")
        assert default.call("topic.list") == []
        assert default.call("namespace.list") == ["default", "eu"]
        with pytest.raises(MillstreamError, match="holds 1 topics"):
            default.call("namespace.delete", name="eu")
        default.call("namespace.delete", name="eu", force=True)
        assert default.call("namespace.list") == ["default"]


@pytest.mark.parametrize(
    "payload",
    [
        b'{"op":"topic.create","name":"x","config":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"op":"topic.create","name":"\xff\xfe"}',
        b'{"op":"topic.create","name":"\\ud800"}',
        b'{"op":"topic.offsets","topic":"t","at":"timestamp","timestamp_ms":99999999999999999999999}',
        b'{"op":"topic.offsets","topic":"t","partitions":[99999999999999999]}',
        b'{"op":"topic.list","pattern":"**.[x"}',
        b'{"op":"topic.create","name":"y","config":{"retention_ms":1e308}}',
        b'{"op":"topic.create","name":"y","config":{"cleanup":["x"]}}',
        b'{"op":"group.join","group":"g","topics":[""]}',
        b'{"op":"group.join","group":"g/h","topics":["t"]}',
        b'{"op":"group.heartbeat","group":"g","member_id":"a/b","generation":-1,"owned":[]}',
        b'{"op":"group.commit","group":"g2","offsets":[{"topic":"t","partition":-1,"offset":0}]}',
        b'{"op":"group.reset","group":"g2","topic":"t","to":"offset","value":-99999999999999999999999}',
        b'{"op":"namespace.create","name":"../../x"}',
        b'{"op":"topic.metadata","topics":["../x"],"create":true}',
        b"[]",
        b"null",
        b"",
        b'{"op":5}',
    ],
    ids=lambda payload: payload[:50].decode("latin1"),
)
def test_no_payload_of_a_call_makes_the_broker_stumble(client: NativeClient, payload: bytes) -> None:
    client.call("topic.create", name="t")
    client.socket.sendall(encode_frame(FrameType.CALL, payload, 7))
    error = decode_error(client.receive()[2])
    assert error is None or error.code != "INTERNAL"


def test_a_batch_that_could_not_be_fetched_again_is_refused(client: NativeClient) -> None:
    """An answer carries more than a request: what just fits into a PUBLISH frame would not fit into any answer."""
    client.call("topic.create", name="t", config={"max_message_bytes": 9 * 1024 * 1024})
    limit = 10 * 1024 * 1024
    values = [bytes(5_000_000), bytes(limit - 5_000_000 - 64 - 16 - 32)]
    with pytest.raises(PayloadTooLarge):
        client.publish("t", values)
    client.publish("t", [values[0], values[1][:-4096]])
    assert client.fetch("t", 0).high_watermark == 2


def test_many_fetches_at_once_do_not_pile_up_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 0
    original = NativeConnection.send

    def send(connection: NativeConnection) -> None:
        nonlocal peak
        peak = max(peak, sum(map(len, connection._outgoing)))
        original(connection)

    monkeypatch.setattr(NativeConnection, "send", send)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t")
        for _ in range(8):
            client.publish("t", [bytes(900_000)])
        asked = [client.send_fetch("t", 0, max_bytes=8 << 20) for _ in range(30)]
        assert sorted(asked) == sorted(client.receive()[1] or 0 for _ in asked)
        assert peak <= broker.settings.server.connection_memory_bytes


def test_a_refusal_at_the_limit_of_waiting_publishes_does_not_stall_the_connection(
    client: NativeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.server.tcp._PARKED_REQUESTS_MAX", 4)
    client.call("topic.create", name="t")
    batch = bytes(encode_batch([b"x"], base_timestamp_us=1))
    frames = b""
    for number, topic in enumerate((b"t", b"t", b"t", b"missing")):
        head = encode_publish_head(topic, 0, acks=1, fsync=0, batch_size=len(batch), correlation=200 + number)
        frames += head + batch
    client.socket.sendall(frames)
    for _ in range(4):
        client.receive()
    assert client.publish("t", [b"still there"]).base_offset == 3


def test_a_client_that_is_not_being_read_from_is_not_taken_for_dead(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(heartbeat_ms=300, connection_memory_bytes=1024 * 1024))
    with BrokerForTests(tmp_path, settings=settings) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t")
        for _ in range(12):
            client.publish("t", [bytes(900_000)])
        asked = [client.send_fetch("t", number) for number in range(12)]
        deadline = time.monotonic() + 1.5  # more than three heartbeats: the broker's own timer decides
        while time.monotonic() < deadline:
            client.socket.sendall(encode_frame(FrameType.HEARTBEAT, b""))
            time.sleep(0.05)
        answers = set()
        while len(answers) < len(asked):
            kind, correlation, _ = client.receive()
            if kind == FrameType.RESPONSE:
                answers.add(correlation)
        assert answers == set(asked)


def test_who_never_finishes_its_greeting_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.server.tcp._HANDSHAKE_S", 0.3)
    settings = Settings(server=ServerSettings(heartbeat_ms=100, heartbeat_misses=100))
    with BrokerForTests(settings=settings) as broker, NativeClient(broker.address, hello=False) as slow:
        greeted = NativeClient(broker.address)
        slow.socket.sendall(frame_head(FrameType.HELLO, 1000, 1))

        def drip() -> None:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                slow.socket.sendall(b" ")  # it is never silent
                time.sleep(0.02)

        with pytest.raises(ConnectionError):
            drip()
        greeted.call("namespace.list")


def test_what_a_client_calls_itself_is_kept_only_as_far_as_it_is_a_name(broker: BrokerForTests) -> None:
    client = NativeClient(broker.address, client_id="x" * 1_000_000)
    assert [len(entry["client_id"]) for entry in client.call("admin.connections")] == [256]
    with pytest.raises(InvalidName) as refused:
        NativeClient(broker.address, namespace="X" * 1_000_000)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("codec", [1, 2])
def test_a_batch_that_cannot_be_unpacked_harms_no_reader(client: NativeClient, codec: int) -> None:
    client.call("topic.create", name="orders")
    consumer = client.call("queue.open", topic="orders")["consumer"]
    batch = bytearray(encode_batch([b"poison"] * 20, base_timestamp_us=1, codec=codec, priorities=[0] * 20))
    batch[-12:-8] = b"\xff\xff\xff\xff"
    batch[8:12] = crc32c(memoryview(batch)[36:]).to_bytes(4, "little")
    with pytest.raises(BatchDamaged):
        decode_publish_result(client.answer(client.send_batch("orders", bytes(batch))))
    client.publish("orders", [b"fine"], priorities=[0])
    assert [message.value for message in client.lease(consumer)] == [b"fine"]
