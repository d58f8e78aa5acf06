"""`client.queues`: looking at queue groups, changing them, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from millstream.client.asking import Ask
from millstream.client.queue_requests import configure_call, lease_call, settle_call
from millstream.durations import Duration
from millstream.wire import queue_calls

__all__ = ["Queues"]

# Inside the class `list` is a method.
_Summaries: TypeAlias = list[queue_calls.QueueSummary]
_Messages: TypeAlias = list[queue_calls.QueuedMessage]
_Leased: TypeAlias = list[queue_calls.LeasedMessage]
_Outcomes: TypeAlias = list[queue_calls.SettleOutcome]


class Queues:
    """All queue groups of a namespace."""

    def __init__(self, call: Ask) -> None:
        self._call = call

    def list(self, topic: str | None = None) -> _Summaries:
        """The groups of a topic, or all groups, with how many messages are ready, leased and waiting."""
        return self._call(queue_calls.ListQueues(topic=topic), _Summaries)

    def describe(self, topic: str, group: str = "default") -> queue_calls.QueueInfo:
        """One group: its settings, depth, partitions, lanes and consumers.  Raises GroupNotFound."""
        return self._call(queue_calls.DescribeQueue(topic=topic, group=group), queue_calls.QueueInfo)

    def configure(self, topic: str, group: str = "default", **policy: Any) -> None:
        """Change settings of a group (see QueuePolicy), for example `retry="durable"`; the others stay as they are."""
        self._call(configure_call(topic, group, policy), object)

    def pause(self, topic: str, group: str = "default") -> None:
        """Hand out nothing until `resume`."""
        self.configure(topic, group, paused=True)

    def resume(self, topic: str, group: str = "default") -> None:
        self.configure(topic, group, paused=False)

    def purge(self, topic: str, group: str = "default") -> int:
        """Settle everything that is in the queue now, leased messages too; return how many they were."""
        answer = self._call(queue_calls.PurgeQueue(topic=topic, group=group), queue_calls.Purged)
        return answer.purged

    def delete(self, topic: str, group: str = "default", *, force: bool = False) -> None:
        """Delete a group and its progress; with `force`, even while it has consumers."""
        self._call(queue_calls.DeleteQueue(topic=topic, group=group, force=force), object)

    def peek(
        self,
        topic: str,
        group: str = "default",
        *,
        state: Literal["", "ready", "leased", "waiting"] = "",
        limit: int = 10,
    ) -> _Messages:
        """Look at messages without leasing them, oldest first."""
        return self._call(queue_calls.PeekQueue(topic=topic, group=group, state=state, limit=limit), _Messages)

    def message(self, message_id: str, group: str | None = None) -> _Messages:
        """The state of a message in each group of its topic, or in one group.  Raises MessageNotFound."""
        return self._call(queue_calls.DescribeMessage(id=message_id, group=group), _Messages)

    def lease(
        self,
        topic: str,
        group: str = "default",
        *,
        max: int = 1,  # noqa: A002 - the word that every queue uses for it
        wait: Duration = 0,
        lease: Duration | None = None,
        auto_ack: bool = False,
    ) -> _Leased:
        """Lease messages so that only their deadline or a settle ends the lease, not the end of this connection.

        This is for shells and other programs that come and go; a program that keeps running uses `client.queue`.  With
        `auto_ack`, messages are acked when they are sent: nobody gets them again, whatever becomes of this program.
        """
        return self._call(lease_call(topic, group, max, wait, lease, auto_ack=auto_ack), _Leased)

    def settle(
        self,
        action: Literal["ack", "nack", "reject", "extend", "release"],
        receipts: Iterable[str],
        *,
        reason: str = "",
        delay: Duration | None = None,
    ) -> _Outcomes:
        """Settle deliveries by receipt; return one outcome for each.

        `delay` is the time until the next try (nack), or how long the lease lasts from now on (extend).
        """
        return self._call(settle_call(action, receipts, reason, delay), _Outcomes)
