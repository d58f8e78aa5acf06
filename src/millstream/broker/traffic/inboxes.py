"""Inboxes: addresses for replies.  What is published there goes to one client, if it is there, and is not stored.

An inbox looks like a topic to whoever replies, and like a subscription to whoever asked.  It is neither: there is no
file, no offset to come back to and nothing to clean up; it ends with the connection that opened it.  Its name cannot be
guessed, and no pattern matches it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from millstream.broker.answers import PublishReply
from millstream.broker.partition import LABEL_MEMORY
from millstream.broker.traffic.subscriptions import Subscriber, Subscription, Subscriptions
from millstream.clock import Clock
from millstream.errors import InvalidName, PartitionNotFound
from millstream.names import INBOX_PREFIX, check_topic
from millstream.records import check_batch, stamp
from millstream.wire.subscription_calls import OpenInbox, Subscribed

__all__ = ["Inboxes"]

#: Letters of an address behind its prefix; shorter ones could be guessed.
_SECRET_LETTERS_MIN: Final = 16


@dataclass(slots=True)
class _Inbox:
    subscription: Subscription
    next_offset: int


class Inboxes:
    """All inboxes that are open now."""

    def __init__(self, subscriptions: Subscriptions, *, clock: Clock, draw_name: Callable[[], str]) -> None:
        self._subscriptions = subscriptions
        self._clock = clock
        self._draw_name = draw_name
        #: By namespace and address.
        self._inboxes: dict[tuple[str, str], _Inbox] = {}

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {OpenInbox: self._open}

    async def _open(self, session: Subscriber, call: OpenInbox) -> Subscribed:
        address = check_topic(call.address) if call.address else INBOX_PREFIX + self._draw_name()
        if not address.startswith(INBOX_PREFIX) or len(address) < len(INBOX_PREFIX) + _SECRET_LETTERS_MIN:
            raise InvalidName(f"{address!r} is not the address of an inbox")
        place = (session.namespace, address)
        held = self._inboxes.get(place)
        if held is not None and held.subscription.session.client_id != session.client_id:
            raise InvalidName(f"inbox {address!r} is another client's")
        self._subscriptions.check_room(session, 1)
        if held is not None:
            self._subscriptions.dismiss(held.subscription)  # its connection is dead and nobody has noticed yet

        def closed(_: Subscription) -> None:
            del self._inboxes[place]

        subscription = self._subscriptions.admit(session, on_closed=closed)
        self._inboxes[place] = _Inbox(subscription, 0 if held is None else held.next_offset)
        return Subscribed(subscription=subscription.id, address=address)

    def has(self, namespace: str, name: str) -> bool:
        return (namespace, name) in self._inboxes

    def publish(self, namespace: str, name: str, number: int, batch: memoryview, reply: PublishReply | None) -> None:
        """Hand a reply to whoever waits for it."""
        inbox = self._inboxes[namespace, name]
        if number:
            raise PartitionNotFound(f"an inbox has partition 0 only, not {number}")
        header = check_batch(batch, 0, len(batch))
        now_us = self._clock.now_us()
        offset = inbox.next_offset
        inbox.next_offset += header.count
        stored = bytearray(batch)
        stamp(memoryview(stored), 0, base_offset=offset, append_time_us=now_us, leader_epoch=0)
        self._subscriptions.send(inbox.subscription, name, 0, 0, [bytes(stored)], header.count)
        if reply is not None:
            reply(None, LABEL_MEMORY, offset, now_us, False)
