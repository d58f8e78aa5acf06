"""What is wrong with a value that somebody has sent, in our words and with the name of the field.

The parser says it in the words of Python ("Expected `int`, got `str` - at `$.limit`"), to people who may never have
seen any.  What it says and we do not know is passed on without its quotes, so nothing is ever left out.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from msgspec import Struct, structs

from millstream.names import did_you_mean

__all__ = ["in_words"]

_SHOWN_MAX: Final = 100
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bytes": "a text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_PLACE: Final = " - at `$"  # what stands between a problem and its place, which a backtick ends
_KIND: Final = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`")
_WANTED: Final = re.compile(r"Expected `(?P<wanted>\w+)`")
_LIMIT: Final = re.compile(r"Expected `\w+`(?P<length> of length)? (?P<sign>[<>]=) (?P<limit>\S+)")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`", re.S)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.S)
_CHOICE: Final = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.S)
_MALFORMED: Final = re.compile(r"JSON is malformed: (?P<what>.*) \(byte (?P<at>\d+)\)", re.S)
_TRUNCATED: Final = "Input data was truncated"
#: The parser takes it for the end of what it was given, where no more than a few bytes follow.
_HALF: Final = re.compile(r"\\u[dD][89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])")
_STEP: Final = re.compile(r"\.(\w+)|\[[^]]*\]")
_SAID: Final = {
    _TRUNCATED: "it is empty or ends in the middle, and JSON is expected",
    "Invalid base64 encoded string": "{name} must be base64",
    "Number out of range": "{name} is a number out of range",
    "Integer value out of range": "{name} is a number out of range",
}


def in_words(
    problem: Exception, *, kind: Any = None, given: Mapping[str, object] | None = None, data: bytes | str = b""
) -> str:
    """One sentence about an exception of the parser.

    `kind` is the type that was expected, to say what would have been right, `given` what was there instead, and `data`
    all that was parsed, which the parser does not always understand.
    """
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    if isinstance(problem, UnicodeDecodeError):
        return "it is not text in UTF-8"
    said, found_place, path = str(problem).rpartition(_PLACE)
    if not found_place:
        said, path = path, ""
    path = path.removesuffix("`")
    if said == _TRUNCATED and _HALF.search(data if isinstance(data, str) else data.decode("latin-1")):
        return "it has half of a character, an escape such as \\ud800 without the one that belongs to it"
    if said in _SAID:
        return _SAID[said].format(name=_name(path))
    if found := _KIND.fullmatch(said):
        there = (given or {}).get(path.removeprefix("."))
        got = _shown(there) if isinstance(there, str) else _kinds(found["got"])
        return f"{_name(path)} must be {_kinds(found['wanted'])}, not {got}"
    if found := _WANTED.fullmatch(said):
        return f"{_name(path)} must be {_kinds(found['wanted'])}"
    if found := _LIMIT.fullmatch(said):
        least = "at least" if found["sign"] == ">=" else "at most"
        what = "have a length of" if found["length"] else "be"
        return f"{_name(path)} must {what} {least} {found['limit']}"
    if found := _MISSING.fullmatch(said):
        return f"{_name(path + '.' + found['name'])} is missing"
    if found := _UNKNOWN.fullmatch(said):
        known = [name for one in _types_at(kind, path) for name in getattr(one, "__struct_fields__", ())]
        return f"{_name(path + '.' + found['name'])} is not known here{did_you_mean(found['name'], known)}"
    if found := _CHOICE.fullmatch(said):
        choices = [
            str(choice) for one in _types_at(kind, path) if get_origin(one) is Literal for choice in get_args(one)
        ]
        only = f"; it is one of {', '.join(filter(None, choices))}" if choices else ""
        return f"{_name(path)} cannot be {found['value'][:_SHOWN_MAX]}{only}"
    if found := _MALFORMED.fullmatch(said):
        return f"it is not JSON: {found['what']} at byte {found['at']}"
    plain = said.replace("`", "")[: 2 * _SHOWN_MAX] or "it is not as it is expected here"
    return f"{_name(path)}: {plain}" if path else plain


def _name(path: str) -> str:
    """What a sentence is about: a field, a value in it, or all of it."""
    within = path.endswith("[...]")
    name = path.removesuffix("[...]").removeprefix(".")
    if not name:
        return "a value in it" if within else "it"
    return f"a value in {_shown(name)}" if within else _shown(name)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…")


def _kinds(said: str) -> str:
    return " or ".join(dict.fromkeys(_KINDS.get(kind, kind) for kind in said.split(" | ")))


def _types_at(kind: Any, path: str) -> Iterator[Any]:
    """The types that may stand at a place of what was expected; none where that cannot be told."""
    found = list(_alternatives(kind))
    for step in _STEP.finditer(path):
        name = step[1]
        if name is not None:
            owners = [one for one in found if isinstance(one, type) and issubclass(one, Struct)]
            found = [field.type for one in owners for field in structs.fields(one) if field.encode_name == name]
        else:
            found = [get_args(one)[-1] for one in found if get_args(one) and get_origin(one) is not Literal]
        found = [one for several in found for one in _alternatives(several)]
    yield from found


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _alternatives(one)
    elif get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif kind is not None:
        yield kind
