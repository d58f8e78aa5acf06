"""How the parts of a client ask the broker: with a call, and the type that its answer is to have."""

from __future__ import annotations

from typing import Protocol, TypeVar

from millstream.wire.calls import Call

__all__ = ["Ask", "AsyncAsk", "T"]

T = TypeVar("T")


class Ask(Protocol):
    """Makes a call and returns its answer as a `kind`; `object` is for answers that say nothing."""

    def __call__(self, call: Call, kind: type[T], /) -> T: ...


class AsyncAsk(Protocol):
    """As Ask, for a client of asyncio."""

    async def __call__(self, call: Call, kind: type[T], /) -> T: ...
