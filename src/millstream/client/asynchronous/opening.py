"""What asynchronous factories return: `async with` it, or `await` it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from millstream.client.asynchronous.queue import AsyncQueue
from millstream.client.asynchronous.stream import AsyncStream
from millstream.client.leases import AsyncQueueMessage
from millstream.client.messages import Message

__all__ = ["Opening", "OpeningQueue", "OpeningStream"]


class _Closable(Protocol):
    async def __aexit__(self, *details: Any) -> None: ...


T = TypeVar("T", bound=_Closable)


class Opening(Generic[T]):
    """Something that needs to talk to the broker before it can be used."""

    def __init__(self, open_it: Callable[[], Awaitable[T]]) -> None:
        self._open_it = open_it
        self._opened: T | None = None

    async def _open(self) -> T:
        self._opened = await self._open_it()
        return self._opened

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        return await self._open()

    async def __aexit__(self, *details: Any) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(*details)

    if not TYPE_CHECKING:  # a type checker is to say where something is used before it is open

        def __getattr__(self, name: str) -> Any:
            """What was opened answers for itself, as in `async for message in stream: await stream.commit()`."""
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if self._opened is None:
                raise AttributeError(f"{name!r} is there when this is open: `async with` it, or `await` it, first")
            return getattr(self._opened, name)


class OpeningStream(Opening[AsyncStream]):
    """A stream to be; `async for` works on it directly."""

    async def __aiter__(self) -> AsyncIterator[Message]:
        async with self as stream:
            async for message in stream:
                yield message


class OpeningQueue(Opening[AsyncQueue]):
    """A queue to be; `async for` works on it directly."""

    async def __aiter__(self) -> AsyncIterator[AsyncQueueMessage]:
        async with self as queue:
            async for message in queue:
                yield message
