"""What is wrong with the shape of a file, in our words."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from millstream.spark.columns import suggestion
from millstream.spark.pipelines.document import Path

__all__ = ["sentences_of"]

_WANTED: Final = {
    "string_type": "a text; put it in quotes",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of keys to values",
}


def sentences_of(problem: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Path, str]]:
    """Where and what."""
    for error in problem.errors(include_url=False):
        path = tuple(part for part in error["loc"] if part != "[key]")
        if len(path) < len(error["loc"]):
            yield (
                tuple(map(_text, path)),
                "a name is a text; put it in quotes (YAML takes on, off, yes and no for truth)",
            )
            continue
        yield tuple(map(_text, path)), _sentence(str(error["type"]), path, error, model)


def _text(part: str | int) -> str | int:
    return part if type(part) is int else str(part)


def _sentence(kind: str, path: Path, error: Any, model: type[BaseModel]) -> str:
    given, context = error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys(model, path[:-1])
        return f"there is no key {path[-1]!r} here{suggestion(str(path[-1]), known) if known else ''}"
    if kind == "missing":
        return f"the key {path[-1]!r} is missing"
    if kind in _WANTED:
        return f"this must be {_WANTED[kind]}" + ("" if given is None else f", not {_shown(given)}")
    if kind == "literal_error":
        allowed = [word.strip("'") for word in str(context.get("expected", "")).replace(" or ", ", ").split(", ")]
        return f"this is one of {', '.join(allowed)}, not {_shown(given)}"
    if kind in ("too_short", "string_too_short"):
        return "this must not be empty"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    return str(error["msg"]).removeprefix("Input should be ").join(("this must be ", "")) + f", not {_shown(given)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _keys(model: Any, path: Path) -> list[str]:
    """The keys that there are at a place."""
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel):
            named = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
            model = _inner(named.get(str(part)))
        else:
            model = _inner((get_args(model) or (None,))[-1])  # of a list or a mapping
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return []


def _inner(kind: Any) -> Any:
    """Without what stands around it."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind
