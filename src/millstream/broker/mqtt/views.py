"""MQTT as those who run the broker see it: sessions, retained messages, and what can be done about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.mqtt.backlog import backlog_of
from millstream.broker.mqtt.retained import Kept
from millstream.broker.mqtt.session import Session
from millstream.errors import InvalidArgument, MessageNotFound, SessionNotFound
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import check_topic_filter, check_topic_name
from millstream.wire import mqtt_calls as calls

if TYPE_CHECKING:
    from millstream.broker.mqtt.mqtt import Mqtt

__all__ = ["MqttViews"]

_LIMIT_MAX: Final = 1_000
_PLACES_MAX: Final = 100
_REASON_BYTES_MAX: Final = 1_024
#: Retained messages that are taken out before others get their turn.
_CLEARED_AT_A_TIME: Final = 1_000


class _Session(Protocol):
    """Who asks."""

    @property
    def namespace(self) -> str: ...


class MqttViews:
    """See the module.  All methods are called on the broker's event loop."""

    def __init__(self, room: Mqtt) -> None:
        self._room = room

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {
            calls.DescribeMqtt: self._overview,
            calls.ListSessions: self._list_sessions,
            calls.ShowSession: self._show_session,
            calls.DisconnectSession: self._disconnect,
            calls.ForgetSession: self._forget,
            calls.ListRetained: self._list_retained,
            calls.ShowRetained: self._show_retained,
            calls.ClearRetained: self._clear_retained,
        }

    async def _overview(self, who: _Session, call: calls.DescribeMqtt) -> calls.MqttOverview:
        room = self._room
        worlds = [world for name, world in list(room.worlds.items()) if call.everywhere or name == who.namespace]
        sessions = [session for world in worlds for session in world.sessions.values()]
        durable = [session for session in sessions if session.lasts]
        kept, size = room.retained.kept_in(who.namespace)
        if call.everywhere:
            kept, size = room.retained.count, room.retained.bytes
        metrics = room.broker.metrics
        return calls.MqttOverview(
            namespace="" if call.everywhere else who.namespace,
            connected=sum(session.client is not None for session in sessions),
            sessions=len(sessions),
            durable=len(durable),
            away=sum(session.client is None for session in durable),
            subscriptions=sum(len(session.subscriptions) + len(session.queues) for session in sessions),
            retained=kept,
            retained_bytes=size,
            received=metrics.mqtt_received,
            sent=metrics.mqtt_sent,
            dropped=metrics.mqtt_dropped,
            sessions_max=room.settings.sessions_max,
            retained_max=room.settings.retained_max,
            retained_bytes_max=room.settings.retained_bytes_max,
        )

    # --- sessions ------------------------------------------------------------------------------------------------

    async def _list_sessions(self, who: _Session, call: calls.ListSessions) -> calls.SessionPage:
        _check_limit(call.limit)
        world = self._room.worlds.get(who.namespace)
        if world is None:
            return calls.SessionPage(sessions=[])
        wanted = (
            client_id
            for client_id, session in world.sessions.items()
            if client_id > call.after
            and client_id.startswith(call.prefix)
            and call.connected in (None, session.client is not None)
        )
        found = nsmallest(call.limit + 1, wanted)
        sessions = [world.sessions[client_id] for client_id in found[: call.limit]]
        backlog = await backlog_of(world, sessions, opens=False)
        return calls.SessionPage(
            sessions=[calls.SessionSummary(**_summary(session, backlog.get(session, ()))) for session in sessions],
            after=found[call.limit - 1] if len(found) > call.limit else "",
        )

    async def _show_session(self, who: _Session, call: calls.ShowSession) -> calls.SessionInfo:
        session = self._session(who, call.client_id)
        backlog = await backlog_of(session.world, [session], opens=True)
        places = backlog.get(session, [])
        client = session.client
        return calls.SessionInfo(
            **_summary(session, places),
            created_ms=session.created_ms,
            keep_alive_s=client.keep_alive_s if client is not None else 0,
            subscribed=[
                calls.SessionSubscription(**subscription._asdict())
                for _, subscription in sorted((session.subscriptions | session.queues).items())
            ],
            behind=sorted(places, key=lambda place: place.offset - place.end)[:_PLACES_MAX],
            receiving=len(session.incoming),
            will_topic=session.will.topic if session.will is not None else "",
        )

    async def _disconnect(self, who: _Session, call: calls.DisconnectSession) -> calls.Disconnected:
        if len(call.reason.encode()) > _REASON_BYTES_MAX:
            raise InvalidArgument(f"reason may have {_REASON_BYTES_MAX} bytes at most")
        session = self._session(who, call.client_id)
        return calls.Disconnected(disconnected=_dismiss(session, call.reason))

    async def _forget(self, who: _Session, call: calls.ForgetSession) -> None:
        session = self._session(who, call.client_id)
        _dismiss(session, "an administrator has ended the session")
        self._room.end(session)
        await self._room.store.journal.sync()

    def _session(self, who: _Session, client_id: str) -> Session:
        world = self._room.worlds.get(who.namespace)
        session = world.sessions.get(client_id) if world is not None else None
        if session is None:
            raise SessionNotFound(f"there is no MQTT session {client_id[:80]!r} in namespace {who.namespace!r}")
        return session

    # --- retained messages ---------------------------------------------------------------------------------------

    async def _list_retained(self, who: _Session, call: calls.ListRetained) -> calls.RetainedPage:
        _check_limit(call.limit)
        found = self._room.kept(who.namespace, _checked_filter(call.filter), call.after)
        page = [kept async for kept in _in_turns(found, call.limit + 1)]
        return calls.RetainedPage(
            messages=[calls.RetainedInfo(**_about(kept)) for kept in page[: call.limit]],
            after=page[call.limit - 1].message.topic if len(page) > call.limit else "",
        )

    async def _show_retained(self, who: _Session, call: calls.ShowRetained) -> calls.RetainedMessage:
        try:
            topic = check_topic_name(call.topic)
        except MqttViolation as error:
            raise InvalidArgument(str(error)) from None
        kept = next(filter(None, self._room.kept(who.namespace, topic)), None)
        if kept is None:
            raise MessageNotFound(f"nothing is retained for {topic[:80]!r} in namespace {who.namespace!r}")
        message = kept.message
        return calls.RetainedMessage(
            **_about(kept), payload=bytes(message.payload), user_properties=list(message.properties.user)
        )

    async def _clear_retained(self, who: _Session, call: calls.ClearRetained) -> calls.RetainedCleared:
        retained = self._room.retained
        found = retained.matching(who.namespace, _checked_filter(call.filter))
        topics = [kept.message.topic async for kept in _in_turns(found)]
        if not call.dry_run:
            for at in range(0, len(topics), _CLEARED_AT_A_TIME):
                await retained.clear(who.namespace, topics[at : at + _CLEARED_AT_A_TIME])
        return calls.RetainedCleared(cleared=len(topics))


async def _in_turns(found: Iterable[Kept | None], limit: int | None = None) -> AsyncIterator[Kept]:
    """The first of them, with a turn for others now and then: there may be many."""
    for kept in found:
        if kept is None:
            await asyncio.sleep(0)
            continue
        yield kept
        if limit is not None:
            limit -= 1
            if not limit:
                return


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= _LIMIT_MAX:
        raise InvalidArgument(f"limit must be between 1 and {_LIMIT_MAX}, not {limit}")


def _checked_filter(text: str) -> str:
    try:
        return check_topic_filter(text)
    except MqttViolation as error:  # of whoever asks, who has broken no protocol
        raise InvalidArgument(str(error)) from None


def _dismiss(session: Session, reason: str) -> bool:
    """End the connection of its client, if there is one.  To the session it is lost: its will is due."""
    client = session.client
    if client is None:
        return False
    client.fail(MqttViolation(Reason.ADMINISTRATIVE_ACTION, reason or "an administrator has ended the connection"))
    return True


def _summary(session: Session, places: Sequence[calls.SessionPlace]) -> dict[str, Any]:
    client = session.client
    who = client.who if client is not None else None
    return {
        "client_id": session.client_id,
        "connected": client is not None,
        "version": client.version if client is not None else 0,
        "address": who.address if who is not None else "",
        "connected_ms": who.opened_ms if who is not None else 0,
        "expiry_s": session.expiry_s,
        "ends_ms": session.ends_us // 1000,
        "subscriptions": len(session.subscriptions) + len(session.queues),
        "in_flight": len(session.outgoing) - session.outgoing.waiting,
        "queued": session.queued,
        "waiting": sum(place.end - place.offset for place in places),
        "dropped": session.dropped,
    }


def _about(kept: Kept) -> dict[str, Any]:
    message = kept.message
    return {
        "topic": message.topic,
        "size": len(message.payload),
        "qos": message.qos,
        "stored_ms": kept.stored_us // 1000,
        "expiry_ms": message.expiry_us // 1000,
        "client_id": message.client_id,
        "content_type": message.properties.content_type or "",
    }
