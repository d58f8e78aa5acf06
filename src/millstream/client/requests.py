"""Requests that wait for a reply: who waits for what, and where replies go.  Shared by both clients; no sockets.

A client has one inbox for all of its requests.  Each request carries the inbox's address and a number; a reply repeats
the number.  A reply that nobody waits for (any more) is dropped and counted.
"""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from millstream.client.arguments import as_dict
from millstream.client.messages import Message
from millstream.client.spans import traced
from millstream.client.subscribing import messages_in
from millstream.client.values import Headers, Key, Value, make_entry
from millstream.entries import encode_entries
from millstream.errors import InvalidArgument, NoReplyAddress
from millstream.names import INBOX_PREFIX
from millstream.options import CORRELATION_ID, REPLY_TO
from millstream.traceparent import TRACEPARENT, TRACESTATE
from millstream.wire.deliveries import decode_delivery

__all__ = ["Inbox", "encode_reply", "is_inbox", "replier", "reply_address"]

#: Far beyond the numbers that requests of the protocol have, so that both can wait in the same place.
_FIRST_NUMBER: Final = 1 << 32


class Inbox:
    """Where the replies to one client's requests arrive."""

    def __init__(self) -> None:
        #: Chosen here and not by the broker, so that it stays the same over reconnects.
        self.address = INBOX_PREFIX + secrets.token_hex(16)
        #: Replies that came too late, or twice.
        self.late = 0
        self._numbers = itertools.count(_FIRST_NUMBER)

    def next_number(self) -> int:
        return next(self._numbers)

    def headers(self, number: int, headers: Headers | None) -> dict[str, str | bytes]:
        """What makes a message a request."""
        return {**as_dict("headers", headers), REPLY_TO: self.address, CORRELATION_ID: str(number)}

    def replies(self, payload: memoryview, reply: Callable[..., Any]) -> Iterator[tuple[int, Message]]:
        """The replies of a DELIVERY, with the numbers of their requests."""
        for message in messages_in(decode_delivery(payload), reply):
            text = message.headers.get(CORRELATION_ID, "")
            if text.isdecimal():
                yield int(text), message
            else:
                self.late += 1


def encode_reply(value: Value, json: Any, key: Key, headers: Headers | None) -> tuple[bytes, bytes]:
    """A batch for an inbox.  It has no number of a producer: a reply that comes twice is recognised by who asked."""
    entry = make_entry(value, key, traced(headers), json=json)
    return encode_entries((entry,), base_timestamp_us=time.time_ns() // 1000)


def is_inbox(address: str) -> bool:
    return address.startswith(INBOX_PREFIX)


def reply_address(message: Message, headers: Headers | None) -> tuple[str, dict[str, str | bytes] | None]:
    """Where the reply to a message goes, and the headers it needs.  Raises NoReplyAddress."""
    asked = message.headers
    if REPLY_TO not in asked:
        raise NoReplyAddress(f"{message!r} does not ask for a reply: it has no header {REPLY_TO}")
    made = dict(traced(headers) or {})
    if TRACEPARENT in asked and TRACEPARENT not in made:  # the reply belongs to the trace of the request
        made |= {name: asked[name] for name in (TRACEPARENT, TRACESTATE) if name in asked}
    if CORRELATION_ID in asked:
        made[CORRELATION_ID] = dict(message.header_items())[CORRELATION_ID]  # bytes: whoever asked may not speak text
    return asked[REPLY_TO], made or None


class Replying(Protocol):
    @property
    def reply(self) -> Callable[..., Any]: ...


def replier(client: Replying) -> Callable[..., Any]:
    """What messages reply with; does not keep the client alive."""
    me = weakref.ref(client)

    def reply(message: Message, value: Any = None, **options: Any) -> Any:
        client = me()
        if client is None:
            raise InvalidArgument("the client of this message is gone")
        return client.reply(message, value, **options)

    return reply
