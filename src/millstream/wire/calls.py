"""The requests that are JSON, and their answers: the union `Call` at the end *is* the control protocol.

A call is a JSON object whose `op` names it.  Names of topics and groups are those of the connection's namespace.  Here
are the calls about topics, producers and stream groups; other families have modules of their own.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from millstream.wire import (
    access_calls,
    admin_calls,
    letter_calls,
    message_calls,
    mqtt_calls,
    pipeline_calls,
    queue_calls,
    schedule_calls,
    stage_calls,
    stats_calls,
    subscription_calls,
    trace_calls,
    webhook_calls,
)
from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "AlterTopic",
    "Assignment",
    "Call",
    "CommitOffsets",
    "CommittedOffsets",
    "CreateNamespace",
    "CreateTopic",
    "DeleteGroup",
    "DeleteNamespace",
    "DeleteTopic",
    "DescribeBroker",
    "DescribeGroup",
    "DescribeTopic",
    "EvictMember",
    "GroupInfo",
    "GroupLag",
    "GroupSummary",
    "HeartbeatGroup",
    "JoinGroup",
    "LeaveGroup",
    "ListGroups",
    "ListNamespaces",
    "ListOffsets",
    "ListTopics",
    "MemberInfo",
    "Metadata",
    "NewProducer",
    "OffsetEntry",
    "PartitionInfo",
    "PauseGroup",
    "ProducerIdentity",
    "RebalanceGroup",
    "ResetOffsets",
    "TopicInfo",
    "TopicMetadata",
    "TopicPartitions",
]


# --- broker and namespaces ---------------------------------------------------------------------------------------


class DescribeBroker(CallForm, tag="broker.describe"):
    """Answers with a JSON object: version, node, uptime, mode, counters."""


class CreateNamespace(CallForm, tag="namespace.create"):
    name: str


class DeleteNamespace(CallForm, tag="namespace.delete"):
    name: str
    force: bool = False


class ListNamespaces(CallForm, tag="namespace.list"):
    """Answers with a list of names."""


# --- topics ------------------------------------------------------------------------------------------------------


class CreateTopic(CallForm, tag="topic.create"):
    name: str
    partitions: int = 1
    config: dict[str, Any] = {}
    if_missing: bool = False


class DescribeTopic(CallForm, tag="topic.describe"):
    name: str


class ListTopics(CallForm, tag="topic.list"):
    """Answers with a list of TopicInfo without partitions, sorted by name, at most `limit` after `after`."""

    pattern: str | None = None
    after: str = ""
    limit: int = 1000


class AlterTopic(CallForm, tag="topic.alter"):
    name: str
    config: dict[str, Any] = {}
    partitions: int | None = None


class DeleteTopic(CallForm, tag="topic.delete"):
    name: str
    force: bool = False


class PartitionInfo(AnswerForm):
    partition: int
    start_offset: int
    next_offset: int
    high_watermark: int
    size_bytes: int
    segments: int
    damaged_ranges: list[tuple[int, int]] = []
    failed: str | None = None
    #: No power cut takes what lies before this offset; None in memory, where a restart takes everything.
    durable_offset: int | None = None


class TopicInfo(AnswerForm):
    name: str
    partition_count: int
    created_ms: int
    config: dict[str, Any]
    partitions: list[PartitionInfo] = []


class Metadata(CallForm, tag="topic.metadata"):
    """What a client must know to publish and fetch.  With `create`, missing topics are made if the broker may.

    Whoever is about to publish says what its messages need, and no topic is made that would refuse them.
    """

    topics: list[str]
    create: bool = False
    #: Of the largest message.
    message_bytes: int = 0
    #: The highest that a message asks for.
    partition: int = 0
    #: Whether a message has one.
    dedup_id: bool = False


class TopicMetadata(AnswerForm):
    name: str
    #: One uid per partition: the part of message ids that says where a message is.
    partition_uids: list[int]
    max_message_bytes: int


class ListOffsets(CallForm, tag="topic.offsets"):
    """Answers with one OffsetEntry for each partition asked for (all of them if none is named).

    `durable` is the end after a sync: no power cut takes what lies before it.  `epoch` is where that ends which was
    stored up to an epoch: what was read of the log in that epoch and lies behind it is not there any more.
    """

    topic: str
    at: Literal["earliest", "latest", "durable", "timestamp", "epoch"] = "latest"
    timestamp_ms: int | None = None
    epoch: int | None = None
    partitions: list[int] | None = None


class OffsetEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    topic: str
    partition: int
    offset: int
    metadata: str = ""


# --- producers ---------------------------------------------------------------------------------------------------


class NewProducer(CallForm, tag="producer.new"):
    """Answers with an identity that no producer had before."""


class ProducerIdentity(AnswerForm):
    producer_id: int
    epoch: int


# --- groups ------------------------------------------------------------------------------------------------------


class TopicPartitions(msgspec.Struct, kw_only=True):
    topic: str
    partitions: list[int]


class JoinGroup(CallForm, tag="group.join"):
    """`start`: where the group begins with what it has never subscribed to before.

    With `latest` the ends of the partitions that exist become its positions; those made later have none, and are read
    from their first message.
    """

    group: str
    topics: list[str]
    member_id: str = ""
    instance_id: str | None = None
    strategy: Literal["range", "round_robin", "sticky"] = "sticky"
    protocol: Literal["cooperative", "eager"] = "cooperative"
    session_ms: int = 30_000
    rebalance_ms: int = 120_000
    start: Literal["earliest", "latest"] = "earliest"


class HeartbeatGroup(CallForm, tag="group.heartbeat"):
    """`owned` is what the member holds now; leaving out what it was told to give up releases it.

    With the instance id under which it has joined, a member whose place another process has taken is told so
    (MemberFenced); without, that it is unknown.
    """

    group: str
    member_id: str
    generation: int
    owned: list[TopicPartitions]
    instance_id: str | None = None


class Assignment(AnswerForm):
    """The answer to join and heartbeat: what the member may hold now.  It gives up whatever it holds beyond that."""

    member_id: str
    generation: int
    partitions: list[TopicPartitions]
    #: Held by others still; the member will get these.
    pending: list[TopicPartitions] = []


class LeaveGroup(CallForm, tag="group.leave"):
    group: str
    member_id: str
    instance_id: str | None = None


class CommitOffsets(CallForm, tag="group.commit"):
    """Without a member id only for groups that have no members."""

    group: str
    offsets: list[OffsetEntry]
    member_id: str = ""
    generation: int = 0
    instance_id: str | None = None
    #: In which the messages were read: what a power cut has taken of them since then is not committed.
    epoch: int | None = None


class CommittedOffsets(CallForm, tag="group.committed"):
    """Answers with a list of OffsetEntry: those of the named topics, or all."""

    group: str
    topics: list[str] | None = None


class ListGroups(CallForm, tag="group.list"):
    """Answers with a list of GroupSummary."""


class GroupSummary(AnswerForm):
    name: str
    state: str
    members: int
    topics: list[str]
    generation: int
    paused: bool = False


class DescribeGroup(CallForm, tag="group.describe"):
    name: str


class MemberInfo(AnswerForm):
    member_id: str
    client_id: str
    address: str
    instance_id: str | None
    topics: list[str]
    partitions: list[TopicPartitions]
    last_heartbeat_ms_ago: int


class GroupLag(AnswerForm):
    topic: str
    partition: int
    committed: int | None
    end: int
    #: Messages between the committed offset (or the start of the log) and the end.
    lag: int
    #: Age of the oldest message not yet committed; 0 when there is none.
    lag_ms: int
    member_id: str | None = None
    #: Why the partition cannot be opened now; then its end and lag are not known, and given as 0.
    failed: str | None = None


class GroupInfo(AnswerForm):
    name: str
    state: str
    generation: int
    strategy: str
    protocol: str
    members: list[MemberInfo]
    lag: list[GroupLag]
    paused: bool = False


class ResetOffsets(CallForm, tag="group.reset"):
    """Moves an idle group.  Answers with the list of OffsetEntry it set (or would set)."""

    group: str
    topic: str
    to: Literal["earliest", "latest", "timestamp", "offset", "shift"]
    value: int | None = None
    partitions: list[int] | None = None
    dry_run: bool = False


class DeleteGroup(CallForm, tag="group.delete"):
    name: str


class EvictMember(CallForm, tag="group.evict"):
    group: str
    member_id: str


class RebalanceGroup(CallForm, tag="group.rebalance"):
    """Deals the partitions anew, whoever has them now, in a new generation.  Answers with GroupSummary."""

    name: str


class PauseGroup(CallForm, tag="group.pause"):
    """Takes all partitions back from the members, which stay, or deals them out again.  Answers with GroupSummary."""

    name: str
    paused: bool = True


Call: TypeAlias = (
    DescribeBroker
    | CreateNamespace
    | DeleteNamespace
    | ListNamespaces
    | CreateTopic
    | DescribeTopic
    | ListTopics
    | AlterTopic
    | DeleteTopic
    | Metadata
    | ListOffsets
    | NewProducer
    | JoinGroup
    | HeartbeatGroup
    | LeaveGroup
    | CommitOffsets
    | CommittedOffsets
    | ListGroups
    | DescribeGroup
    | ResetOffsets
    | DeleteGroup
    | EvictMember
    | RebalanceGroup
    | PauseGroup
    | queue_calls.OpenQueue
    | queue_calls.CloseQueue
    | queue_calls.ConfigureQueue
    | queue_calls.DeleteQueue
    | queue_calls.PurgeQueue
    | queue_calls.ListQueues
    | queue_calls.DescribeQueue
    | queue_calls.LeaseMessages
    | queue_calls.SettleMessages
    | queue_calls.ClaimMessages
    | queue_calls.SettleClaim
    | queue_calls.ExtendClaim
    | queue_calls.PeekQueue
    | queue_calls.DescribeMessage
    | queue_calls.Explain
    | schedule_calls.ListSchedules
    | schedule_calls.DescribeSchedule
    | schedule_calls.CancelSchedules
    | schedule_calls.MoveSchedule
    | schedule_calls.ScheduleStats
    | schedule_calls.Repeat
    | schedule_calls.ListRepeating
    | schedule_calls.DescribeRepeating
    | schedule_calls.PauseRepeating
    | schedule_calls.DeleteRepeating
    | subscription_calls.OpenSubscription
    | subscription_calls.CloseSubscription
    | subscription_calls.OpenInbox
    | subscription_calls.DescribeFlow
    | subscription_calls.SetMode
    | letter_calls.ListLetters
    | letter_calls.ShowLetter
    | letter_calls.CountLetters
    | letter_calls.PurgeLetters
    | letter_calls.ReplayLetters
    | letter_calls.ListReplays
    | letter_calls.ShowReplay
    | letter_calls.AbortReplay
    | stats_calls.DescribeOverview
    | stats_calls.ReadHistory
    | stats_calls.Metrics
    | webhook_calls.CreateWebhook
    | webhook_calls.ListWebhooks
    | webhook_calls.DescribeWebhook
    | webhook_calls.UpdateWebhook
    | webhook_calls.PauseWebhook
    | webhook_calls.RotateSecret
    | webhook_calls.DeleteWebhook
    | webhook_calls.TestWebhook
    | message_calls.BrowseMessages
    | message_calls.FindMessage
    | message_calls.SummarizeTopics
    | mqtt_calls.DescribeMqtt
    | mqtt_calls.ListSessions
    | mqtt_calls.ShowSession
    | mqtt_calls.DisconnectSession
    | mqtt_calls.ForgetSession
    | mqtt_calls.ListRetained
    | mqtt_calls.ShowRetained
    | mqtt_calls.ClearRetained
    | stage_calls.OpenStage
    | stage_calls.PublishStages
    | stage_calls.AbortStages
    | stage_calls.ListStages
    | pipeline_calls.ReportPipeline
    | pipeline_calls.ListPipelines
    | pipeline_calls.ShowPipeline
    | pipeline_calls.StopPipeline
    | pipeline_calls.ForgetPipeline
    | admin_calls.CheckHealth
    | admin_calls.ShowConfig
    | admin_calls.SetLogLevel
    | admin_calls.Checkpoint
    | admin_calls.Compact
    | admin_calls.HoldFiles
    | admin_calls.ReleaseFiles
    | admin_calls.ListConnections
    | admin_calls.Disconnect
    | access_calls.CreateKey
    | access_calls.ListKeys
    | access_calls.RotateKey
    | access_calls.RevokeKey
    | access_calls.SetQuota
    | access_calls.ShowQuota
    | access_calls.ListAudit
    | trace_calls.ShowPassport
    | trace_calls.FindTraces
)
