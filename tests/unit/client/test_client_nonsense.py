"""A broker that answers what nobody asked: one sentence that blames nobody else, and the next request works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_broker import FakeBroker

import millstream
from millstream import aio
from millstream.errors import ProtocolViolation, RequestTimeout
from millstream.wire.calls import Metadata
from millstream.wire.frames import FrameType, encode_frame, frame_head

Answer = Callable[[int], bytes]


class _Odd(FakeBroker):
    """Answers the first questions about topics in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: list[Answer] = []

    def _call(self, peer: Any, correlation: int, call: Any) -> None:
        if self.odd and isinstance(call, Metadata):
            peer.send(self.odd.pop(0)(correlation))
        else:
            super()._call(peer, correlation, call)


def _says(body: bytes) -> Answer:
    return lambda correlation: encode_frame(FrameType.RESPONSE, b"\0\0" + body, correlation)


def _endless(correlation: int) -> bytes:
    return frame_head(FrameType.RESPONSE, 200 * 1024 * 1024, correlation)


def _twice(correlation: int) -> bytes:
    return 2 * _says(b"[]")(correlation)


_NAMELESS = b'[{"name": "t", "partition_uids": [], "max_message_bytes": 1000}]'

#: What it answers, and what is said then; nothing if it is asked again on another connection.
_ODD = [
    (_says(b"[]"), "the broker says nothing about topic 't'"),
    (_twice, "the broker says nothing about topic 't'"),
    (_says(_NAMELESS), "the broker"),
    (_says(b"{{{"), "the broker's answer does not fit"),
    (_says(b'{"a": 1}'), "the broker's answer does not fit"),
    (_says(b'[{"name": 5}]'), "the broker's answer does not fit"),
    (lambda correlation: encode_frame(FrameType.RESPONSE, b"\0", correlation), "too short"),
    (_endless, None),
    (lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
]


@pytest.mark.parametrize(("answer", "said"), _ODD)
def test_an_answer_that_is_none_is_the_brokers_fault_and_the_next_request_works(
    answer: Answer, said: str | None
) -> None:
    with _Odd() as fake, millstream.connect(fake.address, timeout_s=20) as client:
        fake.odd.append(answer)
        if said is not None:
            with pytest.raises(ProtocolViolation, match=said):
                client.publish("t", b"x")
        client.publish("t", b"y")
        assert fake.values("t") == [b"y"]


@pytest.mark.parametrize(("answer", "said"), _ODD)
def test_an_asynchronous_client_says_the_same(answer: Answer, said: str | None) -> None:
    async def main(fake: _Odd) -> None:
        async with aio.connect(fake.address, timeout_s=20) as client:
            fake.odd.append(answer)
            if said is not None:
                with pytest.raises(ProtocolViolation, match=said):
                    await client.publish("t", b"x")
            await client.publish("t", b"y")

    with _Odd() as fake:
        asyncio.run(main(fake))
        assert fake.values("t") == [b"y"]


def test_an_answer_to_another_question_is_not_taken_for_this_ones() -> None:
    def to_another(correlation: int) -> bytes:
        return _says(b"[]")(correlation + 1000)

    with _Odd() as fake, millstream.connect(fake.address, timeout_s=1) as client:
        fake.odd.append(to_another)
        with pytest.raises(RequestTimeout):
            client.publish("t", b"x")
        client.publish("t", b"y")

    async def main(fake: _Odd) -> None:
        async with aio.connect(fake.address, timeout_s=1) as client:
            fake.odd.append(to_another)
            with pytest.raises(RequestTimeout, match="within 1 s"):
                await client.publish("t", b"x")
            await client.publish("t", b"y")

    with _Odd() as fake:
        asyncio.run(main(fake))
