"""A client of either kind, synchronous or asynchronous, to be used from a synchronous test."""

from __future__ import annotations

import asyncio
from typing import Any

import millstream
from millstream import aio

__all__ = ["EitherClient"]


class EitherClient:
    def __init__(self, address: str, *, asynchronous: bool) -> None:
        self.loop = asyncio.new_event_loop() if asynchronous else None
        self.client: Any = self.do(aio.connect(address) if asynchronous else millstream.connect(address))

    def do(self, result: Any) -> Any:
        """What a method of the client has given, waited for if need be."""
        if self.loop is None:
            return result

        async def wait() -> Any:
            return await result

        return self.loop.run_until_complete(wait())

    def next(self, stream: Any, timeout_s: float = 10) -> millstream.Message | None:
        message: millstream.Message | None = self.do(stream.next(timeout_s))
        return message

    def values(self, stream: Any, count: int) -> list[bytes | None]:
        """The values of that many messages, sorted: partitions come in any order."""
        found = []
        for _ in range(count):
            message = self.next(stream)
            assert message is not None, f"only {sorted(found)}"
            found.append(message.value)
        return sorted(found)

    def end(self) -> None:
        self.do(self.client.close())
        if self.loop is not None:
            self.loop.close()
