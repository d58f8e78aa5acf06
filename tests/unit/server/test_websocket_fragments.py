"""Frames of a WebSocket that come in pieces: the message is what they hold together, and costs no more than that."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from millstream.server.http.protocol import LimitedWebSocket


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


def protocol() -> LimitedWebSocket:
    config = uvicorn.Config(_nothing, lifespan="off", log_config=None, ws=LimitedWebSocket)
    made = LimitedWebSocket(config, ServerState(), {}, Mock())
    made.transport = Mock()
    return made


def held_bytes(made: LimitedWebSocket) -> int:
    """What the pieces of an unfinished message take."""
    holders = [value for value in vars(made).values() if isinstance(value, list | bytearray)]
    inside = [piece for holder in holders if isinstance(holder, list) for piece in holder]
    return sum(map(sys.getsizeof, [*holders, *inside]))


@pytest.mark.parametrize("piece", [b"", b"ab"])
def test_many_small_pieces_take_no_more_than_one_large_one(piece: bytes) -> None:
    made = protocol()
    made.handle_text(Frame(Opcode.TEXT, b"<", fin=False))
    for _ in range(10_000):
        made.handle_cont(Frame(Opcode.CONT, piece, fin=False))
    assert held_bytes(made) < 2 * len(piece) * 10_000 + 4_096
    made.handle_cont(Frame(Opcode.CONT, b">", fin=True))
    assert made.queue.get_nowait() == {"type": "websocket.receive", "text": "<" + piece.decode() * 10_000 + ">"}


def test_messages_in_pieces_one_after_the_other() -> None:
    made = protocol()
    for text in (b"one", b"two"):
        made.handle_bytes(Frame(Opcode.BINARY, text[:1], fin=False))
        made.handle_cont(Frame(Opcode.CONT, text[1:2], fin=False))
        made.handle_cont(Frame(Opcode.CONT, text[2:], fin=True))
        event = made.queue.get_nowait()
        assert event == {"type": "websocket.receive", "bytes": text}
        assert type(event["bytes"]) is bytes  # type: ignore[typeddict-item]
