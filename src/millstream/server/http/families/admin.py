"""Administration over HTTP: what is about the broker as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from millstream.names import DEFAULT_NAMESPACE, check_namespace
from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.server.http.parameters import Page
from millstream.wire import admin_calls as calls
from millstream.wire.calls import DescribeBroker
from millstream.wire.subscription_calls import ModeInfo, SetMode

__all__ = ["family"]

family = Family("administration", "The broker as a whole: settings, files, mode and connections.", namespaced=False)


class ConfigQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Only this section.
    section: str = ""
    #: Only settings that somebody has set.
    changed: bool = False


class CompactBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Empty = everything.
    topic: str = ""
    namespace: str = DEFAULT_NAMESPACE
    #: Include the segments that are being written, by ending them first.
    roll: bool = False


class LevelBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    level: calls.LogLevel


class ModeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["normal", "maintenance"]
    #: What clients are told.
    reason: str = ""


class DisconnectQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: What the client is told.
    reason: str = ""


class ConnectionsQuery(Page, kw_only=True, forbid_unknown_fields=True):
    #: Only clients of this namespace and of this door.
    namespace: str = ""
    door: str = ""


@family.get("/admin/config", permission="admin", query=ConfigQuery, answer=list[calls.SettingInfo])
async def show_config(exchange: Exchange[ConfigQuery, None]) -> Any:
    """Show the settings in force, and where each came from. Secrets are not shown."""
    query = exchange.query
    settings: list[calls.SettingInfo] = await exchange.call(calls.ShowConfig())
    return [
        setting
        for setting in settings
        if query.section in ("", setting.name.partition(".")[0]) and not (query.changed and setting.source == "default")
    ]


@family.post("/admin/checkpoint", answer=calls.Checkpointed)
async def write_checkpoint(exchange: Exchange[NoQuery, None]) -> Any:
    """Put everything on disk and write the broker's state anew, so that a start is quick."""
    return await exchange.call(calls.Checkpoint())


@family.post("/admin/compact", body=CompactBody, answer=calls.Compacted)
async def compact(exchange: Exchange[NoQuery, CompactBody]) -> Any:
    """Apply retention and compaction now, to one topic or to everything; the answer comes when it is done."""
    body = exchange.body
    session = replace(exchange.session, namespace=check_namespace(body.namespace))
    return await exchange.broker.call(session, calls.Compact(topic=body.topic, roll=body.roll))


@family.put("/admin/log-level", body=LevelBody, answer=calls.LogLevelInfo)
async def set_log_level(exchange: Exchange[NoQuery, LevelBody]) -> Any:
    """Set the log level of the broker until it stops."""
    return await exchange.call(calls.SetLogLevel(level=exchange.body.level))


@family.get("/admin/mode", permission="any", answer=ModeInfo)
async def show_mode(exchange: Exchange[NoQuery, None]) -> ModeInfo:
    """Show the mode of the broker, and the reason for it."""
    broker: dict[str, Any] = await exchange.call(DescribeBroker())
    return ModeInfo(mode=broker["mode"], reason=broker["reason"] or "")


@family.put("/admin/mode", body=ModeBody, answer=ModeInfo)
async def set_mode(exchange: Exchange[NoQuery, ModeBody]) -> Any:
    """Begin or end maintenance, during which publishers and consumers are turned away."""
    return await exchange.call(SetMode(mode=exchange.body.mode, reason=exchange.body.reason))


@family.get("/admin/connections", permission="admin", query=ConnectionsQuery, answer=list[calls.ConnectionInfo])
async def list_connections(exchange: Exchange[ConnectionsQuery, None]) -> Any:
    """List all clients that are connected, oldest connection first.

    A plain HTTP request is not a connection in this sense; a stream or a WebSocket is.
    """
    query = exchange.query
    connections: list[calls.ConnectionInfo] = await exchange.call(calls.ListConnections())
    chosen = [
        connection
        for connection in connections
        if query.namespace in ("", connection.namespace) and query.door in ("", connection.door)
    ]
    return page(exchange, chosen, limit=query.limit, offset=query.offset)


@family.delete("/admin/connections/{connection}", query=DisconnectQuery, answer=calls.ConnectionInfo)
async def disconnect_client(exchange: Exchange[DisconnectQuery, None]) -> Any:
    """End a connection: its client is told why, and what it has leased goes back at once.

    Clients connect again by themselves. To keep one out, revoke its key.
    """
    return await exchange.call(calls.Disconnect(id=exchange.path["connection"], reason=exchange.query.reason))
