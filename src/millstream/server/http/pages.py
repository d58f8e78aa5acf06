"""The dashboard's files, read once at the start: what is served cannot be changed, or chosen, by a path."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response

from millstream.server.http.app import App, Mounted

__all__ = ["mount"]

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Nothing from elsewhere, nothing inline, in nobody's frame.
_SAFETY: Final = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}


def mount(app: App) -> None:
    for path, data, kind in _files(resources.files("millstream.dashboard"), "/dashboard"):
        app.mounted[path] = _file(data, kind)
    app.mounted["/"] = app.mounted["/dashboard/index.html"]


def _files(folder: Traversable, path: str) -> list[tuple[str, bytes, str]]:
    found: list[tuple[str, bytes, str]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{path}/{entry.name}")
        elif (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            found.append((f"{path}/{entry.name}", entry.read_bytes(), kind))
    return found


def _file(data: bytes, kind: str) -> Mounted:
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**_SAFETY, "etag": tag, "content-type": kind}

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "this is a page"})
            return
        if scope["method"] not in ("GET", "HEAD"):
            await Response(status_code=405, headers={"allow": "GET, HEAD"})(scope, receive, send)
        elif Headers(scope=scope).get("if-none-match") == tag:
            await Response(status_code=304, headers=_SAFETY | {"etag": tag})(scope, receive, send)
        else:
            await Response(data if scope["method"] == "GET" else b"", headers=headers)(scope, receive, send)

    return serve
