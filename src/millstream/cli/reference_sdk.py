"""The reference page of the Python SDK: what `import millstream` gives, with the types of its arguments and answers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final, Literal, get_args, get_origin, is_typeddict

from millstream import aio
from millstream.cli.comments import Noted, fields_of
from millstream.cli.markdown import NOTICE, cell, paragraphs, table
from millstream.policies import QueuePolicy

__all__ = ["sdk_page"]

#: The package itself: what it says in `__all__` is what there is.
millstream: Final = importlib.import_module("millstream")
#: What hangs on a client, by the property that leads to it.
_ROOMS: Final = ("queues", "dead_letters", "schedules", "webhooks", "mqtt", "pipelines", "keys", "admin")
#: What no signature names, and is an argument all the same.
_ARGUMENTS: Final = (QueuePolicy,)
_SHORT: Final = {
    "Duration": 'a length of time: seconds as a number, a text such as `"500ms"` or `"1h30m"`, or a `timedelta`',
    "Headers": "names, each with a text or bytes",
    "Key": "bytes or a text",
    "Place": '`"earliest"`, `"latest"`, a `datetime` or an offset',
    "Priority": '0 to 4, or `"critical"`, `"high"`, `"normal"`, `"low"`, `"background"`',
    "StartAt": '`"earliest"`, `"latest"`, a `datetime`, an offset, or offsets by partition',
    "Value": "bytes or a text; None is a deletion marker",
}
#: Types of ours in annotations, with the module that they are named by.
_NAME: Final = re.compile(r"\b(?:(?P<module>(?:\w+_)?calls)\.)?(?P<name>_?[A-Z]\w+)")
_TWO_WORDS: Final = re.compile(r"`?\b([A-Z][a-z]+[A-Z]\w+)\b`?")


def sdk_page() -> str:
    """The page of everything that `import millstream` gives."""
    lines = [
        "# Python SDK",
        NOTICE,
        "`millstream.connect` is for programs without an event loop, `millstream.aio.connect` for programs with one. "
        "Both clients have the same names. A method marked `# await` is a coroutine in `millstream.aio`, and what is "
        "iterated with `for` here is iterated with `async for` there. [Options](#options) lists the types of named "
        "arguments, and [answers](#answers) those of return values. Times are seconds since 1970 or a `datetime`. A "
        "`datetime` without a time zone is local time, as in Python; the command line takes UTC.",
        *_function("millstream.connect", millstream.connect),
    ]
    names = [name for name in millstream.__all__ if inspect.isclass(getattr(millstream, name))]
    classes = {name: getattr(millstream, name) for name in ("Client", *names) if name != "MillstreamError"}
    rooms = {name: _made_by(millstream.Client, name) for name in _ROOMS}
    for name, kind in classes.items():
        lines += _class(f"millstream.{name}", kind, getattr(aio, name, None))
        if name == "Client":
            for room, inside in rooms.items():
                lines += _class(f"client.{room}", inside, _made_by(aio.Client, room))
    lines += [*_function("millstream.trace_headers", millstream.trace_headers)]
    lines += ["## millstream.errors", "Every error is a `MillstreamError`; [errors](errors.md) lists them."]
    types = _types_named_by((*classes.values(), *rooms.values()))
    lines += _type_sections(types)
    return "\n\n".join(_linked(line, types) for line in lines if line) + "\n"


def _type_sections(types: dict[str, Any]) -> Iterator[str]:
    options = [name for name, kind in types.items() if is_typeddict(kind) or kind in _ARGUMENTS]
    yield "## Options"
    yield "Named arguments; each may be left out. Some types of arguments have short names:"
    yield table("| Type | |", (f"| `{name}` | {text} |" for name, text in _SHORT.items()))
    for name in sorted(options):
        yield from (f"### {name}", *paragraphs(_own_doc(types[name])), _field_table(types[name]))
    yield "## Answers"
    yield "A field that ends in `_ms` is in milliseconds; if it is a time, since 1970, UTC."
    for name in sorted(types.keys() - set(options)):
        yield from _class(name, types[name], _twin(types[name]), level=3)


# --- which types there are ---------------------------------------------------------------------------------------


def _types_named_by(shown: tuple[type, ...]) -> dict[str, Any]:
    """The types of ours that classes name in their signatures, and those that these name in turn."""
    found: dict[str, Any] = {kind.__name__: kind for kind in _ARGUMENTS}
    waiting = [each for kind in shown for each in _signatures(kind)]
    while waiting:
        hint, module = waiting.pop()
        for kind in _named(hint, module):
            if kind not in shown and kind.__name__ not in found and not issubclass(kind, BaseException):
                found[kind.__name__] = kind
                waiting += [*_signatures(kind), *((it.type, kind.__module__) for it in fields_of(kind).values())]
    return found


def _signatures(kind: type) -> Iterator[tuple[str, str]]:
    """Annotations of what a class offers, each with the module in which it means something."""
    for value in _public(kind).values():
        function = _function_of(value)
        yield from ((str(hint), function.__module__) for hint in function.__annotations__.values())


def _named(hint: str, module: str) -> Iterator[Any]:
    names = vars(sys.modules[module])
    for node in ast.walk(ast.parse(hint, mode="eval")):
        named: Any = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = getattr(names.get(node.value.id), node.attr, None)
        elif isinstance(node, ast.Name):
            named = names.get(node.id)
            if node.id.startswith("_"):  # a list of something, in a class that has a method `list`
                named = next(iter(get_args(named)), None)
        if inspect.isclass(named) and named.__module__.startswith("millstream."):
            yield named


def _twin(kind: type) -> Any:
    """What there is in place of a class in the asynchronous SDK."""
    module = kind.__module__.replace(".blocking.", ".asynchronous.")
    return getattr(importlib.import_module(module), f"Async{kind.__name__}", None)


def _made_by(client: type, name: str) -> type:
    """The class of what a property of a client answers with."""
    getter = _function_of(inspect.getattr_static(client, name))
    made: type = getattr(importlib.import_module(getter.__module__), getter.__annotations__["return"])
    return made


# --- how they are shown ------------------------------------------------------------------------------------------


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"## {name}"
    yield f"```python\n{name.rpartition('.')[2]}{_signature(function)}\n```"
    yield from paragraphs(inspect.getdoc(function))


def _class(name: str, kind: Any, twin: Any, level: int = 2) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    yield from paragraphs(_own_doc(kind))
    fields = _field_names(kind)
    if fields:
        yield _field_table(kind)
    if members := getattr(kind, "__members__", None):
        yield ", ".join(f"`{member}`" for member in members)
    for member, value in sorted(_public(kind).items()):
        if member in fields or member in (members or ()):
            continue
        same = inspect.getattr_static(twin, member, None) if twin is not None else None
        yield from _member(member, value, same, level + 1)


def _field_names(kind: Any) -> list[str]:
    names = kind.__annotations__ if is_typeddict(kind) else ()
    for holder in ("__struct_fields__", "__dataclass_fields__", "_fields"):
        names = names or getattr(kind, holder, ())
    return [name for name in names if not name.startswith("_")]


def _field_table(kind: Any) -> str:
    written = fields_of(kind)
    fields = {name: written.get(name, Noted()) for name in _field_names(kind)}
    types = {name: f"`{cell(_field_type(noted, kind.__module__))}`" for name, noted in fields.items()}
    if not any(noted.comment for noted in fields.values()):
        return table("| Field | Type |", (f"| `{name}` | {text} |" for name, text in types.items()))
    rows = (f"| `{name}` | {text} | {cell(fields[name].comment)} |" for name, text in types.items())
    return table("| Field | Type | Meaning |", rows)


def _field_type(noted: Noted, module: str) -> str:
    is_plain = noted.default and "(" not in noted.default
    return _plain(noted.type, module) + (f" = {noted.default}" if is_plain else "")


def _own_doc(kind: Any) -> str | None:
    doc = inspect.cleandoc(kind.__doc__) if kind.__doc__ else None
    return None if doc is None or doc.startswith(f"{kind.__name__}(") else doc  # what Python writes where there is none


def _public(kind: type) -> dict[str, Any]:
    """What a class of ours offers, inherited or not."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("millstream"):
            found.update({name: value for name, value in vars(base).items() if not name.startswith("_")})
    documented = (property, cached_property, classmethod, staticmethod)
    return {name: it for name, it in found.items() if isinstance(it, documented) or inspect.isfunction(it)}


def _function_of(value: Any) -> Any:
    """What is called when this member of a class is used."""
    if isinstance(value, cached_property):
        return value.func
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _member(name: str, value: Any, twin: Any, level: int) -> Iterator[str]:
    function = _function_of(value)
    yield f"{'#' * level} {name}"
    if isinstance(value, property | cached_property):
        answer = function.__annotations__.get("return")
        yield f"```python\n{name}: {_plain(str(answer), function.__module__)}\n```"
    else:
        mark = "  # await" if inspect.iscoroutinefunction(twin) else ""
        yield f"```python\n{name}{_signature(function)}{mark}\n```"
    yield from paragraphs(inspect.getdoc(function))  # without one, the name says it


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [it for it in signature.parameters.values() if it.name not in ("self", "cls")]
    text = str(signature.replace(parameters=parameters))
    # Annotations are text in our modules, and would be shown in quotes.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return _plain(re.sub(r"(: |-> )\"([^\"]*)\"", r"\1\2", text), function.__module__)


def _plain(text: str, module: str) -> str:
    """An annotation with the names that the page uses; what only our modules have a name for is spelled out."""
    names = vars(sys.modules[module])

    def spelled(match: re.Match[str]) -> str:
        name = match["name"]
        home = match["module"]
        value = names.get(name) if home is None else getattr(names.get(home), name, None)
        if name.startswith("_") or get_origin(value) is Literal:
            return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", str(value))
        return name

    return _NAME.sub(spelled, text)


def _linked(line: str, types: Iterable[str]) -> str:
    """Names of types lead to them; those of one word may be meant as words."""
    if line.startswith(("#", "|", "```")):
        return line
    return _TWO_WORDS.sub(lambda it: f"[{it[1]}](#{it[1].lower()})" if it[1] in types else it[0], line)
