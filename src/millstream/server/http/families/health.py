"""Health over HTTP, also outside `/api/v1` for whatever watches processes: 200 is well, 503 is not."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from millstream.server.http.app import API, App, Mounted
from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire.admin_calls import CheckHealth, HealthReport

__all__ = ["family", "mount"]

family = Family("health", "Whether the broker runs, takes messages and is well.", namespaced=False)


class DeepQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: How long each probe may take.
    timeout_ms: Annotated[int, Meta(ge=1000, le=60_000)] = 5000


class Live(msgspec.Struct, kw_only=True):
    live: bool = True


class Ready(msgspec.Struct, kw_only=True):
    ready: bool
    #: Why not.
    reason: str


@family.get("/health", permission="open", answer=HealthReport, also={503: ("It is critical.", HealthReport)})
async def check_health(exchange: Exchange[NoQuery, None]) -> Any:
    """Show the health of the broker, from what it knows without trying things out; 503 if it is critical."""
    report: HealthReport = await exchange.call(CheckHealth())
    return _answer(report, well=report.status != "critical")


@family.get("/health/live", permission="open", answer=Live)
async def check_live(_: Exchange[NoQuery, None]) -> Live:
    """Say whether the process answers at all."""
    return Live()


@family.get("/health/ready", permission="open", answer=Ready, also={503: ("It takes no messages.", Ready)})
async def check_ready(exchange: Exchange[NoQuery, None]) -> Any:
    """Say whether messages can be published; 503 if not."""
    report: HealthReport = await exchange.call(CheckHealth())
    return _answer(Ready(ready=report.ready, reason=report.reason), well=report.ready)


@family.get("/health/deep", query=DeepQuery, answer=HealthReport, also={503: ("It is critical.", HealthReport)})
async def check_deep(exchange: Exchange[DeepQuery, None]) -> Any:
    """Do the same as `/health`, with probes: store a message and read it back, record a fact, look for lag."""
    report: HealthReport = await exchange.call(CheckHealth(deep=True, timeout_ms=exchange.query.timeout_ms))
    return _answer(report, well=report.status != "critical")


def _answer(found: HealthReport | Ready, *, well: bool) -> Any:
    return found if well else Response(msgspec.json.encode(found), 503, media_type="application/json")


def mount(app: App) -> None:
    """Serve the same at `/health`, where probes look for it."""
    for endpoint in family.endpoints:
        app.mounted[endpoint.path] = _alias(app, API + endpoint.path)


def _alias(app: App, path: str) -> Mounted:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return serve
