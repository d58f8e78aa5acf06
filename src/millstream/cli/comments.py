"""What classes say about their fields in the source: types as they are written, and the comments `#:` above them."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import NamedTuple

__all__ = ["Noted", "fields_of"]


class Noted(NamedTuple):
    """A field as its class writes it; what it does not have is empty."""

    type: str = ""
    default: str = ""
    comment: str = ""


def fields_of(kind: type) -> dict[str, Noted]:
    """The fields of a class of ours by their names, those that it inherits first."""
    module = sys.modules[kind.__module__]
    lines, classes = _read(kind.__module__)
    found: dict[str, Noted] = {}
    for base in classes[kind.__name__].bases:  # not its `__mro__`: a TypedDict knows no parents
        parent = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if inspect.isclass(parent) and parent.__module__.startswith("millstream."):
            found |= fields_of(parent)
    for each in classes[kind.__name__].body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            default = "" if each.value is None else ast.unparse(each.value)
            found[each.target.id] = Noted(ast.unparse(each.annotation), default, _above(lines, each.lineno - 1))
    return found


@cache
def _read(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    source = inspect.getsource(sys.modules[module])
    return source.splitlines(), {it.name: it for it in ast.parse(source).body if isinstance(it, ast.ClassDef)}


def _above(lines: list[str], at: int) -> str:
    """The comment that ends just above a line."""
    said: list[str] = []
    while at and (line := lines[at - 1].strip()).startswith("#:"):
        said = [*line.removeprefix("#:").split(), *said]
        at -= 1
    return " ".join(said)
