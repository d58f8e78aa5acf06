"""The calls about queues as users write their arguments.  Shared by both kinds of client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from millstream.client.arguments import as_list
from millstream.client.settings import QueueSettings, lease_length_ms
from millstream.durations import Duration, parse_ms
from millstream.errors import InvalidArgument, MillstreamError
from millstream.ids import parse_message_id
from millstream.wire import calls, queue_calls
from millstream.wire.queue_calls import Action, LeasedMessage, QueuedMessage, QueueInfo

__all__ = [
    "LeasedMessage",
    "QueueInfo",
    "QueuedMessage",
    "configure_call",
    "explain_call",
    "lease_call",
    "open_call",
    "settle_call",
    "uids_of",
]


def open_call(settings: QueueSettings) -> queue_calls.OpenQueue:
    return queue_calls.OpenQueue(
        topic=settings.topic,
        group=settings.group,
        consumer=settings.consumer,
        lease_ms=settings.lease_ms,
        auto_ack=settings.auto_ack,
        policy=dict(settings.policy) or None,
        start=_start(settings.start),
    )


def _start(text: str) -> Literal["", "earliest", "latest"]:
    return "earliest" if text == "earliest" else "latest" if text == "latest" else ""


def uids_of(found: list[calls.TopicMetadata]) -> dict[str, list[int]]:
    return {topic.name: topic.partition_uids for topic in found}


def configure_call(topic: str, group: str, policy: Mapping[str, Any]) -> queue_calls.ConfigureQueue:
    if not policy:
        raise InvalidArgument("name at least one setting to change, for example retry='durable'")
    return queue_calls.ConfigureQueue(topic=topic, group=group, policy=dict(policy))


def explain_call(about: str) -> queue_calls.Explain:
    """About a message id, or `topic/group`."""
    if not isinstance(about, str):
        raise InvalidArgument(f"say what about, with a message id or 'topic/group', not {about!r}")
    topic, slash, group = about.partition("/")
    if slash:
        return queue_calls.Explain(topic=topic, group=group)
    try:
        parse_message_id(about)
    except MillstreamError:
        raise InvalidArgument(
            f"{about[:80]!r} is not a message id; for a queue write TOPIC/GROUP: `millstream queue list` names them"
        ) from None
    return queue_calls.Explain(id=about)


def lease_call(
    topic: str, group: str, maximum: int, wait: Duration, lease: Duration | None, *, auto_ack: bool
) -> queue_calls.LeaseMessages:
    return queue_calls.LeaseMessages(
        topic=topic,
        group=group,
        max=maximum,
        wait_ms=parse_ms(wait, "wait"),
        lease_ms=lease_length_ms(lease),
        auto_ack=auto_ack,
    )


def settle_call(
    action: Action, receipts: Iterable[str], reason: str, delay: Duration | None
) -> queue_calls.SettleMessages:
    delay_ms = None if delay is None else parse_ms(delay, "delay")
    if action == "extend" and delay_ms == 0:
        raise InvalidArgument("an extension is more than 0; without a delay it is the lease's own length")
    return queue_calls.SettleMessages(
        items=[
            queue_calls.SettleItem(receipt=receipt, action=action, reason=reason, delay_ms=delay_ms)
            for receipt in as_list("receipts", receipts)
        ]
    )
