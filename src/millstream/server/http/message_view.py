"""What a message says, in JSON, for answers that say more about it than the message itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from millstream.values import Encoding, to_headers, to_json, to_json_start

__all__ = ["Content", "content", "view_of"]

V = TypeVar("V", bound=msgspec.Struct)


class Content(msgspec.Struct, kw_only=True):
    """The fields that every message has, under the names that ShownMessage has for them."""

    key: str | None
    #: `text` or `base64`.
    key_encoding: str
    value: Any
    #: Of the value: `text`, `json` or `base64`.
    encoding: str
    #: Bytes of the value, also of one that is not shown as a whole.
    size: int
    #: A list stands for a name that occurs several times; what is not text, or begins so, is base64 behind `base64:`.
    headers: dict[str, str | list[str]]
    priority: int


def content(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes]],
    encoding: Encoding,
    size: int | None = None,
) -> dict[str, Any]:
    """The fields of Content but the priority; with `size`, the value is only a beginning of what is so long."""
    length = len(value or b"")
    shown_key, key_encoding = to_json(key, "text")
    shown, how = (to_json if size in (None, length) else to_json_start)(value, encoding)
    return {
        "key": shown_key,
        "key_encoding": key_encoding,
        "value": shown,
        "encoding": how,
        "size": length if size is None else size,
        "headers": to_headers(headers),
    }


def view_of(kind: type[V], answer: msgspec.Struct, **shown: Any) -> V:
    """An answer of the broker as this door shows it: `shown` where that differs, fields of the same name elsewhere."""
    same = {name: getattr(answer, name) for name in kind.__struct_fields__ if name not in shown}
    return kind(**same, **shown)
