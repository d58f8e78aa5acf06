"""W3C trace context: the header `traceparent`, which says to which trace a message belongs.

A message that came without one has a trace of its own all the same: the 128 bits of its id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument
from millstream.ids import parse_message_id

__all__ = [
    "TRACEPARENT",
    "TRACESTATE",
    "TraceContext",
    "check_trace_id",
    "context_of",
    "own_trace_id",
    "parse_traceparent",
]

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_FORM: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.DOTALL)


class TraceContext(NamedTuple):
    trace_id: str
    #: The span of whoever sent the message.
    span_id: str
    #: Whether whoever began the trace wants to see it.
    sampled: bool


def parse_traceparent(content: bytes) -> TraceContext | None:
    """What a `traceparent` says; None when it is not one, which is nobody's error: then there is no trace."""
    form = _FORM.fullmatch(content.strip())
    if form is None or (content[:2] == b"00" and len(content.strip()) != 55):
        return None
    trace_id, span_id, flags = (group.decode() for group in form.groups())
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def context_of(headers: Iterable[tuple[str, bytes]]) -> TraceContext | None:
    """The trace that a message's headers speak of."""
    return next((parse_traceparent(content) for name, content in headers if name == TRACEPARENT), None)


def own_trace_id(message_id: str) -> str:
    """The trace of a message that came without one.  Raises InvalidArgument when the text is not an id."""
    place = parse_message_id(message_id)
    return f"{place.append_time_ms << 80 | place.partition_uid << 48 | place.offset:032x}"


def check_trace_id(text: str) -> bytes:
    """The 16 bytes of a trace id.  Raises InvalidArgument when the text is not one."""
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise InvalidArgument(f"a trace id has 32 hexadecimal digits, {text[:40]!r} has not")
    return bytes.fromhex(text)
