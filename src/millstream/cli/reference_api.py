"""The reference pages of what programs use: the HTTP API, the Python SDK and the errors of both."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import msgspec

from millstream import aio
from millstream.cli.markdown import NOTICE, cell, table
from millstream.errors import InternalError, MillstreamError, catalogue
from millstream.server.http.app import API
from millstream.server.http.openapi import document
from millstream.server.http.problems import status_of
from millstream.server.http.site import FAMILIES

__all__ = ["errors_page", "http_page", "sdk_page"]

#: The package itself: what it says in `__all__` is what there is.
millstream: Final = importlib.import_module("millstream")


# --- HTTP --------------------------------------------------------------------------------------------------------


def http_page() -> str:
    """The page of all endpoints, and of the types they speak."""
    api = document(FAMILIES)
    lines = [
        "# HTTP API",
        NOTICE,
        f"All paths begin with `{API}`. Those about things in a namespace also stand under "
        "`/namespaces/{namespace}`; without it they mean `default`. A running broker has the same as "
        f"`{API}/openapi.json` and as a page at `{API}/docs`. The [guide](../guide/http.md) shows how it is used, "
        "[errors](errors.md) lists what can go wrong.",
    ]
    for family in FAMILIES:
        lines += [f"## {family.name}", family.about]
        for endpoint in family.endpoints:
            operation = api["paths"][API + endpoint.path][endpoint.method.lower()]
            lines += _endpoint(endpoint.method, endpoint.path, operation)
    lines += ["## Types", "What bodies and answers consist of. A field without a default is always there."]
    for name, schema in sorted(api["components"]["schemas"].items()):
        if schema.get("type") == "object" and schema.get("properties") and not _is_query(name, api):
            lines += [f"### {name}", *_paragraphs(schema.get("description")), _fields(schema)]
        elif "enum" in schema or "anyOf" in schema:
            lines += [f"### {name}", *_paragraphs(schema.get("description")), _type(schema)]
    return "\n\n".join(line for line in lines if line) + "\n"


def _is_query(name: str, api: dict[str, Any]) -> bool:
    """Whether a type is spelled out as parameters of an endpoint, and said nowhere else."""
    reference = f"#/components/schemas/{name}"
    return not any(reference in str(part) for part in (api["paths"], api["components"]["schemas"]))


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} `{path}`"  # in code: braces at the end of a heading mean something else to Markdown
    yield operation["summary"]
    yield from _paragraphs(operation.get("description"))
    facts = [f"Needs `{operation['x-permission']}`."]
    body = operation.get("requestBody")
    if body is not None:
        kinds = [_content(kind, content) for kind, content in body["content"].items()]
        facts.append(f"Body: {' or '.join(kinds)}.")
    for status, response in operation["responses"].items():
        if status[1:] != "XX":
            kinds = [_content(kind, content) for kind, content in response.get("content", {}).items()]
            facts.append(f"Answers {status}" + (f": {' or '.join(kinds)}." if kinds else "."))
    yield " ".join(facts)
    parameters = [it for it in operation.get("parameters", ()) if it["in"] == "query"]
    if parameters:
        rows = [
            f"| `{it['name']}` | {_type(it['schema'])} | {_default(it['schema'], it['required'])} |"
            for it in parameters
        ]
        yield table("| Parameter | Type | Default |", rows)


def _content(kind: str, content: dict[str, Any]) -> str:
    if kind == "*/*":
        return "anything, which is taken as it is"
    what = _type(content["schema"]) if content.get("schema") else "anything"
    return what if kind == "application/json" else f"{what} as `{kind}`"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field, name in required)} |"
        for name, field in schema["properties"].items()
    ]
    return table("| Field | Type | Default |", rows)


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    return f"`{msgspec.json.encode(default).decode()}`" if "default" in schema else "–"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items")
        what = _type(items) if items else ""
        return f"list of {what}{'s' if what.isalpha() else ''}" if what else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return {"boolean": "true or false", None: "anything"}.get(kind, str(kind))


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in (text or "").split("\n\n"):
        if paragraph.strip():
            yield " ".join(paragraph.split())


# --- errors ------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """The page of all errors."""
    found = [InternalError if error is MillstreamError else error for _, error in sorted(catalogue().items())]
    lines = [
        "# Errors",
        NOTICE,
        "An error is a situation with a name. The same names and numbers are used at every door: `code` in the JSON "
        "of an HTTP answer, the number in the native protocol, a class of `millstream.errors` in Python, the brackets "
        "behind a message of the command line (`millstream errors explain CODE`). They never change their meaning.",
        "*Retry* says whether the same request can succeed later without being changed; the SDK does so by itself.",
        table(
            "| Code | Number | HTTP | Retry | Meaning | What to do |",
            (
                f"| `{error.code}` | {error.number} | {int(status_of(error('')))} | "
                f"{'yes' if error.retriable else 'no'} | {cell(_first(error))} | {cell(error.remedy)} |"
                for error in found
            ),
        ),
        "## Over HTTP",
        "Every answer that is not a success has one shape:",
        "```json\n"
        '{"code": "TOPIC_NOT_FOUND", "message": "there is no topic \'orders\'", '
        '"details": {"number": 1, "retriable": false},\n'
        ' "suggestions": ["…"], "request_id": "…", "timestamp": "2026-01-31T09:30:00.000Z"}\n'
        "```",
    ]
    return "\n\n".join(lines) + "\n"


def _first(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


# --- SDK ---------------------------------------------------------------------------------------------------------

#: What hangs on a client, by the property that leads to it.
_ROOMS: Final = ("queues", "dead_letters", "schedules", "webhooks", "mqtt", "pipelines", "keys", "admin")


def sdk_page() -> str:
    """The page of everything that `import millstream` gives."""
    lines = [
        "# Python SDK",
        NOTICE,
        "`millstream.connect` is for programs without an event loop, `millstream.aio.connect` for those with one. Both "
        "have the same names. What is marked `# await` is a coroutine in `millstream.aio`; what is iterated here is "
        "iterated there with `async for`. Times are seconds since 1970 or a `datetime`; one without a time zone is "
        "local time, as Python has it, while the command line takes UTC.",
        *_function("millstream.connect", millstream.connect),
    ]
    classes = [name for name in millstream.__all__ if inspect.isclass(getattr(millstream, name))]
    order = ["Client", *(name for name in classes if name not in ("Client", "MillstreamError"))]
    for name in order:
        lines += _class(f"millstream.{name}", getattr(millstream, name), getattr(aio, name, None))
        if name == "Client":
            for room in _ROOMS:
                lines += _room(room)
    lines += [*_function("millstream.trace_headers", millstream.trace_headers)]
    lines += ["## millstream.errors", "Every error is a `MillstreamError`; [errors](errors.md) lists them."]
    return "\n\n".join(line for line in lines if line) + "\n"


def _room(name: str) -> Iterator[str]:
    yield from _class(f"client.{name}", _made_by(millstream.Client, name), _made_by(aio.Client, name))


def _made_by(client: type, name: str) -> type:
    """The class of what a property of a client answers with."""
    attribute = inspect.getattr_static(client, name)
    getter = attribute.func if isinstance(attribute, cached_property) else attribute.fget
    made: type = getattr(importlib.import_module(getter.__module__), getter.__annotations__["return"])
    return made


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"## {name}"
    yield f"```python\n{name.rpartition('.')[2]}{_signature(function)}\n```"
    yield from _paragraphs(inspect.getdoc(function))


def _class(name: str, kind: Any, twin: Any) -> Iterator[str]:
    yield f"## {name}"
    yield from _paragraphs(_own_doc(kind))
    fields = [field for field in getattr(kind, "__struct_fields__", ()) if not field.startswith("_")]
    fields += [field for field in getattr(kind, "__dataclass_fields__", ()) if not field.startswith("_")]
    hints = {
        name: hint for base in reversed(kind.__mro__) for name, hint in getattr(base, "__annotations__", {}).items()
    }
    if fields:
        yield table("| Field | Type |", (f"| `{it}` | `{cell(_hint(hints.get(it)))}` |" for it in fields))
    if members := getattr(kind, "__members__", None):
        yield ", ".join(f"`{member}`" for member in members)
    for member, value in sorted(_public(kind).items()):
        if member in fields or member in (members or ()):
            continue
        yield from _member(member, value, inspect.getattr_static(twin, member, None) if twin is not None else None)


def _own_doc(kind: Any) -> str | None:
    return inspect.cleandoc(kind.__doc__) if kind.__doc__ else None


def _public(kind: type) -> dict[str, Any]:
    """What a class of ours offers, inherited or not."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("millstream"):
            found.update({name: value for name, value in vars(base).items() if not name.startswith("_")})
    documented = (property, cached_property, classmethod, staticmethod)
    return {name: it for name, it in found.items() if isinstance(it, documented) or inspect.isfunction(it)}


def _member(name: str, value: Any, twin: Any) -> Iterator[str]:
    if isinstance(value, (property, cached_property)):
        getter = value.func if isinstance(value, cached_property) else value.fget
        answer = getattr(getter, "__annotations__", {}).get("return")
        yield f"### {name}"
        yield f"```python\n{name}: {_hint(answer)}\n```"
        yield from _paragraphs(inspect.getdoc(getter))
        return
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    yield f"### {name}"
    mark = "  # await" if inspect.iscoroutinefunction(twin) else ""
    yield f"```python\n{name}{_signature(function)}{mark}\n```"
    yield from _paragraphs(inspect.getdoc(function))  # without one, the name says it


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [it for it in signature.parameters.values() if it.name not in ("self", "cls")]
    text = str(signature.replace(parameters=parameters))
    # Annotations are text in our modules, and would be shown in quotes.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return re.sub(r"(: |-> )\"([^\"]*)\"", r"\1\2", text)


def _hint(hint: Any) -> str:
    return hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
