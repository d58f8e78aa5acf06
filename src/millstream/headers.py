"""A message's headers as bytes: a row of `u16 name size, name, u32 value size, value`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct
from typing import Final

from millstream.errors import BatchDamaged, PayloadTooLarge

__all__ = ["UNREADABLE", "decode_headers", "encode_headers", "readable_headers"]

#: Under this name stands, as bytes, what cannot be read as headers.
UNREADABLE: Final = "millstream-unreadable-headers"

_NAME_SIZE: Final = Struct("<H")
_VALUE_SIZE: Final = Struct("<I")


def encode_headers(headers: Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """A message's headers as stored.  Order and repeated names are kept."""
    if not headers:
        return b""
    parts: list[bytes] = []
    # A dict is by far the most common, and known by a look.
    named = headers.items() if type(headers) is dict or isinstance(headers, Mapping) else headers
    for name, value in named:
        value_bytes = value.encode() if isinstance(value, str) else value if type(value) is bytes else _bytes(value)
        parts += (_encode_name(name), _VALUE_SIZE.pack(len(value_bytes)), value_bytes)
    return b"".join(parts)


def _bytes(value: bytes) -> bytes:
    """Of a bytearray, say, or of a memoryview, whose length may be a number of other things than bytes."""
    return bytes(memoryview(value))


@lru_cache(maxsize=256)  # programs have few names, and all of their messages the same ones
def _encode_name(name: str) -> bytes:
    name_bytes = name.encode()
    if len(name_bytes) > 0xFFFF:
        raise PayloadTooLarge(f"a header name has 65535 bytes at most, not {len(name_bytes)}")
    return _NAME_SIZE.pack(len(name_bytes)) + name_bytes


def decode_headers(raw: bytes | None) -> list[tuple[str, bytes]]:
    """Names and values in the order they were written."""
    headers: list[tuple[str, bytes]] = []
    at, end = 0, len(raw) if raw else 0
    while at < end:
        assert raw is not None
        if at + 2 > end:
            raise BatchDamaged("a message's headers end inside a name")
        name_end = at + 2 + _NAME_SIZE.unpack_from(raw, at)[0]
        if name_end + 4 > end:
            raise BatchDamaged("a message's headers end inside a name")
        value_end = name_end + 4 + _VALUE_SIZE.unpack_from(raw, name_end)[0]
        if value_end > end:
            raise BatchDamaged("a message's headers end inside a value")
        headers.append((raw[at + 2 : name_end].decode("utf-8", "replace"), raw[name_end + 4 : value_end]))
        at = value_end
    return headers


def readable_headers(raw: bytes | None) -> list[tuple[str, bytes]]:
    """As `decode_headers`, but never raises: bytes that cannot be read as headers become the value of a single one."""
    try:
        return decode_headers(raw)
    except BatchDamaged:
        return [(UNREADABLE, raw or b"")]
