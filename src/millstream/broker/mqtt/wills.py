"""Wills: what a client has left to be published when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from millstream.broker.mqtt.publishing import Owed, Publishing, Stretch
from millstream.errors import MillstreamError, QuotaExceeded
from millstream.mqtt.messages import Message, expires_us
from millstream.mqtt.packets import Will

if TYPE_CHECKING:
    from millstream.broker.mqtt.mqtt import Mqtt
    from millstream.broker.mqtt.session import Session

__all__ = ["LeftWill", "Wills"]

_log = structlog.get_logger("millstream.mqtt")


class LeftWill(Will, frozen=True):
    """A will, and the key with which it came; none where the broker asks for none."""

    key_id: str = ""

    @classmethod
    def of(cls, will: Will, key_id: str) -> LeftWill:
        return cls(will.topic, will.payload, will.qos, will.retain, will.properties, key_id)


class Wills:
    """The wills whose delay is running."""

    def __init__(self, room: Mqtt) -> None:
        self._room = room
        self._waiting: dict[Session, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def lost(self, session: Session) -> None:
        """The client is gone without a word: its will is due after the delay it asked for, or when its session ends."""
        if session.will is None:
            return
        delay_s = min(session.will.properties.will_delay_s or 0, session.expiry_s)
        if delay_s:
            self._waiting[session] = self._room.loop.call_later(delay_s, self.publish, session)
        else:
            self.publish(session)

    def returned(self, session: Session) -> None:
        """The client is back before its time."""
        timer = self._waiting.pop(session, None)
        if timer is not None:
            timer.cancel()

    def publish(self, session: Session) -> None:
        """Its time has come."""
        self.returned(session)
        message = self._message_of(session)
        session.will = None
        if message is None:
            session.record(session.will_fact())
        else:
            self._publish(session, message)

    def _message_of(self, session: Session) -> Message | None:
        will = session.will
        if will is None:
            return None
        # The broker publishes it, which may do everything.
        if not self._room.broker.access.is_valid(will.key_id):
            _log.warning("a will was not published", client=session.client_id, reason="its key is not valid any more")
            return None
        properties = will.properties
        return Message(
            will.topic,
            will.payload,
            qos=will.qos,
            retain=will.retain,
            properties=msgspec.structs.replace(properties, will_delay_s=None, message_expiry_s=None),
            client_id=session.client_id,
            expiry_us=expires_us(properties.message_expiry_s, self._room.clock.now_us()),
        )

    def _publish(self, session: Session, message: Message) -> None:
        def settled(run: Sequence[Owed]) -> None:
            for error in (owed.error for owed in run):
                if error is not None:
                    _log.warning("a will was not published", client=session.client_id, reason=str(error))
            # Not before: a crash must not take it.  At once: after a crash it must not come again.
            session.record(session.will_fact())  # the session may have another one by now
            self._room.store.journal.flush()

        publishing = Publishing(session.world, session.world.own, settled)
        now_us = self._room.clock.now_us()
        stretch = _alone(message)
        try:
            if message.retain:
                self._room.retained.admit(session.world.namespace, message)
        except QuotaExceeded as error:
            _log.warning("a will cannot be retained", client=session.client_id, reason=str(error))
            message.retain = False
        try:
            publishing.take(stretch, now_us)
        except MillstreamError as error:
            publishing.refuse(stretch.owed, error)
        publishing.flush()

    def close(self) -> None:
        """The broker stops.  Whoever is remembered is lost again when it starts."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()


def _alone(message: Message) -> Stretch:
    return Stretch(message, [message.payload], Owed(message.qos, 0))
