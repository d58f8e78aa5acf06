"""What asynchronous factories return: `async with` it, or `await` it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from millstream.client.asynchronous.queue import AsyncQueue
from millstream.client.asynchronous.stream import AsyncStream
from millstream.client.leases import AsyncQueueMessage
from millstream.client.messages import Message
from millstream.errors import ConnectionLost

__all__ = ["Opening", "OpeningQueue", "OpeningStream"]


class _Closable(Protocol):
    @property
    def close(self) -> Callable[..., Awaitable[None]]: ...

    async def __aexit__(self, *details: Any) -> None: ...


T = TypeVar("T", bound=_Closable)


class Opening(Generic[T]):
    """Something that needs to talk to the broker before it can be used."""

    def __init__(self, open_it: Callable[[], Awaitable[T]]) -> None:
        self._open_it = open_it
        self._opened: T | None = None
        self._closed = False

    async def _open(self) -> T:
        self._check_open()
        self._opened = await self._open_it()
        if self._closed:  # meanwhile, by another task: it did not know of it yet
            await self._opened.close()
        return self._opened

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("it was closed before it was opened")

    async def close(self, *limit: Any, **limits: Any) -> None:
        """Close what was opened, as that does; what was not cannot be opened any more."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close(*limit, **limits)

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        return await self._open()

    async def __aexit__(self, *details: Any) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(*details)

    async def _each(self) -> AsyncIterator[Any]:
        """What comes of it, from opening to closing it; nothing if it was closed before."""
        if not self._closed:
            async with self as opened:
                async for message in opened:  # type: ignore[attr-defined]
                    yield message

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

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._each()


class OpeningQueue(Opening[AsyncQueue]):
    """A queue to be; `async for` works on it directly."""

    def __aiter__(self) -> AsyncIterator[AsyncQueueMessage]:
        return self._each()
