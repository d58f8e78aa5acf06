"""The reference page of pipelines: every key that a file can have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from millstream.cli.comments import fields_of
from millstream.cli.markdown import NOTICE, cell, table
from millstream.durations import format_ms
from millstream.spark.pipelines.definition import (
    MESSAGE_COLUMNS,
    STEP_KINDS,
    Aggregate,
    Convert,
    DeadLetters,
    Definition,
    Enrich,
    Lookup,
    Redact,
    Restart,
    Route,
    Sink,
    Source,
    Split,
    Step,
    Window,
)
from millstream.spark.pipelines.ready.kinds import KINDS

__all__ = ["pipelines_page"]

#: What a file says it under.
_PARTS: Final[dict[str, type[BaseModel]]] = {
    "sources": Source,
    "steps": Step,
    "enrich": Enrich,
    "lookup": Lookup,
    "redact": Redact,
    "convert": Convert,
    "split": Split,
    "aggregate": Aggregate,
    "window": Window,
    "route": Route,
    "dead_letter": DeadLetters,
    "sinks": Sink,
    "restart": Restart,
}
_LINKS: Final = {kind.__name__: f"[{name}](#{name})" for name, kind in _PARTS.items()}
_WORDS: Final = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "`true` or `false`",
    "Any": "anything",
    "Names": "text, or a list of them",
    "Millis": "duration",
    "Moment": "time",
    "Option": "text, number, `true` or `false`",
    "Constant": "text, number, `true` or `false`",
}
_BOUNDS: Final = {"ge": "at least", "gt": "more than", "le": "at most"}


def pipelines_page() -> str:
    """The page of everything that a pipeline's file can say."""
    lines = [
        "# Pipeline files",
        NOTICE,
        "This page lists the keys of a pipeline file; the [guide](../guide/pipelines.md) shows how to use them. A key "
        "that does not exist is an error, and `millstream pipeline validate FILE` names every mistake with its line. "
        "Durations are written `500ms`, `30s`, `5m` or `1h30m`; a bare number means seconds. Times are written "
        "`2026-11-16T08:30:00Z`, and are UTC unless they say otherwise. Relative paths start from the directory of the "
        "file.",
        "## A file",
        _keys(Definition),
    ]
    for name, kind in _PARTS.items():
        lines += [f"{'##' if name in Definition.model_fields else '###'} {name}", (kind.__doc__ or "").strip()]
        lines += [*_notes(name), _keys(kind)]
    lines += [
        "## Ready pipelines",
        "A file can instead have `ready`, which is the name of one of these pipelines, and its `options`. It then has "
        "no `sources`, `steps` and `sinks`; its other keys are those [above](#a-file).",
    ]
    for name, ready in KINDS.items():
        needed = " It needs a `checkpoint`." if ready.NEEDS_CHECKPOINT else ""
        lines += [f"### {name}", f"{ready.ABOUT[0].upper()}{ready.ABOUT[1:]}.{needed}", _keys(ready)]
    return "\n\n".join(line for line in lines if line) + "\n"


def _notes(name: str) -> Iterator[str]:
    """What no single key says."""
    if name == "sources":
        yield f"Each source has exactly one of {_and(Source.KINDS)}. Topics are read with their headers."
    elif name == "steps":
        yield f"Each step has exactly one of {_and(STEP_KINDS)}, or only a `dead_letter`."
    elif name == "sinks":
        yield f"Each sink has exactly one of {_and(Sink.KINDS)}."
        yield (
            f"When a row goes to a topic, its columns {_and(MESSAGE_COLUMNS)} become those parts of the message. Its "
            "other columns are left out or, if there is no column `value`, become the value as JSON."
        )
    elif name == "redact":
        yield (
            "`drop` removes a field, `mask` replaces it with `***`, and `hash` replaces it with its SHA-256, by which "
            "equal values can still be recognised. **Without `salt_variable`, a hash hides little:** anybody who can "
            "guess values, such as e-mail addresses and card numbers, can hash guesses until one fits."
        )


def _keys(kind: type[BaseModel]) -> str:
    written = fields_of(kind)
    rows = []
    for name, field in kind.model_fields.items():
        noted = written[name]
        meaning = " ".join(filter(None, (noted.comment, _bounds(field))))
        words = _type(ast.parse(noted.type, mode="eval").body)
        rows.append(f"| `{field.alias or name}` | {words} | {_default(field, noted.type)} | {cell(meaning)} |")
    return table("| Key | Type | Default | Meaning |", rows)


def _type(node: ast.expr) -> str:
    """An annotation as people say it."""
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return _type(left)
        case ast.BinOp(left=left, right=right):
            return f"{_type(left)} or {_type(right)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inside, *_])):
            return _type(inside)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return " or ".join(f"`{choice}`" for choice in ast.literal_eval(choices))
        case ast.Subscript(value=ast.Name(id="list"), slice=inside):
            return f"list of {_type(inside)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inside])):
            return f"mapping to {_type(inside)}"
    name = ast.unparse(node)
    return _WORDS.get(name) or _LINKS[name]


def _default(field: Any, written: str) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel) or (not value and not isinstance(value, int)):
        return "–"
    if "Millis" in written:
        return f"`{format_ms(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bounds(field: Any) -> str:
    said = [
        f"{words} {getattr(bound, name)}"
        for name, words in _BOUNDS.items()
        for bound in field.metadata
        if getattr(bound, name, None)
    ]
    return f"{' and '.join(said).capitalize()}." if said else ""


def _and(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
