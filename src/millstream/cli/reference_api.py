"""The reference pages of the HTTP API, and of the errors that all doors share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from millstream.cli.markdown import NOTICE, cell, paragraphs, table
from millstream.errors import InternalError, MillstreamError, catalogue
from millstream.server.http.app import API
from millstream.server.http.openapi import document
from millstream.server.http.problems import status_of
from millstream.server.http.site import FAMILIES

__all__ = ["errors_page", "http_page"]


# --- HTTP --------------------------------------------------------------------------------------------------------


def http_page() -> str:
    """The page of all endpoints, and of the types they speak."""
    api = document(FAMILIES)
    lines = [
        "# HTTP API",
        NOTICE,
        f"All paths begin with `{API}`. Paths about things in a namespace also exist under "
        "`/namespaces/{namespace}`; without that they mean the namespace `default`. A running broker serves the same "
        f"as `{API}/openapi.json` and as a page at `{API}/docs`. The [guide](../guide/http.md) shows how the API is "
        "used, and [errors](errors.md) lists what can go wrong.",
    ]
    for family in FAMILIES:
        lines += [f"## {family.name}", family.about]
        for endpoint in family.endpoints:
            operation = api["paths"][API + endpoint.path][endpoint.method.lower()]
            lines += _endpoint(endpoint.method, endpoint.path, operation)
    lines += ["## Types", "The types of bodies and answers. A field without a default is always there."]
    for name, schema in sorted(api["components"]["schemas"].items()):
        if schema.get("type") == "object" and schema.get("properties") and not _is_query(name, api):
            lines += [f"### {name}", *paragraphs(schema.get("description")), _fields(schema)]
        elif "enum" in schema or "anyOf" in schema:
            lines += [f"### {name}", *paragraphs(schema.get("description")), _type(schema)]
    return "\n\n".join(line for line in lines if line) + "\n"


def _is_query(name: str, api: dict[str, Any]) -> bool:
    """Whether a type is spelled out as parameters of an endpoint, and said nowhere else."""
    reference = f"#/components/schemas/{name}"
    return not any(reference in str(part) for part in (api["paths"], api["components"]["schemas"]))


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} `{path}`"  # in code: braces at the end of a heading mean something else to Markdown
    yield operation["summary"]
    yield from paragraphs(operation.get("description"))
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


# --- errors ------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """The page of all errors."""
    found = [InternalError if error is MillstreamError else error for _, error in sorted(catalogue().items())]
    lines = [
        "# Errors",
        NOTICE,
        "An error is a situation with a name. The same names and numbers are used at every door: as `code` in the JSON "
        "of an HTTP answer, as the number in the native protocol, as a class of `millstream.errors` in Python, and in "
        "brackets after a message of the command line (`millstream errors explain CODE`). They never change their "
        "meaning.",
        "*Retry* says whether the same request can succeed later without being changed; the SDK then repeats it by "
        "itself.",
        table(
            "| Code | Number | HTTP | Retry | Meaning | What to do |",
            (
                f"| `{error.code}` | {error.number} | {int(status_of(error('')))} | "
                f"{'yes' if error.retriable else 'no'} | {cell(_first(error))} | {cell(error.remedy)} |"
                for error in found
            ),
        ),
        "## Over HTTP",
        "Every answer that is not a success has this shape:",
        "```json\n"
        '{"code": "TOPIC_NOT_FOUND", "message": "there is no topic \'orders\'", '
        '"details": {"number": 1, "retriable": false},\n'
        ' "suggestions": ["…"], "request_id": "…", "timestamp": "2026-01-31T09:30:00.000Z"}\n'
        "```",
    ]
    return "\n\n".join(lines) + "\n"


def _first(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
