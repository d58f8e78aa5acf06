"""DELIVERY frames say what they were told, and whatever else arrives is refused in words."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ProtocolViolation
from millstream.wire.deliveries import Delivery, decode_delivery, encode_delivery_head
from millstream.wire.frames import FrameReader, FrameType

u32 = st.integers(0, 2**32 - 1)
deliveries = st.builds(
    Delivery,
    u32,
    st.integers(0, 2**64 - 1),
    st.text("abc.-_", max_size=255),
    u32,
    u32,
    st.lists(st.binary(max_size=64), max_size=4),
)


@given(deliveries)
def test_a_delivery_arrives_as_it_was_sent(delivery: Delivery) -> None:
    batches = b"".join(delivery.buffers)
    frame = encode_delivery_head(delivery, len(batches)) + batches
    ((kind, correlation, payload),) = list(FrameReader(shared=bytearray(4096)).feed(frame))
    delivered = decode_delivery(payload)
    assert (kind, correlation) == (FrameType.DELIVERY, None)
    assert delivered[:5] == delivery[:5]
    assert bytes(delivered.batches) == batches


@given(st.binary(max_size=64))
def test_damaged_deliveries_are_refused(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        decode_delivery(memoryview(garbage))
