"""What an MQTT client may do, in the words of the broker's access control."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.mqtt.topics import is_special, parse_queue, parse_share, to_pattern, to_topic
from millstream.names import INBOX_PREFIX

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.traffic.inboxes import Inboxes

__all__ = ["may_receive", "require_filter", "require_publish"]

#: A name that is no topic needs the right in every topic.
_EVERY_TOPIC: Final = "#"


def require_publish(who: BrokerSession, topic: str, inboxes: Inboxes) -> None:
    """Raises Forbidden when a client may not publish to a topic.  Whoever may ask or answer may reply to an inbox."""
    name = to_topic(topic)
    if name is not None and not inboxes.has(who.namespace, name):
        name = _shared(name)
    who.access.require("produce", who.namespace, _EVERY_TOPIC if name is None else name)


def may_receive(who: BrokerSession, topic: str) -> bool:
    """Whether somebody may have a message of a topic, whatever it is subscribed to."""
    return is_special(topic) or who.access.may("consume", who.namespace, _shared(to_topic(topic)))


def require_filter(who: BrokerSession, topic_filter: str) -> None:
    """Raises Forbidden when somebody may not subscribe to everything that a filter matches."""
    share = parse_share(topic_filter)
    inner = topic_filter if share is None else share.filter
    address = parse_queue(inner)
    if address is not None:
        who.access.require("consume", who.namespace, address.topic)
    elif is_special(inner):
        who.access.require("read", who.namespace, _EVERY_TOPIC)
    else:
        who.access.require("consume", who.namespace, _shared(to_pattern(inner)))


def _shared(name: str | None) -> str:
    """Where a right is needed.  A name like that of an inbox is no secret here: it needs the right in every topic."""
    return _EVERY_TOPIC if name is None or name.startswith(INBOX_PREFIX) else name
