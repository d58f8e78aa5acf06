"""A message as a line of text: by a format of the user's, or as JSON."""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.failure import UsageProblem

if TYPE_CHECKING:
    from millstream.client import Message

__all__ = ["json_bytes", "make_renderer", "message_document", "terminal_safe"]

_FIELDS: Final[Mapping[str, Callable[[Message], object]]] = {
    "value": lambda message: _text(message.value),
    "key": lambda message: _text(message.key),
    "headers": lambda message: json.dumps(message.headers, ensure_ascii=False),
    "topic": lambda message: message.topic,
    "partition": lambda message: message.partition,
    "offset": lambda message: message.offset,
    "timestamp": lambda message: message.timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    "id": lambda message: message.id,
}

# Everything a terminal acts upon except tab and newline, and bytes that are no text (which `_text` lets through as
# surrogates): a message must not be able to move the cursor or worse.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff]")


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


def terminal_safe(text: str) -> str:
    """The text with everything that a terminal would act upon made visible."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)


def _fields_of(template: str) -> set[str]:
    known = ", ".join(f"{{{name}}}" for name in _FIELDS)
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if unknown := sorted(found - _FIELDS.keys()):
            raise UsageProblem(f"--format does not know {{{unknown[0]}}}: use {known}")
        template.format_map({name: 0 if name in ("partition", "offset") else "" for name in found})
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
        **json_bytes("key", message.key),
        "headers": message.headers,
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


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "surrogateescape")
