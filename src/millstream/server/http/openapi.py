"""The OpenAPI 3.1 document, read off the declarations of the endpoints, and a page that shows it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from starlette.responses import HTMLResponse, Response

from millstream.errors import catalogue
from millstream.server.http.app import API, App
from millstream.server.http.endpoints import Endpoint, Family
from millstream.server.http.problems import Problem
from millstream.version import VERSION

__all__ = ["document", "mount"]

_REF: Final = "#/components/schemas/{name}"
#: How a request carries its key.
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key: ms_<id>_<secret>."},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same."},
}
_ABOUT: Final = (
    "Everything the broker can do, over HTTP.  Paths without a namespace mean the namespace `default`; every path "
    "about topics, queues, groups, messages and schedules also stands under `/namespaces/{namespace}`."
)


def document(families: Iterable[Family]) -> dict[str, Any]:
    """The document.  The second, namespaced form of a path is described by a sentence, not by a twin."""
    families = list(families)
    endpoints = [endpoint for family in families for endpoint in family.endpoints]
    kinds: list[Any] = [Problem]
    for endpoint in endpoints:
        spoken = (endpoint.query, endpoint.body, endpoint.described_body, endpoint.answer)
        kinds += [kind for kind in spoken if _is_described(kind)]
        kinds += [kind for _, kind in endpoint.also.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    by_kind = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(API + endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_kind, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millstream", "version": VERSION, "description": _ABOUT},
        "tags": [{"name": family.name, "description": family.about} for family in families],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
        # One of them, or none while the broker asks for no keys.
        "security": [*({name: []} for name in _KEYS), {}],
    }


def _is_described(kind: Any) -> bool:
    return kind is not None and kind is not bytes


def _operation(endpoint: Endpoint, by_kind: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "tags": [endpoint.family.name],
        "summary": endpoint.summary,
        "x-permission": endpoint.permission,
    }
    if endpoint.permission == "open":
        operation["security"] = []
    if endpoint.description:
        operation["description"] = endpoint.description
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in endpoint.path.split("/")
        if part.startswith("{")
    ]
    query = components[by_kind[id(endpoint.query)]["$ref"].rpartition("/")[2]]
    for name, schema in query.get("properties", {}).items():
        parameters.append(
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
        )
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        described = endpoint.body if endpoint.body is not bytes else endpoint.described_body
        content = {} if described is None else {"application/json": {"schema": by_kind[id(described)]}}
        if endpoint.body is bytes:
            content["*/*"] = {}
        operation["requestBody"] = {"required": endpoint.body is not bytes, "content": content}
    success: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.answer is not None:
        schema = by_kind[id(endpoint.answer)] if _is_described(endpoint.answer) else {}
        success["content"] = {endpoint.media_type: {"schema": schema}}
    problem = {"application/json": {"schema": {"$ref": _REF.format(name="Problem")}}}
    operation["responses"] = {
        str(endpoint.status): success,
        **{
            str(status): {"description": text, "content": {"application/json": {"schema": by_kind[id(kind)]}}}
            for status, (text, kind) in endpoint.also.items()
        },
        "4XX": {"description": "The request cannot be served as it is.", "content": problem},
        "5XX": {"description": "The broker cannot serve it now.", "content": problem},
    }
    return operation


def mount(app: App) -> None:
    # Made when somebody asks: it takes longer than the rest of a start.
    families = tuple(app.families)

    async def serve_document(scope: Any, receive: Any, send: Any) -> None:
        served = await asyncio.to_thread(_encoded, families)
        await Response(served, media_type="application/json")(scope, receive, send)

    async def serve_page(scope: Any, receive: Any, send: Any) -> None:
        await HTMLResponse(_page(families))(scope, receive, send)

    app.mounted[f"{API}/openapi.json"] = serve_document
    app.mounted[f"{API}/docs"] = serve_page


@functools.cache
def _encoded(families: tuple[Family, ...]) -> bytes:
    return msgspec.json.encode(document(families))


@functools.cache
def _page(families: tuple[Family, ...]) -> str:
    """A page for people, without anything from elsewhere."""
    from html import escape

    parts: list[str] = []
    for family in families:
        parts.append(f"<h2 id='{family.name}'>{escape(family.name)}</h2><p>{escape(family.about)}</p><dl>")
        for endpoint in family.endpoints:
            parts.append(
                f"<dt><b>{endpoint.method}</b> <code>{escape(API + endpoint.path)}</code></dt>"
                f"<dd>{escape(endpoint.summary)} <i>{endpoint.permission}</i></dd>"
            )
        parts.append("</dl>")
    codes = "".join(
        f"<tr><td><code>{error.code}</code></td><td>{escape(error.__doc__ or '')}</td></tr>"
        for _, error in sorted(catalogue().items())
    )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Millstream HTTP API</title>"
        "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
        "dd{margin:0 0 .7rem 1.5rem}td{padding:.2rem 1rem .2rem 0;vertical-align:top}</style>"
        f"<h1>Millstream HTTP API</h1><p>{escape(_ABOUT)} Machine-readable: "
        f"<a href='{API}/openapi.json'>openapi.json</a>.</p>{''.join(parts)}<h2>Errors</h2><table>{codes}</table>"
    )
