"""A message as a line of text: by a format of the user's, or as JSON."""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.failure import UsageProblem
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.client import Message

__all__ = ["json_bytes", "json_content", "make_renderer", "message_document"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS: Final[Mapping[str, Callable[[Message], object]]] = {
    "value": lambda message: _text(message.value),
    "key": lambda message: _text(message.key),
    "headers": lambda message: json.dumps(_headers(message.header_items()), ensure_ascii=False),
    "topic": lambda message: message.topic,
    "partition": lambda message: message.partition,
    "offset": lambda message: message.offset,
    "timestamp": lambda message: _time(message),
    "id": lambda message: message.id,
    "priority": lambda message: message.priority,
}


def make_renderer(line_format: str, *, as_json: bool, terminal: bool) -> Callable[[Message], bytes]:
    """What turns a message into a line.  Raises UsageProblem for a format that cannot work."""
    if as_json:
        return lambda message: json.dumps(message_document(message), ensure_ascii=False).encode() + b"\n"
    if line_format == "{value}" and not terminal:
        return lambda message: (message.value or b"") + b"\n"  # bytes through the pipe, whatever they are
    template = line_format.replace("\\n", "\n").replace("\\t", "\t")
    fields = _fields_of(template)

    def render(message: Message) -> bytes:
        line = template.format_map({name: _FIELDS[name](message) for name in fields})
        if terminal:
            line = terminal_safe(line)
        return line.encode("utf-8", "surrogateescape") + b"\n"

    return render


def _fields_of(template: str) -> set[str]:
    known = ", ".join(f"{{{name}}}" for name in _FIELDS)
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if unknown := sorted(found - _FIELDS.keys()):
            raise UsageProblem(f"--format does not know {{{unknown[0]}}}: use {known}")
        template.format_map({name: 0 if name in ("partition", "offset", "priority") else "" for name in found})
    except (ValueError, KeyError, IndexError) as problem:
        raise UsageProblem(f"--format {template!r} cannot be understood: {problem}") from None
    return found


def message_document(message: Message) -> dict[str, Any]:
    """A message as JSON values.  Bytes that are not UTF-8 travel as base 64 under a name that says so."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "id": message.id,
        "timestamp_ms": message.timestamp_us // 1000,
        "priority": message.priority,
        **({"expiry_ms": message.expiry_us // 1000} if message.expiry_us else {}),
        **json_bytes("key", message.key),
        "headers": _headers(message.header_items()),
        **json_bytes("value", message.value),
    }


def json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    """One entry of a JSON object: `name`, or `name_base64` when the bytes are not text."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def json_content(key: bytes | None, headers: Iterable[tuple[str, bytes]], value: bytes | None) -> dict[str, Any]:
    """The entries of a JSON object that say what is in a stored message."""
    return {**json_bytes("key", key), "headers": _headers(headers), **json_bytes("value", value)}


def _headers(items: Iterable[tuple[str, bytes]]) -> dict[str, str | list[str]]:
    """As over HTTP: a list for a name that is there several times, `base64:` for what is not text."""
    from millstream.values import to_headers  # here: only commands that talk to a broker pay for it

    return to_headers(items)


def _time(message: Message) -> str:
    moment = message.timestamp
    if (moment - _EPOCH) // timedelta(microseconds=1) != message.timestamp_us:
        return f"{message.timestamp_us // 1000} ms"  # no year of Python's, as when milliseconds are taken for seconds
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "surrogateescape")
