"""Messages as JSON objects, one on a line: what `millstream publish --json-lines` reads."""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from millstream.cli.arguments import TIME_FORMS, header_value, parse_moment
from millstream.cli.failure import UsageProblem
from millstream.errors import InvalidArgument
from millstream.names import did_you_mean

if TYPE_CHECKING:
    from millstream.client.values import HeaderItems, Headers, SendOptions

__all__ = ["LineMessage", "read_json_lines"]

_CONTENT: Final = ("value", "value_base64", "key", "key_base64", "headers")
#: As the arguments of `client.publish`.
_OPTIONS: Final = (
    "partition",
    "priority",
    "ttl",
    "delay",
    "deliver_at",
    "timestamp",
    "dedup_id",
    "max_retries",
    "lease",
)
#: As `millstream consume --json` prints them.
_TIMES: Final = ("timestamp_ms", "expiry_ms")
#: Where a message was when it was printed, which says nothing about where its copy goes.
_ORIGIN: Final = ("topic", "partition", "offset", "id")


class LineMessage(NamedTuple):
    value: bytes | None
    key: bytes | None
    headers: Headers | HeaderItems | None
    options: SendOptions = {}  # noqa: RUF012 - nobody writes to it


def read_json_lines(lines: Iterable[bytes], key: bytes | None, headers: Headers | None) -> Iterator[LineMessage]:
    """Objects as `millstream consume --json` prints them, too; what they do not say comes from the options."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise UsageProblem(f"line {number} is not JSON: {problem}") from None
        if not isinstance(document, dict) or not {"value", "value_base64"} & document.keys():
            raise UsageProblem(f"line {number} is not an object with a value")
        if "offset" in document:
            document = {name: said for name, said in document.items() if name not in _ORIGIN}
        _check_names(document, number)
        found_key = _bytes(document, "key", number)
        yield LineMessage(
            _bytes(document, "value", number),
            found_key if found_key is not None else key,
            _headers(document, headers or {}, number) or None,
            _options(document, number),
        )


def _check_names(document: dict[str, Any], number: int) -> None:
    known = (*_CONTENT, *_OPTIONS, *_TIMES)
    for name in document:
        if name not in known:
            hint = did_you_mean(name, known) or f": use {', '.join(known)}"
            raise UsageProblem(f"line {number} has a {name!r}, which no message has{hint}")


def _options(document: dict[str, Any], number: int) -> SendOptions:
    options = {name: document[name] for name in _OPTIONS if document.get(name) is not None}
    for name in ("timestamp", "deliver_at"):
        if isinstance(options.get(name), str):
            moment = parse_moment(options[name], datetime.datetime.now(datetime.UTC))
            if moment is None:
                raise UsageProblem(f"line {number} has a {name} that is no time: use {TIME_FORMS}")
            options[name] = moment
    timestamp_ms, expiry_ms = (_milliseconds(document, name, number) for name in _TIMES)
    if timestamp_ms:
        options.setdefault("timestamp", timestamp_ms / 1000)
    if expiry_ms:
        left_ms = max(1, expiry_ms - time.time_ns() // 1_000_000)  # what is over stays over
        try:
            options.setdefault("ttl", datetime.timedelta(milliseconds=left_ms))
        except OverflowError:
            raise UsageProblem(f"line {number} has an expiry_ms that is too far away to be a time") from None
    return cast("SendOptions", options)


def _milliseconds(document: dict[str, Any], name: str, number: int) -> int:
    said = document.get(name) or 0
    if type(said) is not int or said < 0:
        raise UsageProblem(f"line {number} has a {name} that is no number of milliseconds since 1970")
    return said


def _headers(document: dict[str, Any], common: Headers, number: int) -> list[tuple[str, str | bytes]]:
    """A list stands for a name that is there several times."""
    found = document.get("headers") or {}
    if not isinstance(found, dict) or not all(map(_is_text, found.values())):
        raise UsageProblem(f"line {number} has headers that are not names with texts")
    said = {name: [text] if isinstance(text, str | bytes) else text for name, text in {**common, **found}.items()}
    try:
        return [(name, header_value(name, text)) for name, texts in said.items() for text in texts]
    except InvalidArgument as problem:
        raise UsageProblem(f"line {number}: {problem}") from None


def _is_text(said: object) -> bool:
    return isinstance(said, str) or (isinstance(said, list) and all(isinstance(text, str) for text in said))


def _bytes(document: dict[str, Any], name: str, number: int) -> bytes | None:
    """A text as it is, bytes as base 64 under `<name>_base64`, and any other JSON value as JSON."""
    encoded = document.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (ValueError, TypeError):
            raise UsageProblem(f"line {number} has a {name}_base64 that is not base 64") from None
    value = document.get(name)
    if value is None:
        return None
    try:
        return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageProblem(f"line {number} has a {name} with half a surrogate pair, which is not text") from None
