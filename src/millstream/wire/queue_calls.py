"""The control calls of queues and their answers; LEASE and SETTLE, the hot ones, are in leases.py.

A queue group is a topic and a name.  Byte strings (keys, values, header values) are base64 in JSON.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "Action",
    "AttemptInfo",
    "Claim",
    "ClaimAction",
    "ClaimExtended",
    "ClaimMessages",
    "ClaimSettled",
    "CloseQueue",
    "ConfigureQueue",
    "ConsumerInfo",
    "DeleteQueue",
    "DescribeMessage",
    "DescribeQueue",
    "Explain",
    "Explanation",
    "ExtendClaim",
    "LaneInfo",
    "LeaseMessages",
    "LeasedMessage",
    "ListQueues",
    "OpenQueue",
    "PeekQueue",
    "PurgeQueue",
    "Purged",
    "QueueInfo",
    "QueueOpened",
    "QueuePartitionInfo",
    "QueueSummary",
    "QueuedMessage",
    "Range",
    "SettleClaim",
    "SettleItem",
    "SettleMessages",
    "SettleOutcome",
]

MessageState = Literal["ready", "leased", "waiting", "settled", "gone"]
Action = Literal["ack", "nack", "reject", "extend", "release"]
ClaimAction = Literal["ack", "nack", "reject", "release"]
#: Partition, first offset, and the offset after the last one.
Range = tuple[int, int, int]


# --- consumers ---------------------------------------------------------------------------------------------------


class OpenQueue(CallForm, tag="queue.open"):
    """Makes this session a consumer of a group, and the group if there is none.

    The topic may be a pattern (`*` one level, `#` the rest): then the group exists on every topic that matches, also
    on those that appear later.  `policy` belongs to a new group; on an existing one it may only repeat what holds.
    """

    topic: str
    group: str = "default"
    #: A name for people; the client's id if empty.
    consumer: str = ""
    #: 0 = what the group or the topic says.
    lease_ms: int = 0
    #: Leases outlive the connection: only their deadline gives them back.
    detached: bool = False
    #: Whoever has a receipt may settle what it holds, from any connection.
    by_receipt: bool = False
    #: Messages are acked when they are sent: what does not arrive, or is not worked on, is lost.
    auto_ack: bool = False
    policy: dict[str, Any] | None = None
    start: Literal["", "earliest", "latest"] = ""


class QueueOpened(AnswerForm):
    #: What LEASE requests name; valid on this connection only.
    consumer: int
    topics: list[str]


class CloseQueue(CallForm, tag="queue.close"):
    """Ends a consumer; what it holds goes back at once (if it is not detached)."""

    consumer: int


# --- groups ------------------------------------------------------------------------------------------------------


class ConfigureQueue(CallForm, tag="queue.configure"):
    """Changes settings of a group, `paused` among them; the others stay as they are.  Answers with QueueSummary."""

    topic: str
    policy: dict[str, Any]
    group: str = "default"


class DeleteQueue(CallForm, tag="queue.delete"):
    topic: str
    group: str = "default"
    force: bool = False


class PurgeQueue(CallForm, tag="queue.purge"):
    """Settles everything that is in the queue now, leased messages too."""

    topic: str
    group: str = "default"


class Purged(AnswerForm):
    purged: int


class ListQueues(CallForm, tag="queue.list"):
    """Answers with a list of QueueSummary."""

    topic: str | None = None


class QueueSummary(AnswerForm):
    topic: str
    group: str
    #: Messages that are not settled: ready + leased + waiting.
    depth: int
    ready: int
    leased: int
    waiting: int
    consumers: int
    paused: bool
    #: Why the group cannot be opened now; nothing is counted then.
    failed: str | None = None


class DescribeQueue(CallForm, tag="queue.describe"):
    topic: str
    group: str = "default"


class QueuePartitionInfo(AnswerForm):
    partition: int
    depth: int
    ready: int
    leased: int
    waiting: int
    #: Everything below this offset is settled.
    settled_below: int
    end: int


class LaneInfo(AnswerForm):
    """One priority of a queue; `served` is counted since the broker started."""

    priority: int
    ready: int
    leased: int
    served: int
    last_served_ms: int


class ConsumerInfo(AnswerForm):
    consumer: int
    name: str
    client_id: str
    address: str
    detached: bool
    leased: int
    #: Messages asked for by LEASE requests that are waiting.
    requested: int
    delivered: int
    acked: int
    failed: int
    #: Mean time between delivery and ack.
    avg_ms: float


class QueueInfo(AnswerForm):
    topic: str
    group: str
    policy: dict[str, Any]
    depth: int
    ready: int
    leased: int
    waiting: int
    #: How many messages were settled since the group exists, by how: acked, dead, expired, evicted, purged, gone.
    settled: dict[str, int]
    #: Age of the oldest message that is not settled; 0 when there is none.
    oldest_ms: int
    partitions: list[QueuePartitionInfo]
    lanes: list[LaneInfo]
    consumers: list[ConsumerInfo]


# --- messages ----------------------------------------------------------------------------------------------------


class AttemptInfo(AnswerForm):
    """One delivery that did not succeed."""

    consumer: str
    delivered_ms: int
    ended_ms: int
    #: nack, timeout, reject or returned (its consumer went away).
    kind: str
    reason: str = ""


class LeaseMessages(CallForm, tag="queue.lease"):
    """A lease for doors that speak text.  Answers with a list of LeasedMessage.

    Names a topic and a group, and then the lease is detached; or a consumer of this session, whose lease it becomes.
    """

    topic: str = ""
    group: str = "default"
    consumer: int = 0
    max: int = 1
    #: Of the batches they are in, with one message at least; 0 = as much as an answer may hold.
    max_bytes: int = 0
    #: With more than this in hand, wait for some of it to be settled; 0 = no limit.
    max_in_flight: int = 0
    wait_ms: int = 0
    lease_ms: int = 0
    #: Of a detached lease; a consumer says it when it is opened.
    auto_ack: bool = False


class LeasedMessage(AnswerForm):
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
    priority: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] = []


class SettleItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    receipt: str
    action: Action = "ack"
    reason: str = ""
    #: nack: until the next try (None = by the retry policy); extend: from now (None = the lease's own length).
    delay_ms: int | None = None


class SettleMessages(CallForm, tag="queue.settle"):
    """Settles by receipt.  Answers with a list of SettleOutcome, one per item, in their order."""

    items: list[SettleItem]


class SettleOutcome(AnswerForm, omit_defaults=True):
    receipt: str
    result: Literal["done", "retried", "dead", "receipt_invalid", "gone"]
    #: With extend, when the lease ends, which may be earlier than was asked for; left out in all other cases.
    deadline_ms: int = 0


class ClaimMessages(CallForm, tag="queue.claim"):
    """Leases messages without sending them: the claimant reads them by their offsets.  Answers with Claim.

    The claim is this connection's, and what is not settled goes back at once when that ends.  `wanted` re-takes just
    these messages, as somebody does who has begun with them before; otherwise the queue says which ones are next.
    """

    topic: str
    group: str = "default"
    #: A name for people; the client's id if empty.
    claimant: str = ""
    #: Messages, 1,000,000 at most.  Of what is wanted all is taken.
    max: int = 100_000
    #: 0 = what the group or the topic says.
    lease_ms: int = 0
    wanted: list[Range] | None = None
    #: With `wanted`: when the group was made that they were claimed of.  Nothing is taken of another; 0 = of any.
    made_us: int = 0


class Claim(AnswerForm):
    #: What settles and extends it, on this connection; 0 when there is nothing in it.
    claim: int
    #: The consumer that holds the leases, as the group's description shows it.
    consumer: int
    messages: int
    #: Sorted, and as few as possible.
    ranges: list[Range]
    #: How long the claim lasts from now on; 0 when there is nothing in it.
    lease_ms: int
    #: Of what was wanted: settled already, no longer stored, or claimed of a group that is gone.
    settled: list[Range] = []
    #: Of what was wanted: in the hands of somebody else, or not there yet.
    refused: list[Range] = []
    #: When the group was made: one that was deleted and made again is another.  0 = not known.
    made_us: int = 0


class SettleClaim(CallForm, tag="queue.settle_claim"):
    """Says what became of claimed messages, of all that are left or of some.  Answers, on disk, with ClaimSettled."""

    claim: int
    action: ClaimAction = "ack"
    ranges: list[Range] | None = None
    reason: str = ""
    #: nack: until the next try (None = by the retry policy).
    delay_ms: int | None = None


class ClaimSettled(AnswerForm):
    #: Messages that were settled by this call, and those that the claim still holds.
    settled: int
    left: int
    #: Not the claim's any more, or never: their lease ended, and others may have them.  Acking twice is no mistake.
    invalid: list[Range] = []


class ExtendClaim(CallForm, tag="queue.extend_claim"):
    """Has a claim last longer, by the rules of leases.  Answers with ClaimExtended."""

    claim: int
    #: From now; 0 = as long as it was claimed for.
    lease_ms: int = 0


class ClaimExtended(AnswerForm):
    #: Messages that the claim still holds, and how long it lasts from now on.
    messages: int
    lease_ms: int


class PeekQueue(CallForm, tag="queue.peek"):
    """Looks at messages of a queue without leasing them.  Answers with a list of QueuedMessage, oldest first."""

    topic: str
    group: str = "default"
    state: Literal["", "ready", "leased", "waiting"] = ""
    limit: int = 10


class DescribeMessage(CallForm, tag="queue.message"):
    """Answers with a list of QueuedMessage: what the message is to each group of its topic, or to the one named."""

    id: str
    group: str | None = None


class QueuedMessage(AnswerForm):
    id: str
    topic: str
    group: str
    partition: int
    offset: int
    state: MessageState
    deliveries: int
    failures: int
    append_time_ms: int
    timestamp_ms: int
    priority: int
    #: Who holds the message, if it is leased.
    consumer: str = ""
    #: If leased, until when; if waiting, when it is due, 0 = never (set aside).
    until_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    attempts: list[AttemptInfo] = []
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes]] = []


class Explain(CallForm, tag="why"):
    """Why is this message, or anything of this queue, not delivered?  Names an id, or a topic and a group."""

    id: str = ""
    topic: str = ""
    group: str = ""


class Explanation(AnswerForm):
    #: One sentence for a person.
    sentence: str
    #: One word for a program.
    state: str
    facts: dict[str, Any] = {}
