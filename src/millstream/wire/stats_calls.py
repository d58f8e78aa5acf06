"""Calls about how the broker is doing: now, since the start, and over the last month."""

from __future__ import annotations

from msgspec import field

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "DescribeOverview",
    "GroupStanding",
    "History",
    "HistoryPoint",
    "Metrics",
    "MetricsText",
    "Overview",
    "Rates",
    "ReadHistory",
    "TopicActivity",
    "Totals",
]


class DescribeOverview(CallForm, tag="stats.overview"):
    """Everything that matters, from memory.  Answers with Overview."""

    #: Topics and groups that are listed: those with most traffic, those that are furthest behind.
    limit: int = 10
    #: All namespaces instead of the connection's own.
    everywhere: bool = False


class Rates(AnswerForm):
    """Per second, over the last few seconds."""

    published: float = 0.0
    published_bytes: float = 0.0
    #: Handed out to streams, queues and subscribers.
    consumed: float = 0.0
    acked: float = 0.0
    #: Nacked, rejected, or not settled in time.
    failed: float = 0.0
    dead_lettered: float = 0.0


class Totals(AnswerForm):
    """Counts since the broker started, over the topics that exist; those of a deleted topic go with it."""

    published: int = 0
    published_bytes: int = 0
    consumed: int = 0
    acked: int = 0
    failed: int = 0
    dead_lettered: int = 0


class TopicActivity(AnswerForm):
    namespace: str
    topic: str
    published_rate: float
    consumed_rate: float
    messages: int
    size_bytes: int
    #: Unsettled messages in the queue group that has the most.
    depth: int
    leased: int
    waiting: int
    scheduled: int
    #: By how much its publishers are slowed down.
    throttle_ms: int


class GroupStanding(AnswerForm):
    namespace: str
    topic: str
    group: str
    #: `queue` or `stream`.
    kind: str
    #: Messages that are not settled, or not committed.
    lag: int
    #: Age of the oldest of these messages; 0 if there is none.
    oldest_ms: int
    leased: int
    #: Consumers of a queue group, or members of a stream group.
    consumers: int
    #: `paused`, `rebalancing`, `idle` (it is behind and nobody reads), `active`, or `caught up`.
    state: str


class Overview(AnswerForm):
    """Sums are over the topics of the namespace, or of all namespaces; mode, memory and so on are the broker's."""

    time_ms: int
    #: Empty if the answer is about all namespaces.
    namespace: str
    software: str
    node_id: str
    uptime_ms: int
    mode: str
    reason: str
    rates: Rates
    totals: Totals
    namespaces: int
    topics: int
    partitions: int
    #: Partitions that nobody has used since the start; no sum includes what is in them.
    cold_partitions: int
    queue_groups: int
    stream_groups: int
    #: Messages in all logs.
    messages: int
    depth: int
    ready: int
    leased: int
    waiting: int
    #: Age of the oldest message that a queue group has not settled.
    oldest_ms: int
    scheduled: int
    dead_letters: int
    consumers: int
    connections: int
    subscriptions: int
    throttled_topics: int
    memory_bytes: int
    disk_free_bytes: int
    log_bytes: int
    #: Over the last few seconds; 0 if nothing was published.
    publish_p99_ms: float
    #: Over the last few seconds.
    end_to_end_p99_ms: float
    #: Over the last few seconds.
    fsync_p99_ms: float
    busiest: list[TopicActivity] = field(default_factory=list)
    furthest_behind: list[GroupStanding] = field(default_factory=list)


class ReadHistory(CallForm, tag="stats.history"):
    """How a number came to be what it is.  Answers with History.

    The last hour is kept every 5 seconds, the last day every minute, the last month every quarter of an hour.
    """

    metric: str
    #: For numbers of a topic or of a group on a topic: of a queue group, or of a stream group where none has the name.
    topic: str = ""
    group: str = ""
    #: 0 = an hour before the end, and now.
    from_ms: int = 0
    until_ms: int = 0
    #: At most so many; neighbours are joined.
    points: int = 300


class HistoryPoint(AnswerForm):
    """What was measured from `time_ms` on, for `step_ms`.  There is no point for a time without measurements."""

    time_ms: int
    avg: float
    min: float
    max: float


class History(AnswerForm):
    metric: str
    #: `messages`, `messages/s`, `bytes`, `bytes/s`, `ms` or nothing.
    unit: str
    topic: str
    group: str
    from_ms: int
    until_ms: int
    step_ms: int
    points: list[HistoryPoint]


class Metrics(CallForm, tag="stats.metrics"):
    """What `/metrics` answers, for those who have no HTTP.  Answers with MetricsText."""

    #: As in the HTTP header: `application/openmetrics-text` or the older text format.
    accept: str = ""


class MetricsText(AnswerForm):
    media_type: str
    text: str
