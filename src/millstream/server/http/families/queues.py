"""Queues over HTTP: leases with a long poll or as a stream of lines, settled by receipt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from millstream.errors import GroupNotFound, InvalidArgument, MessageGone, MillstreamError, ReceiptInvalid
from millstream.names import is_pattern
from millstream.policies import AckDurability, Ordering, Start
from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.server.http.message_view import Content, content, view_of
from millstream.server.http.parameters import Count, DurationMs, Limit, Page, WaitMs
from millstream.server.http.streaming import LineStream, own_session
from millstream.values import Encoding
from millstream.wire import queue_calls as calls

__all__ = ["LeasedView", "family", "leased_view"]

family = Family("queues", "Topics read by queue groups: messages are leased, then acked, nacked or rejected.")

Receipt = Annotated[str, Meta(max_length=400)]
Receipts = Annotated[list[Receipt], Meta(min_length=1, max_length=1000)]
#: What is longer says nothing that a log could not say better.
Reason = Annotated[str, Meta(max_length=1024)]
LeaseMs = Annotated[int, Meta(ge=0, le=12 * 3_600_000, description="From 100 ms to 12 h; 0 = as the group says.")]


class QueuesQuery(Page, kw_only=True, forbid_unknown_fields=True):
    #: Only the groups of this topic.
    topic: str | None = None
    #: Only groups with this name.
    group: str = ""


class Policy(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a queue group; what is left out stays as it is."""

    ordering: Ordering | UnsetType = UNSET
    #: `header:NAME` or `key:C`: by what messages take turns when many wait.
    fair_by: str | UnsetType = UNSET
    #: How long a consumer may take over a message; 0 = what the topic says.
    lease_ms: LeaseMs | UnsetType = UNSET
    processing_ms: DurationMs | UnsetType = UNSET
    #: A retry policy as text; empty = what the topic says.
    retry: str | UnsetType = UNSET
    max_deliveries: Count | UnsetType = UNSET
    poison: bool | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    ack_durability: AckDurability | UnsetType = UNSET
    #: Where a new group begins.
    start: Start | UnsetType = UNSET


class ForceDelete(msgspec.Struct, forbid_unknown_fields=True):
    #: Delete it even while it has consumers.
    force: bool = False


class LeaseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max: Limit = 1
    wait_ms: WaitMs = 0
    lease_ms: LeaseMs = 0
    #: The messages are acked when they are sent; what does not arrive is lost.
    auto_ack: bool = False
    encoding: Encoding = "auto"


class LeasedView(Content, kw_only=True):
    """A message and the right to settle it."""

    receipt: str
    id: str
    topic: str
    partition: int
    offset: int
    delivery: int
    failures: int
    deadline_ms: int
    append_time_ms: int
    timestamp_ms: int


class PeekQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    state: Literal["", "ready", "leased", "waiting"] = ""
    limit: Limit = 50
    encoding: Encoding = "auto"


class QueuedView(Content, kw_only=True):
    """A message and what a queue group has done with it."""

    id: str
    topic: str
    group: str
    partition: int
    offset: int
    state: str
    deliveries: int
    failures: int
    append_time_ms: int
    timestamp_ms: int
    consumer: str
    until_ms: int
    first_delivery_ms: int
    last_delivery_ms: int
    attempts: list[calls.AttemptInfo]


class StandingQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Only for this group.
    group: str | None = None


class Standing(msgspec.Struct, kw_only=True):
    """What one message is to a queue group."""

    topic: str
    group: str
    state: calls.MessageState
    deliveries: int
    failures: int
    #: leased: who holds it and until when; waiting: when it is due, 0 = never (set aside).
    consumer: str
    until_ms: int
    first_delivery_ms: int
    last_delivery_ms: int
    attempts: list[calls.AttemptInfo]


class LeaseStreamQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Messages that may be unsettled at a time; settling some makes room for more.
    max_in_flight: Annotated[int, Meta(ge=1, le=10_000)] = 10
    lease_ms: LeaseMs = 0
    #: After this much silence, a line without a message is sent.
    heartbeat_ms: Annotated[int, Meta(ge=100, le=60_000)] = 15_000
    #: Messages are acked when they are sent, as fast as they are read; what does not arrive is lost.
    auto_ack: bool = False
    #: A name for people.
    consumer: Annotated[str, Meta(max_length=200)] = ""
    encoding: Encoding = "auto"


class Item(calls.SettleItem, kw_only=True, forbid_unknown_fields=True):
    receipt: Receipt
    action: calls.Action = "ack"
    reason: Reason = ""
    #: nack: time until the next try (by the retry policy if left out); extend: how long, from now.
    delay_ms: DurationMs | None = None


class SettleBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[Item], Meta(min_length=1, max_length=1000)]


class ReceiptsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    receipts: Receipts


class FailedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    receipts: Receipts
    #: What went wrong; kept with the message.
    reason: Reason = ""


class NackBody(FailedBody, kw_only=True, forbid_unknown_fields=True):
    #: Time until the next try; by the retry policy if left out.
    delay_ms: DurationMs | None = None


class ExtendBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    receipts: Receipts
    #: How long, from now; if left out, as long as the lease was.
    delay_ms: DurationMs | None = None


# --- groups ------------------------------------------------------------------------------------------------------


@family.get("/queues", query=QueuesQuery, answer=list[calls.QueueSummary])
async def list_queues(exchange: Exchange[QueuesQuery, None]) -> Any:
    """List queue groups by topic and name, with how many messages are ready, leased and waiting."""
    query = exchange.query
    queues: list[calls.QueueSummary] = await exchange.call(calls.ListQueues(topic=query.topic))
    if query.group:
        queues = [queue for queue in queues if queue.group == query.group]
    return page(exchange, queues, limit=query.limit, offset=query.offset)


@family.get("/queues/{topic}/{group}", answer=calls.QueueInfo)
async def show_queue(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a queue group: its policy, depth, partitions, lanes and consumers."""
    return await exchange.call(calls.DescribeQueue(**_names(exchange)))


@family.put("/queues/{topic}/{group}", body=Policy, answer=calls.QueueInfo)
async def configure_queue(exchange: Exchange[NoQuery, Policy]) -> Any:
    """Create a queue group, or change the settings of one; what is left out stays as it is."""
    names = _names(exchange)
    if is_pattern(names["topic"]):
        raise InvalidArgument("name one topic: a group on a pattern is opened by its consumers")
    policy = msgspec.to_builtins(exchange.body)
    try:
        await exchange.call(calls.ConfigureQueue(**names, policy=policy))
    except GroupNotFound:
        opened = await exchange.call(calls.OpenQueue(**names, policy=policy))
        await exchange.call(calls.CloseQueue(consumer=opened.consumer))
    return await exchange.call(calls.DescribeQueue(**names))


@family.delete("/queues/{topic}/{group}", query=ForceDelete)
async def delete_queue(exchange: Exchange[ForceDelete, None]) -> None:
    """Delete a queue group and its progress; with `force` even while it has consumers."""
    await exchange.call(calls.DeleteQueue(**_names(exchange), force=exchange.query.force))


@family.post("/queues/{topic}/{group}/purge", answer=calls.Purged)
async def purge_queue(exchange: Exchange[NoQuery, None]) -> Any:
    """Settle everything that is in the queue now, leased messages too."""
    return await exchange.call(calls.PurgeQueue(**_names(exchange)))


@family.get("/queues/{topic}/{group}/messages", query=PeekQuery, answer=list[QueuedView])
async def peek_queue(exchange: Exchange[PeekQuery, None]) -> list[QueuedView]:
    """Look at messages of a queue without leasing them, oldest first."""
    query = exchange.query
    found: list[calls.QueuedMessage] = await exchange.call(
        calls.PeekQueue(**_names(exchange), state=query.state, limit=query.limit)
    )
    return [_queued_view(message, query.encoding) for message in found]


@family.get("/messages/{id}/queues", query=StandingQuery, answer=list[Standing])
async def describe_message(exchange: Exchange[StandingQuery, None]) -> list[Standing]:
    """Show the state of a message in each queue group of its topic, and its attempts.

    The state is ready, leased, waiting, settled or gone.
    """
    call = calls.DescribeMessage(id=exchange.path["id"], group=exchange.query.group)
    found: list[calls.QueuedMessage] = await exchange.call(call)
    return [view_of(Standing, message) for message in found]


# --- leases ------------------------------------------------------------------------------------------------------


@family.post("/queues/{topic}/{group}/lease", permission="consume", body=LeaseBody, answer=list[LeasedView])
async def lease_messages(exchange: Exchange[NoQuery, LeaseBody]) -> list[LeasedView]:
    """Lease messages to work on, waiting for some if there are none.

    The group is created if there is none. A lease ends when it is settled or when its deadline passes; there is no
    connection that would keep it. A client that goes away while it waits gets nothing, and nothing is leased.
    """
    body = exchange.body
    call = calls.LeaseMessages(
        **_names(exchange), max=body.max, wait_ms=body.wait_ms, lease_ms=body.lease_ms, auto_ack=body.auto_ack
    )
    waiting = exchange.call(call)
    leased: list[calls.LeasedMessage] = await (exchange.wait_for(waiting) if body.wait_ms else waiting)
    return [leased_view(message, body.encoding) for message in leased]


@family.get(
    "/queues/{topic}/{group}/stream",
    permission="consume",
    query=LeaseStreamQuery,
    answer=LeasedView,
    media_type="application/x-ndjson",
)
async def stream_messages(exchange: Exchange[LeaseStreamQuery, None]) -> LineStream:
    """Stream messages as they come, one JSON document per line, each with a receipt to settle it by POST.

    While `max_in_flight` messages are unsettled, the stream waits. When it ends, what is not settled goes back to the
    queue at once. A line with `heartbeat_ms` only says that the connection is alive.
    """
    lines = _lines(exchange)
    await anext(lines)  # opens the consumer: what is wrong with the request is told before anything is sent
    return LineStream(exchange, lines)


async def _lines(exchange: Exchange[LeaseStreamQuery, None]) -> AsyncGenerator[bytes, None]:
    query, names, broker = exchange.query, _names(exchange), exchange.broker
    ended: list[MillstreamError] = []
    with own_session(exchange, ended.append) as session:
        opened: Any = await broker.call(
            session,
            calls.OpenQueue(
                **names,
                consumer=query.consumer,
                lease_ms=query.lease_ms,
                by_receipt=True,
                auto_ack=query.auto_ack,
            ),
        )
        yield b""
        call = calls.LeaseMessages(
            **names,
            consumer=opened.consumer,
            max=min(query.max_in_flight, 1000),
            max_in_flight=query.max_in_flight,
            wait_ms=query.heartbeat_ms,
        )
        while True:
            leased: Any = await broker.call(session, call)
            if ended:
                raise ended[0]
            views = [leased_view(message, query.encoding) for message in leased]
            yield b"".join(msgspec.json.encode(view) + b"\n" for view in views) or b'{"heartbeat_ms":%d}\n' % (
                broker.now_us() // 1000
            )


def leased_view(message: calls.LeasedMessage, encoding: Encoding) -> LeasedView:
    """A leased message as JSON."""
    return view_of(LeasedView, message, **content(message.key, message.value, message.headers, encoding))


def _queued_view(message: calls.QueuedMessage, encoding: Encoding) -> QueuedView:
    return view_of(QueuedView, message, **content(message.key, message.value, message.headers, encoding))


# --- settles -----------------------------------------------------------------------------------------------------


@family.post("/queues/settle", permission="consume", body=SettleBody, answer=list[calls.SettleOutcome])
async def settle_messages(exchange: Exchange[NoQuery, SettleBody]) -> Any:
    """Settle leased messages, each with an action of its own; the answer has one outcome per item, in their order.

    If none of the receipts is valid any more, the answer is 409.
    """
    return await _settle(exchange, exchange.body.items)


@family.post("/queues/ack", permission="consume", body=ReceiptsBody, answer=list[calls.SettleOutcome])
async def ack_messages(exchange: Exchange[NoQuery, ReceiptsBody]) -> Any:
    """Ack messages: the work is done."""
    return await _settle(exchange, [calls.SettleItem(receipt=receipt) for receipt in exchange.body.receipts])


@family.post("/queues/nack", permission="consume", body=NackBody, answer=list[calls.SettleOutcome])
async def nack_messages(exchange: Exchange[NoQuery, NackBody]) -> Any:
    """Nack messages that failed; they are tried again by the retry policy or after `delay_ms`."""
    body = exchange.body
    return await _settle(
        exchange,
        [
            calls.SettleItem(receipt=receipt, action="nack", reason=body.reason, delay_ms=body.delay_ms)
            for receipt in body.receipts
        ],
    )


@family.post("/queues/reject", permission="consume", body=FailedBody, answer=list[calls.SettleOutcome])
async def reject_messages(exchange: Exchange[NoQuery, FailedBody]) -> Any:
    """Reject messages that will never succeed; they become dead letters."""
    body = exchange.body
    return await _settle(
        exchange,
        [calls.SettleItem(receipt=receipt, action="reject", reason=body.reason) for receipt in body.receipts],
    )


@family.post("/queues/extend", permission="consume", body=ExtendBody, answer=list[calls.SettleOutcome])
async def extend_leases(exchange: Exchange[NoQuery, ExtendBody]) -> Any:
    """Extend leases, at most to the group's `processing_ms` since the lease was granted.

    `deadline_ms` of each outcome says when the lease ends now.
    """
    body = exchange.body
    return await _settle(
        exchange,
        [calls.SettleItem(receipt=receipt, action="extend", delay_ms=body.delay_ms) for receipt in body.receipts],
    )


async def _settle(exchange: Exchange[Any, Any], items: Sequence[calls.SettleItem]) -> list[calls.SettleOutcome]:
    outcomes: list[calls.SettleOutcome] = await exchange.call(calls.SettleMessages(items=list(items)))
    results = {outcome.result for outcome in outcomes}
    if results == {"gone"}:
        raise MessageGone("what these receipts are of is not in the log any more, and is not delivered again")
    if results <= {"receipt_invalid", "gone"}:
        raise ReceiptInvalid("none of these receipts is good: the lease has ended, or the message is settled already")
    return outcomes


def _names(exchange: Exchange[Any, Any]) -> dict[str, Any]:
    return {"topic": exchange.path["topic"], "group": exchange.path["group"]}
