"""MQTT over HTTP: who is connected there, what is remembered of whom, and what is retained."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.server.http.message_view import view_of
from millstream.server.http.parameters import Limit
from millstream.values import Encoding, to_json
from millstream.wire import mqtt_calls as calls

__all__ = ["family"]

family = Family("mqtt", "Sessions of MQTT clients, and retained messages. Topics are named as in MQTT: `a/b`.")


class OverviewQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Of all namespaces.
    everywhere: bool = False


class SessionsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Only client ids that begin with this.
    prefix: str = ""
    #: Only sessions whose client is connected, or only the others.
    connected: bool | None = None
    limit: Limit = 50
    #: Where to continue: the `after` of the last answer.
    after: str = ""


class Farewell(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: What the client is told, if it speaks version 5.
    reason: str = ""


class RetainedQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: A topic, or a filter with `+` and `#`.
    filter: str = "#"
    limit: Limit = 50
    #: Where to continue: the `after` of the last answer.
    after: str = ""


class RetainedOne(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    topic: str
    encoding: Encoding = "auto"


class Clearing(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: A topic, or a filter with `+` and `#`.
    filter: str
    #: Only count them.
    dry_run: bool = False


class RetainedView(calls.RetainedInfo):
    value: Any
    #: Of the value: `text`, `json` or `base64`.
    encoding: str
    user_properties: list[tuple[str, str]]


@family.get("/mqtt", query=OverviewQuery, answer=calls.MqttOverview)
async def show_mqtt(exchange: Exchange[OverviewQuery, None]) -> Any:
    """Show in figures who is connected by MQTT, what is remembered and what is retained."""
    return await exchange.call(calls.DescribeMqtt(everywhere=exchange.query.everywhere))


@family.get("/mqtt/sessions", query=SessionsQuery, answer=calls.SessionPage)
async def list_mqtt_sessions(exchange: Exchange[SessionsQuery, None]) -> Any:
    """List the sessions of MQTT clients, connected or remembered, in the order of client ids.

    Pass `after` of an answer to continue where it ended; it is empty at the end.
    """
    return await exchange.call(calls.ListSessions(**msgspec.structs.asdict(exchange.query)))


@family.get("/mqtt/sessions/{client_id}", answer=calls.SessionInfo)
async def show_mqtt_session(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a session: its connection, its subscriptions, and what waits for it where."""
    return await exchange.call(calls.ShowSession(client_id=exchange.path["client_id"]))


@family.post("/mqtt/sessions/{client_id}/disconnect", body=Farewell, answer=calls.Disconnected)
async def disconnect_mqtt_client(exchange: Exchange[NoQuery, Farewell]) -> Any:
    """End the connection of a client, which may come back. Its will is published."""
    call = calls.DisconnectSession(client_id=exchange.path["client_id"], reason=exchange.body.reason)
    return await exchange.call(call)


@family.delete("/mqtt/sessions/{client_id}")
async def forget_mqtt_session(exchange: Exchange[NoQuery, None]) -> None:
    """End a session with everything that waits for it, and the connection of its client."""
    await exchange.call(calls.ForgetSession(client_id=exchange.path["client_id"]))


@family.get("/mqtt/retained", query=RetainedQuery, answer=calls.RetainedPage)
async def list_retained(exchange: Exchange[RetainedQuery, None]) -> Any:
    """List retained messages without their payloads, in the order of topics.

    Pass `after` of an answer to continue where it ended; it is empty at the end.
    """
    return await exchange.call(calls.ListRetained(**msgspec.structs.asdict(exchange.query)))


@family.get("/mqtt/retained/message", query=RetainedOne, answer=RetainedView)
async def show_retained(exchange: Exchange[RetainedOne, None]) -> RetainedView:
    """Show the retained message of a topic, with its payload."""
    found = await exchange.call(calls.ShowRetained(topic=exchange.query.topic))
    value, encoding = to_json(found.payload, exchange.query.encoding)
    return view_of(RetainedView, found, value=value, encoding=encoding)


@family.delete("/mqtt/retained", query=Clearing, answer=calls.RetainedCleared)
async def clear_retained(exchange: Exchange[Clearing, None]) -> Any:
    """Remove the retained messages of a topic, or of all topics that match. Subscribers are not told."""
    return await exchange.call(calls.ClearRetained(filter=exchange.query.filter, dry_run=exchange.query.dry_run))
