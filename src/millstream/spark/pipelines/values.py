"""What ready steps do with single values: bytes in, bytes out, or a sentence about what is wrong.  No Spark here."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

import msgspec

__all__ = ["PathBroken", "ValueBroken", "make_redactor", "make_splitter", "parse_path"]

#: Numbers keep their digits: 1.10 stays 1.10, however many there are.
_decode: Final = msgspec.json.Decoder(float_hook=Decimal).decode
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_PART: Final = re.compile(r"([^.\[\]]+)((?:\[\])*)")
_MASK: Final = "***"
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TOO_DEEP: Final = "the value has too many lists and objects inside each other"

#: Names of fields, and None for "each element".
Steps: TypeAlias = tuple[str | None, ...]


class ValueBroken(ValueError):
    """A value is not what a step needs; says why."""


class PathBroken(ValueError):
    """This is not the path of a field."""


def parse_path(path: str, *, lists: bool = True) -> Steps:
    """`customer.email`, `items[].card`, `[].name`."""
    found: list[str | None] = []
    rest = path
    while rest.startswith("[]"):
        found.append(None)
        rest = rest[2:].removeprefix(".")
    for part in rest.split(".") if rest else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise PathBroken(f"{path!r} is not the path of a field: write it as customer.email or items[].card")
        found += [match[1], *[None] * (len(match[2]) // 2)]
    if not found:
        raise PathBroken(f"{path!r} is not the path of a field: write it as customer.email or items[].card")
    if not lists and None in found:
        raise PathBroken(f"{path!r} goes through a list: the array to split is a field, such as order.items")
    return tuple(found)


# --- redacting -------------------------------------------------------------------------------------------------------


def make_redactor(fields: Mapping[str, str], salt: bytes | None) -> Callable[[bytes], bytes]:
    """What drops, masks or hashes fields of JSON values.

    A field that is not there, or is null, is no mistake.  What has another shape than the path says is one: nobody can
    tell whether what must not be seen is in it.
    """
    rules = [(parse_path(path), _changes(salt)[action]) for path, action in fields.items()]
    rules.sort(key=lambda rule: -len(rule[0]))  # what is inside of another field goes first: that may be gone then

    def redact(value: bytes) -> bytes:
        document = _json(value)
        for path, change in rules:
            _change(document, path, 0, change)
        try:
            return _encode(document)
        except RecursionError:
            raise ValueBroken(_TOO_DEEP) from None

    return redact


def _changes(salt: bytes | None) -> dict[str, Callable[[Any], Any] | None]:
    def mask(content: Any) -> Any:
        return None if content is None else _MASK

    def hashed(content: Any) -> Any:
        if content is None:
            return None
        text = content.encode() if isinstance(content, str) else _encode(content)
        return hmac.new(salt, text, "sha256").hexdigest() if salt else hashlib.sha256(text).hexdigest()

    return {"drop": None, "mask": mask, "hash": hashed}


def _change(at: Any, path: Steps, depth: int, change: Callable[[Any], Any] | None) -> None:
    """Change what the path leads to from its step `depth` on."""
    if at is None:
        return
    step, is_last = path[depth], depth + 1 == len(path)
    fits = isinstance(at, list if step is None else dict)
    if not fits:
        kind, where = "list" if step is None else "object", _written(path[:depth]) or "the top"
        raise ValueBroken(f"there is no JSON {kind} at {where}, so {_written(path)} cannot be redacted")
    if step is None and is_last:
        at[:] = [] if change is None else [change(element) for element in at]
    elif step is None:
        for element in at:
            _change(element, path, depth + 1, change)
    elif step in at and not is_last:
        _change(at[step], path, depth + 1, change)
    elif step in at and change is None:
        del at[step]
    elif step in at and change is not None:
        at[step] = change(at[step])


def _written(path: Steps) -> str:
    """As somebody would write it."""
    return "".join("[]" if step is None else f".{step}" for step in path).removeprefix(".")


# --- splitting -------------------------------------------------------------------------------------------------------


def make_splitter(path: str) -> Callable[[bytes], list[bytes]]:
    """What cuts the elements out of an array, byte for byte as they are."""
    names = [str(name) for name in parse_path(path, lists=False)] if path else []

    def split(value: bytes) -> list[bytes]:
        at: bytes | msgspec.Raw = value
        for number, name in enumerate(names):
            try:
                inside = _fields(at)
            except _UNREADABLE:
                _json(value)  # says so if it is no JSON at all
                raise ValueBroken(f"there is no JSON object at {'.'.join(names[:number]) or 'the top'}") from None
            if name not in inside:
                raise ValueBroken(f"there is no field {'.'.join(names[: number + 1])!r}")
            at = inside[name]
        try:
            return [bytes(element) for element in _elements(at)]
        except _UNREADABLE:
            _json(value)
            raise ValueBroken(f"{path or 'the value'} is not an array") from None

    return split


def _json(value: bytes) -> Any:
    try:
        return _decode(value)
    except RecursionError:
        raise ValueBroken(_TOO_DEEP) from None
    except _UNREADABLE as problem:
        raise ValueBroken(f"the value is not JSON: {problem}") from None
