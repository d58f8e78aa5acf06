"""Message values, keys and headers in JSON: as text, as JSON or as base64, whichever the caller says."""

from __future__ import annotations

import contextlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from millstream.errors import InvalidArgument

__all__ = ["Encoding", "from_header", "from_headers", "from_json", "from_raw", "to_headers", "to_json", "to_json_start"]

#: `auto`, coming in: a string is text, null is null, anything else is JSON.  Going out: JSON if it reads as an object
#: or a list, else text if it is UTF-8, else base64.
Encoding = Literal["auto", "text", "json", "base64"]

#: Behind this a header is base64: bytes that are not text, and text that would be taken for that.
_BYTES: Final = "base64:"

_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


def from_json(value: Any, encoding: Encoding = "auto", *, what: str = "value") -> bytes | None:
    """The bytes of a value that came in a JSON document."""
    if value is None and encoding != "json":
        return None
    if encoding == "json" or (encoding == "auto" and not isinstance(value, str)):
        return msgspec.json.encode(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a string when its encoding is {encoding!r}")
    if encoding == "base64":
        try:
            return b64decode(value, validate=True)
        except ValueError:
            raise InvalidArgument(f"{what} is not base64") from None
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is not valid Unicode text") from None


def from_raw(raw: msgspec.Raw, encoding: Encoding = "auto", *, what: str = "value") -> bytes | None:
    """As from_json, of a value that was left as it came: JSON is stored as it was written, to the last digit."""
    data = bytes(raw)
    if data[:1] != b'"' or encoding == "json":
        if encoding in ("auto", "json"):
            if data == b"null" and encoding == "auto":
                return None
            if not data.isascii():
                _as_text(data, what)
            return data
        return from_json(_decode(data), encoding, what=what)
    try:
        text = _decode_text(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidArgument(f"{what} is not valid Unicode text") from None
    return text.encode() if encoding != "base64" else from_json(text, encoding, what=what)


def _as_text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{what} is not valid Unicode text") from None


def to_json(data: bytes | None, encoding: Encoding = "auto") -> tuple[Any, str]:
    """Something to put into a JSON document, and the encoding that it has; base64 where the wish cannot be granted."""
    if data is None:
        return None, "text"
    data = bytes(data)
    if encoding != "base64":
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return b64encode(data).decode(), "base64"
        if encoding == "json" or (encoding == "auto" and data[:1] in (b"{", b"[")):
            # As it was written, to the last digit; only line breaks must go, because of answers that are lines.
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                return msgspec.Raw(msgspec.json.format(data, indent=-1)), "json"
        return text, "text"
    return b64encode(data).decode(), "base64"


def to_json_start(data: bytes | None, encoding: Encoding = "auto") -> tuple[Any, str]:
    """As to_json, of the first bytes of a value: that is no JSON any more, and may end inside a letter."""
    if data is not None and encoding != "base64":
        for missing in range(4):
            try:
                return data[: len(data) - missing].decode(), "text"
            except UnicodeDecodeError:
                continue
    return to_json(data, "base64")


def from_headers(headers: Mapping[str, str | list[str]]) -> list[tuple[str, bytes]]:
    """Headers of a message; a list stands for a name that occurs several times."""
    pairs: list[tuple[str, bytes]] = []
    for name, value in headers.items():
        pairs += [(name, from_header(name, one)) for one in ([value] if isinstance(value, str) else value)]
    return pairs


def from_header(name: str, text: str) -> bytes:
    """The bytes of one header: of its text, or what is base64 behind `base64:`."""
    if text.startswith(_BYTES):
        return from_json(text[len(_BYTES) :], "base64", what=f"header {name[:100]!r} behind {_BYTES!r}") or b""
    return from_json(text, "text", what=f"header {name[:100]!r}") or b""


def to_headers(pairs: Iterable[tuple[str, bytes]]) -> dict[str, str | list[str]]:
    """The other way round; what is not text, or begins with `base64:` itself, is base64 behind `base64:`."""
    headers: dict[str, str | list[str]] = {}
    for name, data in pairs:
        shown, encoding = to_json(data, "base64" if data[: len(_BYTES)] == _BYTES.encode() else "text")
        text = f"{_BYTES}{shown}" if encoding == "base64" else str(shown)
        before = headers.get(name)
        if isinstance(before, list):
            before.append(text)  # a message may have a hundred thousand of them
        else:
            headers[name] = text if before is None else [before, text]
    return headers
