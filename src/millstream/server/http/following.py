"""A topic as a stream of lines: every message from a place on, then each new one as it comes.

One read of one partition is in memory at a time.  A partition that is through is waited for, and goes to the end of
the line when it has something again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import msgspec

from millstream.broker.background import comes_within
from millstream.broker.broker import Broker, FetchAnswer, FetchHandle, Session
from millstream.errors import MillstreamError, OffsetOutOfRange, TopicNotFound
from millstream.records import Buffer
from millstream.server.http.incoming import ShownMessage, shown_messages
from millstream.values import Encoding
from millstream.wire.calls import ListOffsets
from millstream.wire.message_calls import cursor_text
from millstream.wire.messages import FetchRequest

__all__ = ["Follower"]

_READ_BYTES: Final = 256 * 1024
#: One piece has so many messages at most, or so many bytes of values and one message more: made in a few milliseconds.
_PIECE_MESSAGES: Final = 500
_PIECE_BYTES: Final = 1024 * 1024
#: A wait at the end of a partition is renewed after this long.
_WAIT_MS: Final = 60_000

_encode: Final = msgspec.json.Encoder()


class Follower:
    """Some partitions of one topic, followed by one client."""

    def __init__(
        self,
        broker: Broker,
        session: Session,
        topic: str,
        uids: Sequence[int],
        positions: Mapping[int, int],
        *,
        encoding: Encoding,
    ) -> None:
        self._broker = broker
        self._session = session
        self._topic = topic
        self._uids = uids
        self._positions = dict(positions)
        self._encoding: Encoding = encoding
        self._ready = deque(self._positions)
        self._waiting: dict[int, FetchHandle] = {}
        self._news = asyncio.Event()
        self._ended: MillstreamError | None = None

    def end(self, why: MillstreamError) -> None:
        """The client may not read on, also if nothing comes."""
        self._ended = why
        self._news.set()

    async def lines(self, *, limit: int, heartbeat_ms: int) -> AsyncGenerator[bytes, None]:
        """Pieces of whole lines; a heartbeat says where to go on, should the connection be lost."""
        left = limit
        try:
            while True:
                while self._ready:
                    number = self._ready.popleft()
                    async for messages in self._read(number):
                        if self._ended is not None:
                            raise self._ended
                        if limit:
                            messages = messages[:left]
                            left -= len(messages)
                        yield _encode.encode_lines(messages)
                        if limit and not left:
                            return
                if self._ended is not None:
                    raise self._ended
                self._news.clear()
                if self._ready:
                    continue
                if not await comes_within(self._news, heartbeat_ms / 1000):
                    yield _encode.encode_lines([self._heartbeat()])
        finally:
            for handle in self._waiting.values():
                handle.cancel()

    def _heartbeat(self) -> dict[str, Any]:
        return {"heartbeat_ms": self._broker.now_us() // 1000, "after": cursor_text(self._positions)}

    async def _read(self, number: int) -> AsyncGenerator[list[ShownMessage], None]:
        """What a partition has now, a read of it; then it goes to the end of the line, or is waited for."""
        try:
            answer = await self._fetch(number)
        except OffsetOutOfRange:
            # Retention was faster than this reader; what is left begins later.
            answer = await self._from_the_start(number)
        async for piece in self._pieces(number, answer.buffers):
            self._positions[number] = piece[-1].offset + 1
            yield piece
        self._positions[number] = max(self._positions[number], answer.next_offset)
        if self._positions[number] < answer.high_watermark:
            self._ready.append(number)
        else:
            self._wait(number)

    async def _pieces(self, number: int, buffers: Sequence[Buffer]) -> AsyncGenerator[list[ShownMessage], None]:
        first, uid = self._positions[number], self._uids[number]
        piece: list[ShownMessage] = []
        size = 0
        for message in shown_messages(buffers, self._topic, number, uid, first, self._encoding):
            piece.append(message)
            size += message.size
            if len(piece) == _PIECE_MESSAGES or size >= _PIECE_BYTES:
                yield piece
                piece, size = [], 0
                await asyncio.sleep(0)  # a socket that takes everything at once waits for nobody
        if piece:
            yield piece

    async def _fetch(self, number: int) -> FetchAnswer:
        self._check_topic(number)
        done: asyncio.Future[FetchAnswer | MillstreamError] = asyncio.get_running_loop().create_future()
        request = FetchRequest(self._topic, number, self._positions[number], _READ_BYTES, 0)
        self._broker.fetch(self._session, request, lambda answer: None if done.done() else done.set_result(answer))
        answer = await done
        if isinstance(answer, MillstreamError):
            raise answer
        return answer

    def _check_topic(self, number: int) -> None:
        """Positions in a topic say nothing about another that was made under its name."""
        found = self._broker.topics.registry.get(self._session.namespace, self._topic)
        if found.partition_uids[number : number + 1] != [self._uids[number]]:
            raise TopicNotFound(f"topic {self._topic!r} was deleted; there is another one of this name")

    async def _from_the_start(self, number: int) -> FetchAnswer:
        call = ListOffsets(topic=self._topic, at="earliest", partitions=[number])
        found: Any = await self._broker.call(self._session, call)
        if found[0].offset <= self._positions[number]:
            raise OffsetOutOfRange(f"partition {number} of topic {self._topic!r} does not reach that far")
        self._positions[number] = found[0].offset
        return await self._fetch(number)

    def _wait(self, number: int) -> None:
        def woken(_: FetchAnswer | MillstreamError) -> None:
            # What it found is read again when its turn comes, and an error is met again then.
            self._waiting.pop(number, None)
            self._ready.append(number)
            self._news.set()

        request = FetchRequest(self._topic, number, self._positions[number], 1, _WAIT_MS)
        handle = self._broker.fetch(self._session, request, woken)
        if handle is not None:
            self._waiting[number] = handle
