"""Arguments that are collections or numbers, checked before they are taken apart: what is wrong is said by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from millstream.errors import InvalidArgument

__all__ = ["as_dict", "as_list", "checked_number"]

T = TypeVar("T")


def as_dict(name: str, given: Mapping[str, T] | None) -> dict[str, T]:
    try:
        return dict(given or {})
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} is a mapping, such as {{'name': 'value'}}, not {given!r}") from None


def as_list(name: str, given: Iterable[T], kind: str = "list") -> list[T]:
    try:
        items = iter(given)
    except TypeError:
        items = None
    if items is None or isinstance(given, str | bytes):  # which are iterable, letter by letter
        raise InvalidArgument(f"{name} is a {kind}, not {given!r}")
    return list(items)


def checked_number(name: str, given: Any) -> int:
    if type(given) is not int:
        raise InvalidArgument(f"{name} is a whole number, not {given!r}")
    return given
