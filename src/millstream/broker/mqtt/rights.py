"""What an MQTT client may do, in the words of the broker's access control."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.mqtt.topics import is_special, parse_queue, parse_share, to_pattern, to_topic

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession

__all__ = ["may_receive", "require_filter", "require_publish"]

#: A name that is no topic needs the right in every topic.
_EVERY_TOPIC: Final = "#"


def require_publish(who: BrokerSession, topic: str) -> None:
    """Raises Forbidden when a client may not publish to a topic."""
    who.access.require("produce", who.namespace, to_topic(topic) or _EVERY_TOPIC)


def may_receive(who: BrokerSession, topic: str) -> bool:
    """Whether somebody may have a message of a topic, whatever it is subscribed to."""
    return is_special(topic) or who.access.may("consume", who.namespace, to_topic(topic) or _EVERY_TOPIC)


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
        who.access.require("consume", who.namespace, to_pattern(inner) or _EVERY_TOPIC)
