"""docs/protocol.md shows real frames: every sample in it is what the code writes and reads."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from millstream.errors import TopicNotFound
from millstream.records import Batch, check_batch, encode_batch, encode_headers, stamp
from millstream.wire import calls
from millstream.wire.deliveries import Delivery, decode_delivery, encode_delivery_head
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.leases import (
    LeasePart,
    LeaseRequest,
    Scope,
    Settle,
    SettleEntry,
    decode_lease,
    decode_settle,
    encode_lease,
    encode_lease_result,
    encode_settle,
    encode_settle_result,
)
from millstream.wire.messages import (
    FetchRequest,
    decode_fetch,
    decode_json,
    decode_publish,
    encode_error,
    encode_fetch,
    encode_fetch_result_head,
    encode_publish_head,
    encode_publish_result,
)
from millstream.wire.subscription_calls import FlowNotice

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SAMPLES = {
    name: bytes.fromhex(re.sub(r"\s|\|.*", "", re.sub(r"  .*", "", text, flags=re.M)))
    for name, text in re.findall(r"^```hex (\S+)\n(.*?)^```", DOCUMENT, re.M | re.S)
}


def sample_batch(*, stamped: bool) -> bytes:
    batch = encode_batch(
        [b"first", b"second"],
        keys=[b"c-17", None],
        headers=[encode_headers({"a": "b"}), b""],
        base_timestamp_us=1_700_000_000_000_000,
        producer=5 << 16,
    )
    if stamped:
        stamp(memoryview(batch), 0, base_offset=41, append_time_us=1_700_000_000_000_500, leader_epoch=0)
    return bytes(batch)


def written() -> dict[str, bytes]:
    batch = sample_batch(stamped=False)
    stored = sample_batch(stamped=True)
    return {
        "hello": encode_frame(FrameType.HELLO, b'{"versions":[1],"client_id":"demo"}', 1),
        "batch": batch,
        "stored-batch": stored,
        "publish": encode_publish_head(b"orders", 0, acks=1, fsync=0, batch_size=len(batch), correlation=2) + batch,
        "publish-result": encode_publish_result(2, 3, 41, 1_700_000_000_000_500),
        "fetch": encode_fetch(FetchRequest("orders", 0, 41, 1_048_576, 500), 3),
        "fetch-result": encode_fetch_result_head(3, size=len(stored), next_offset=43, high_watermark=43, start_offset=0)
        + stored,
        "lease": encode_lease(LeaseRequest(1, 500, 1_048_576, 20_000), 5),
        "lease-result": b"".join(
            encode_lease_result(
                5, [LeasePart("orders", 0, 0x1122334455667788, 30_000, 1, 0, 41, 2, b"", [stored])], waited_ms=120
            )
        ),
        "settle": encode_settle(
            [
                SettleEntry(Settle.ACK, 0x1122334455667788, Scope.ONE, 41),
                SettleEntry(Settle.NACK, 0x1122334455667788, Scope.ONE, 42, -1, reason="db down"),
            ],
            6,
        ),
        "settle-result": encode_settle_result(6, [0, 1]),
        "call": encode_frame(FrameType.CALL, b'{"op":"topic.describe","name":"orders"}', 4),
        "error": encode_error(TopicNotFound("topic 'orders' does not exist in namespace 'default'"), 4),
        "delivery": encode_delivery_head(Delivery(9, 3, "orders", 0, 0x01020304, [stored]), len(stored)) + stored,
        "flow": encode_frame(
            FrameType.FLOW,
            msgspec.json.encode(FlowNotice(topic="orders", level="critical", delay_ms=120, reason="lag")),
        ),
        "rebalance": encode_frame(FrameType.REBALANCE, b'{"group":"audit","generation":7}'),
        "goaway": encode_frame(FrameType.GOAWAY, b'{"reason":"the broker is shutting down"}'),
        "heartbeat": encode_frame(FrameType.HEARTBEAT, b""),
    }


@pytest.mark.parametrize("name", sorted(written()))
def test_the_document_shows_what_the_code_writes(name: str) -> None:
    assert SAMPLES[name] == written()[name]


def test_no_sample_is_without_a_test() -> None:
    assert set(SAMPLES) == set(written())


def test_the_samples_can_be_read_back() -> None:
    def payload(name: str) -> memoryview:
        (frame,) = FrameReader(shared=bytearray(4096)).feed(SAMPLES[name])
        return memoryview(bytes(frame.payload))

    request = decode_publish(payload("publish"))
    check_batch(request.batch, 0, len(request.batch))
    assert decode_fetch(payload("fetch")).offset == 41
    assert decode_lease(payload("lease")).max_messages == 500
    assert [entry.reason for entry in decode_settle(payload("settle"))] == ["", "db down"]
    delivered = decode_delivery(payload("delivery"))
    assert delivered[:5] == (9, 3, "orders", 0, 0x01020304)
    assert Batch.parse(delivered.batches).values() == [b"first", b"second"]
    assert decode_json(payload("flow"), FlowNotice).delay_ms == 120
    assert Batch.parse(SAMPLES["stored-batch"]).values() == [b"first", b"second"]
    assert decode_json(payload("call"), calls.Call) == calls.DescribeTopic(name="orders")


def test_every_call_is_documented() -> None:
    for call in calls.Call.__args__:  # type: ignore[attr-defined]
        assert f"`{call.__struct_config__.tag}`" in DOCUMENT, f"{call.__name__} is missing from docs/protocol.md"
    for kind in FrameType:
        assert f"| {kind.value} | {kind.name} |" in DOCUMENT
