"""LEASE and SETTLE round trip under any chunking, and bytes that lie give one clear error."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import MillstreamError, ProtocolViolation, ReceiptInvalid
from millstream.wire.connection import ServerConnection, SettleRequest
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.leases import (
    REASON_BYTES_MAX,
    LeasePart,
    LeaseRequest,
    Scope,
    Settle,
    SettleEntry,
    decode_lease_result,
    decode_settle,
    decode_settle_result,
    encode_lease,
    encode_lease_result,
    encode_settle,
    encode_settle_result,
    lasting_ms,
    waited_ms,
)
from millstream.wire.messages import encode_error

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def parts(draw: st.DrawFn) -> LeasePart:
    span = draw(st.integers(1, 70))
    mask = draw(st.just(b"") | st.binary(min_size=span + 7 >> 3, max_size=span + 7 >> 3))
    return LeasePart(
        draw(st.text(max_size=9)),
        draw(U32),
        draw(U64),
        draw(U32),
        draw(U32),
        draw(U32),
        draw(U64),
        span,
        mask,
        draw(st.lists(st.binary(max_size=60), max_size=3)),
    )


@st.composite
def entries(draw: st.DrawFn) -> SettleEntry:
    kind, scope = draw(st.sampled_from(list(Settle))), draw(st.sampled_from(list(Scope)))
    bits = draw(st.integers(0, 2**80)) if scope is Scope.BITMAP else 0
    with_reason = scope is not Scope.BITMAP and kind in (Settle.NACK, Settle.REJECT)
    reason = draw(st.text(max_size=40)) if with_reason else ""
    return SettleEntry(kind, draw(U64), scope, draw(U64), draw(I32), bits, reason)


def received(stream: bytes, cuts: list[int], shared_bytes: int) -> list[tuple[int, int | None, memoryview]]:
    reader = FrameReader(shared=bytearray(shared_bytes))
    seen = []
    at, sizes = 0, cycle(cuts)
    while at < len(stream):
        size = next(sizes)
        for kind, correlation, payload in reader.feed(stream[at : at + size]):
            seen.append((kind, correlation, memoryview(bytes(payload))))
        at += size
    return seen


CUTS = st.lists(st.integers(1, 50), min_size=1)
SHARED = st.integers(13, 600)


@given(st.lists(st.builds(LeaseRequest, U32, U32, U32, U32) | st.lists(entries(), max_size=4), max_size=5), CUTS)
def test_requests_survive_any_chunking(sent: list[LeaseRequest | list[SettleEntry]], cuts: list[int]) -> None:
    wire = ServerConnection()
    stream = encode_frame(FrameType.HELLO, b'{"versions":[1]}', 1)
    for number, request in enumerate(sent):
        stream += encode_lease(request, number) if isinstance(request, LeaseRequest) else encode_settle(request, number)
    seen: list[object] = []
    at, sizes = 0, cycle(cuts)
    while at < len(stream):
        room = wire.reader.buffer()
        piece = stream[at : at + min(next(sizes), len(room))]
        at += len(piece)
        room[: len(piece)] = piece
        wire.reader.received(len(piece))
        seen += wire.requests()
    expected = [r if isinstance(r, LeaseRequest) else SettleRequest(r) for r in sent]
    assert seen[1:] == list(enumerate(expected))


@given(st.lists(parts(), max_size=4), U32, CUTS, SHARED)
def test_answers_to_a_lease_survive_any_chunking(
    sent: list[LeasePart], waited: int, cuts: list[int], shared_bytes: int
) -> None:
    stream = b"".join(encode_lease_result(9, sent, waited))
    ((kind, correlation, payload),) = received(stream, cuts, shared_bytes)
    assert (kind, correlation) == (FrameType.RESPONSE, 9)
    seen = decode_lease_result(payload)
    assert waited_ms(payload) == waited
    assert [part[:-1] for part in seen] == [part[:-1] for part in sent]
    assert [b"".join(part.batches) for part in seen] == [b"".join(part.batches) for part in sent]


@given(st.lists(st.sampled_from([0, 1, 2, 3, 40]), max_size=20), st.lists(U32, max_size=20))
def test_answers_to_a_settle_round_trip_and_plain_ones_take_no_bytes(results: list[int], lasting: list[int]) -> None:
    ((_, _, payload),) = received(encode_settle_result(2, results, lasting), [50], 600)
    assert list(decode_settle_result(payload, len(results))) == results
    assert list(lasting_ms(payload)) == lasting
    if not any(results) and not lasting:
        assert len(payload) == 6


@given(st.lists(entries(), max_size=3), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_settle_is_read_or_refused_clearly(sent: list[SettleEntry], at: int, byte: int) -> None:
    ((_, _, payload),) = received(encode_settle(sent, 1), [4096], 8192)
    damaged = bytearray(payload)
    if at < len(damaged):
        damaged[at] = byte
    else:
        damaged.append(byte)
    try:
        decode_settle(memoryview(damaged))
    except MillstreamError as error:
        assert "SETTLE" in str(error)


@given(st.lists(parts(), max_size=3), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_lease_answer_is_read_or_refused_clearly(sent: list[LeasePart], at: int, byte: int) -> None:
    ((_, _, payload),) = received(b"".join(encode_lease_result(1, sent)), [4096], 8192)
    damaged = bytearray(payload)
    if at < len(damaged):
        damaged[at] = byte
    else:
        del damaged[-1]
    try:
        decode_lease_result(memoryview(damaged))
    except MillstreamError as error:
        assert str(error)


def test_a_mask_says_which_offsets_are_leased() -> None:
    part = LeasePart("t", 0, 1, 0, 1, 0, 10, 10, b"\x05\x02", [])
    assert part.granted == 0b10_0000_0101
    assert part._replace(mask=b"").granted == 2**10 - 1


def test_a_reason_is_cut_between_letters() -> None:
    entry = SettleEntry(Settle.NACK, 1, reason="é" * REASON_BYTES_MAX)
    ((_, _, payload),) = received(encode_settle([entry], 1), [8192], 8192)
    assert decode_settle(payload)[0].reason == "é" * (REASON_BYTES_MAX // 2)


@pytest.mark.parametrize(
    "entry",
    [
        SettleEntry(0, 1),
        SettleEntry(6, 1),
        SettleEntry(Settle.ACK, 1, 3),
        SettleEntry(Settle.ACK, 1, reason="no reason is needed"),
    ],
)
def test_what_a_settle_may_not_say(entry: SettleEntry) -> None:
    ((_, _, payload),) = received(encode_settle([entry], 1), [4096], 4096)
    with pytest.raises(ProtocolViolation, match="SETTLE"):
        decode_settle(payload)


def test_answers_carry_errors_like_all_others() -> None:
    ((_, _, payload),) = received(encode_error(ReceiptInvalid("consumer 7 is closed"), 1), [4096], 4096)
    with pytest.raises(ReceiptInvalid, match="consumer 7"):
        decode_lease_result(payload)
    with pytest.raises(ReceiptInvalid, match="consumer 7"):
        decode_settle_result(payload, 1)
    with pytest.raises(ProtocolViolation, match="3 entries"):
        decode_settle_result(memoryview(encode_settle_result(1, [0, 1])[16:]), 3)
