"""How an endpoint is declared, and what its function gets to work with.

    topics = Family("topics", "Named logs.")

    @topics.get("/topics/{topic}", answer=TopicInfo)
    async def show_topic(exchange: Exchange[NoQuery, None]) -> TopicInfo:
        '''One topic, with its partitions.'''

The first line of the docstring is its summary in the OpenAPI document, the rest its description.  A family is mounted
twice if it is about things in a namespace: as written for `default`, and under `/namespaces/{namespace}`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from millstream.broker.broker import Broker, Session
from millstream.errors import InvalidArgument, PayloadTooLarge, RequestTimeout, ShuttingDown
from millstream.server.http.visitors import RequestHeaders
from millstream.wording import in_words

__all__ = [
    "Endpoint",
    "Exchange",
    "Family",
    "NoQuery",
    "Permission",
    "decode_body",
    "decode_query",
    "decode_with",
    "disconnected",
    "page",
    "read_body",
]

Q = TypeVar("Q")
B = TypeVar("B")
T = TypeVar("T")

#: What a key must allow for an endpoint to be called; `open` = anybody.
Permission = Literal["open", "read", "produce", "consume", "admin"]


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """An endpoint without query parameters."""


@dataclass(slots=True)
class Exchange(Generic[Q, B]):
    """One request on its way through an endpoint."""

    broker: Broker
    session: Session
    #: The variables of the path.
    path: Mapping[str, str]
    query: Q
    body: B
    headers: RequestHeaders
    request_id: str
    #: Of the answer; an endpoint may add to them.
    answer_headers: dict[str, str] = field(default_factory=dict)
    #: For endpoints that answer as a stream: the rest of the ASGI conversation.
    scope: Any = None
    receive: Any = None
    #: Set when the broker begins to stop.
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, call: object) -> Any:
        """Ask the broker."""
        return await self.broker.call(self.session, call)

    async def wait_for(self, waiting: Awaitable[T]) -> T:
        """Await what may take long; it is given up when the client goes away or the broker begins to stop."""
        task, closing = asyncio.ensure_future(waiting), asyncio.ensure_future(self.closing.wait())
        gone = asyncio.ensure_future(disconnected(self.receive))
        try:
            await asyncio.wait((task, closing, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if closing.done():
                raise ShuttingDown("the broker is shutting down")
            raise InvalidArgument("the client went away before there was an answer")
        finally:
            for one in (task, closing, gone):
                one.cancel()


Handler = Callable[[Exchange[Any, Any]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    family: Family
    permission: Permission
    #: Structs of the query parameters and of the JSON body; None = takes no body; bytes = takes any.
    query: type[msgspec.Struct]
    body: Any
    #: The type of the answer's JSON; None = an answer without a body.
    answer: Any
    status: int
    #: Of an answer that is not JSON.
    media_type: str
    #: What JSON a body of bytes may be, for the document.
    described_body: Any
    #: Answers with another status than `status` that are worth a word: what it means, and the type of its JSON.
    also: Mapping[int, tuple[str, Any]]

    @property
    def summary(self) -> str:
        return inspect.getdoc(self.handler).split("\n")[0]  # type: ignore[union-attr]

    @property
    def description(self) -> str:
        return "\n".join(inspect.getdoc(self.handler).split("\n")[1:]).strip()  # type: ignore[union-attr]


class Family:
    """Endpoints that belong together."""

    def __init__(self, name: str, about: str, *, namespaced: bool = True) -> None:
        self.name = name
        self.about = about
        self.namespaced = namespaced
        self.endpoints: list[Endpoint] = []

    def get(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("GET", path, **options)

    def post(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("POST", path, **options)

    def put(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("PUT", path, **options)

    def patch(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("PATCH", path, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("DELETE", path, **options)

    def _declare(
        self,
        method: str,
        path: str,
        *,
        permission: Permission | None = None,
        query: type[msgspec.Struct] = NoQuery,
        body: Any = None,
        answer: Any = None,
        status: int | None = None,
        media_type: str = "application/json",
        described_body: Any = None,
        also: Mapping[int, tuple[str, Any]] | None = None,
    ) -> Callable[[Handler], Handler]:
        def declare(handler: Handler) -> Handler:
            assert handler.__doc__, f"{method} {path} needs a docstring: it is its documentation"
            self.endpoints.append(
                Endpoint(
                    method=method,
                    path=path,
                    handler=handler,
                    family=self,
                    permission=permission or ("read" if method == "GET" else "admin"),
                    query=query,
                    body=body,
                    answer=answer,
                    status=status or (200 if answer is not None else 204),
                    media_type=media_type,
                    described_body=described_body,
                    also=also or {},
                )
            )
            return handler

        return declare


#: Entries of a list in one answer.
_PAGE_MAX: Final = 1000


def decode_query(kind: type[Q], text: bytes) -> Q:
    """Query parameters as a struct.  A list takes its parameter several times; a flag alone means true."""
    given: dict[str, Any] = {}
    if text:
        hints = [hint for base in kind.__mro__ for hint in getattr(base, "__annotations__", {}).items()]
        lists = {name for name, hint in hints if "list[" in str(hint)}
        try:
            pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
        except ValueError as problem:
            raise InvalidArgument(f"the query string cannot be read: {problem}") from None
        for name, value in pairs:
            if name in lists:
                given.setdefault(name, []).append(value)
            elif name in given:
                raise InvalidArgument(f"the parameter {name[:100]!r} is given twice")
            else:
                given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except (msgspec.ValidationError, OverflowError, ValueError) as problem:
        raise InvalidArgument(f"query parameters: {in_words(problem, kind=kind, given=given)}") from None


def decode_body(kind: Any, data: bytes) -> Any:
    return decode_with(lambda body: msgspec.json.decode(body, type=kind), data, kind=kind)


def decode_with(decode: Callable[[bytes], T], data: bytes, *, what: str = "request body", kind: Any = None) -> T:
    """What a decoder makes of a body, or one sentence about why it cannot; `kind` is what it expects."""
    try:
        return decode(data)
    except (msgspec.DecodeError, OverflowError, ValueError, RecursionError) as problem:
        raise InvalidArgument(f"{what}: {in_words(problem, kind=kind, data=data)}") from None


async def disconnected(receive: Any) -> None:
    """Returns when the client has gone away; for whoever has read the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Any, limit: int, time_s: float) -> bytes:
    """The whole body, or an error when it is larger than the broker would take anyway, or slower."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body") and len(message.get("body", b"")) <= limit:
        body: bytes = message.get("body", b"")
        return body
    try:
        async with asyncio.timeout(time_s):
            return await _rest_of_body(message, receive, limit)
    except TimeoutError:
        raise RequestTimeout(f"the body of the request did not come within {time_s:g} s") from None


async def _rest_of_body(message: Any, receive: Any, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise InvalidArgument("the client went away in the middle of its request")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes, the limit of this broker")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        message = await receive()


def page(exchange: Exchange[Any, Any], items: Sequence[T], *, limit: int, offset: int) -> list[T]:
    """A part of a list, and in the headers how long the whole of it is."""
    if not 1 <= limit <= _PAGE_MAX:
        raise InvalidArgument(f"limit must be between 1 and {_PAGE_MAX}, not {limit}")
    if offset < 0:
        raise InvalidArgument(f"offset must not be negative, it is {offset}")
    exchange.answer_headers.update({"x-total-count": str(len(items)), "x-limit": str(limit), "x-offset": str(offset)})
    return list(items[offset : offset + limit])
