"""The catalogue of metrics: what each is called, what it means, and where its value comes from.

The exposition, the reference page and the tests of dashboards and alerts all go by these lists.  Names follow
Prometheus: base units, `_total` for what only grows, one name for one thing whatever its labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from millstream.traffic.modes import Mode

__all__ = [
    "BROKER",
    "BUCKETS_SHOWN",
    "CONNECTIONS",
    "FOLDED",
    "HISTOGRAMS",
    "LANES",
    "MODES",
    "PIPELINES",
    "QUEUES",
    "STREAMS",
    "TOPICS",
    "Family",
    "all_families",
]

PREFIX: Final = "millstream_"
#: Histograms show the buckets of 2**i microseconds for these i: 64 us to 18 minutes.
BUCKETS_SHOWN: Final = range(6, 31)
MODES: Final[tuple[str, ...]] = get_args(Mode)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    #: Without the prefix, and without `_total`.
    stem: str
    kind: Kind
    #: One sentence.
    help: str
    #: The attribute that holds its value: of the counters, or of a row of the survey.
    source: str
    labels: tuple[str, ...] = ()
    #: The value is this many times the source: milliseconds become seconds.
    scale: float = 1.0

    @property
    def base_name(self) -> str:
        return PREFIX + self.stem

    @property
    def name(self) -> str:
        return self.base_name + ("_total" if self.kind == "counter" else "")


def _counter(stem: str, source: str, text: str, *labels: str, scale: float = 1.0) -> Family:
    return Family(stem, "counter", text, source, labels, scale)


def _gauge(stem: str, source: str, text: str, *labels: str, scale: float = 1.0) -> Family:
    return Family(stem, "gauge", text, source, labels, scale)


_TOPIC: Final = ("namespace", "topic")
_GROUP: Final = ("namespace", "topic", "group")
_PIPELINE: Final = ("namespace", "pipeline")
_MS: Final = 0.001

#: Of the whole broker; sources are counters (broker/metrics.py) or what the exposition adds to them.
BROKER: Final = (
    _gauge("start_time_seconds", "started_ms", "When the broker started, in seconds since 1970.", scale=_MS),
    _gauge("namespaces", "namespaces", "Namespaces that exist."),
    _gauge("topics", "topics", "Topics that exist."),
    _gauge("partitions", "partitions", "Partitions that exist."),
    _gauge(
        "partitions_cold", "partitions_cold", "Partitions that nobody has used since the start; they are in no sum."
    ),
    _counter("connections_opened", "connections_opened", "Connections that were accepted."),
    _counter("connections_refused", "connections_refused", "Connections that were turned away."),
    _counter("requests_failed", "requests_failed", "Requests that were answered with an error."),
    _counter("protocol_errors", "protocol_errors", "Connections closed because of what they sent."),
    _counter("published_batches", "batches_published", "Batches that were stored."),
    _counter("duplicates", "duplicates", "Batches that were stored already and only confirmed again."),
    _counter("publish_failures", "publish_failures", "Batches that could not be stored."),
    _counter("fetches", "fetches", "Answers sent to stream readers."),
    _counter("fetched_bytes", "bytes_fetched", "Bytes sent to stream readers."),
    _counter("files_synced", "files_synced", "Files that were synced to disk with fsync."),
    _counter("segments_deleted", "segments_deleted", "Log files removed by retention."),
    _counter("compactions", "compactions", "Partitions that were compacted."),
    _counter("rebalances", "rebalances", "New generations of stream groups."),
    _counter("offsets_committed", "offsets_committed", "Offsets that stream groups have committed."),
    _counter("leases_granted", "leases_granted", "Leases of queue messages, each of one message or many."),
    _counter("leases_expired", "leases_expired", "Leases that ended because nobody settled in time."),
    _counter("leases_returned", "leases_returned", "Leases that came back because their consumer went away."),
    _counter(
        "settles_refused", "settles_refused", "Acks and nacks that were refused: too late, or from somebody else."
    ),
    _counter("released", "messages_released", "Leased messages that were given back unused."),
    _counter("evicted", "messages_evicted", "Messages removed from a full queue to make room for newer ones."),
    _counter("purged", "messages_purged", "Messages removed by purging a queue."),
    _gauge("subscriptions", "subscriptions", "Subscriptions and inboxes that are open."),
    _gauge("patterns", "patterns", "Patterns that are subscribed to."),
    _counter("pushed", "messages_delivered", "Messages sent to subscribers."),
    _counter("missed", "messages_missed", "Messages that subscribers missed because they were too slow."),
    _counter(
        "publishes_throttled", "publishes_throttled", "Publishes delayed or refused because consumers are behind."
    ),
    _counter("publishes_refused", "publishes_refused", "Publishes refused because a queue is full."),
    _counter("mode_changes", "mode_changes", "Changes of the broker's mode."),
    _counter("dead_letters_replayed", "dead_letters_replayed", "Dead letters that were published again."),
    _counter("dead_letters_purged", "dead_letters_purged", "Dead letters that were removed."),
    _counter("dead_letter_alerts_sent", "dead_letter_alerts_sent", "Alerts about dead letters that arrived."),
    _counter(
        "dead_letter_alerts_failed", "dead_letter_alerts_failed", "Alerts about dead letters that did not arrive."
    ),
    _counter("webhook_deliveries", "webhook_deliveries", "Messages that receivers of webhooks have accepted."),
    _counter("webhook_failures", "webhook_failures", "Requests of webhooks that failed."),
    _counter("webhook_dead", "webhook_messages_dead", "Messages that webhooks have given up on."),
    _counter("keys_refused", "keys_refused", "Requests and connections with a key that is not valid."),
    _counter("requests_forbidden", "requests_forbidden", "Requests that their key does not allow."),
    _counter("requests_limited", "requests_limited", "Requests refused because their address or key exceeds its rate."),
    _counter("trace_events_recorded", "trace_events_recorded", "Records made of what happened to messages."),
    _counter(
        "trace_events_dropped",
        "trace_events_dropped",
        "Records that were dropped: too many of them, or a failing disk.",
    ),
    _counter("quota_refusals", "quota_refusals", "Requests refused because of the quota of their namespace."),
    _counter("audit_entries", "audit_entries", "Administrative actions that were written to the audit log."),
    _gauge("mqtt_connected", "mqtt_connected", "MQTT clients that are connected."),
    _gauge("mqtt_connected_max", "mqtt_connected_max", "The most MQTT clients that were connected at the same time."),
    _gauge("mqtt_subscriptions", "mqtt_subscriptions", "Subscriptions of MQTT sessions."),
    _counter("mqtt_connections", "mqtt_connections", "Connections of MQTT clients that were accepted."),
    _counter("mqtt_received", "mqtt_received", "Messages that MQTT clients have published."),
    _counter("mqtt_sent", "mqtt_sent", "Messages that were sent to MQTT clients."),
    _counter("mqtt_dropped", "mqtt_dropped", "Messages that MQTT clients were too slow for, or that were refused."),
    _counter("mqtt_packets_received", "mqtt_packets_received", "Packets of every kind from MQTT clients."),
    _counter("mqtt_packets_sent", "mqtt_packets_sent", "Packets of every kind to MQTT clients."),
    _counter("mqtt_received_bytes", "mqtt_bytes_received", "Bytes from MQTT clients."),
    _counter("mqtt_sent_bytes", "mqtt_bytes_sent", "Bytes to MQTT clients."),
    _gauge("mqtt_sessions", "mqtt_sessions", "Sessions of MQTT clients, connected or remembered."),
    _gauge("mqtt_retained", "mqtt_retained", "Retained messages of MQTT."),
    _gauge(
        "mqtt_retained_bytes", "mqtt_retained_bytes", "Bytes of retained messages, with their topics and properties."
    ),
    _gauge("stages", "stages", "Stages that are open: messages that wait to be published all at once."),
    _gauge("stages_bytes", "stages_bytes", "Bytes of the messages in open stages."),
    _gauge("stage_queries", "stage_queries", "Queries whose last published batch is remembered."),
    _counter("stages_opened", "stages_opened", "Stages that were opened."),
    _counter("stages_aborted", "stages_aborted", "Stages that were given up."),
    _counter("stages_expired", "stages_expired", "Stages that expired because nobody came back for them."),
    _counter("staged", "staged_messages", "Messages that were put into stages."),
    _counter("staged_bytes", "staged_bytes", "Bytes that were put into stages."),
    _counter("stage_batches_published", "stage_batches_published", "Batches of queries that were published."),
    _counter("stage_published", "stage_messages_published", "Messages that were published from stages."),
    _counter("stage_batches_repeated", "stages_repeated", "Repeated publishes of batches that were published already."),
    _gauge("memory_bytes", "memory_bytes", "Memory that the broker uses."),
    _gauge("disk_free_bytes", "disk_free_bytes", "Free space on the disk of the data directory."),
    _gauge("journal_bytes", "journal_bytes", "Bytes of the journals beside partitions."),
    _gauge("history_bytes", "history_bytes", "Memory that the history of the metrics takes."),
    _counter("scrapes", "scrapes", "How often these metrics were asked for."),
)

TOPICS: Final = (
    _counter("published", "published", "Messages stored.", *_TOPIC),
    _counter("published_bytes", "published_bytes", "Bytes stored.", *_TOPIC),
    _counter("consumed", "consumed", "Messages handed out to streams, queues and subscribers.", *_TOPIC),
    _gauge(
        "messages",
        "messages",
        "Messages in the log, counted by offsets: those that compaction removed count, too.",
        *_TOPIC,
    ),
    _gauge("log_bytes", "log_bytes", "Bytes of the log.", *_TOPIC),
    _gauge("damaged", "damaged", "Offsets of the log that can no longer be read.", *_TOPIC),
    _gauge("scheduled", "scheduled", "Scheduled messages that wait for their time.", *_TOPIC),
    _gauge(
        "dead_letters", "dead_letters", "Dead letters in a dead letter topic, neither replayed nor purged.", *_TOPIC
    ),
    _gauge("throttle_delay_seconds", "throttle_ms", "How long publishers are made to wait.", *_TOPIC, scale=_MS),
)

QUEUES: Final = (
    _gauge("ready", "ready", "Messages of a queue that can be leased.", *_GROUP),
    _gauge("inflight", "leased", "Messages of a queue that are leased.", *_GROUP),
    _gauge("waiting", "waiting", "Messages of a queue that wait for their next try.", *_GROUP),
    _gauge("oldest_unsettled_age_seconds", "oldest_ms", "Age of the oldest unsettled message.", *_GROUP, scale=_MS),
    _gauge("active_consumers", "consumers", "Consumers of a queue.", *_GROUP),
    _gauge("paused", "paused", "1 while a queue is paused.", *_GROUP),
    _counter("delivered", "delivered", "Messages of a queue that were leased.", *_GROUP),
    _counter("redelivered", "redelivered", "Messages of a queue that were leased and had been leased before.", *_GROUP),
    _counter("acked", "acked", "Messages of a queue that were acked.", *_GROUP),
    _counter("nacked", "nacked", "Messages of a queue that were nacked.", *_GROUP),
    _counter("rejected", "rejected", "Messages of a queue that were rejected.", *_GROUP),
    _counter("timed_out", "timed_out", "Messages of a queue whose lease ran out.", *_GROUP),
    _counter("dead_lettered", "dead", "Messages that a queue has given up on.", *_GROUP),
    _counter("expired", "expired", "Messages of a queue that expired.", *_GROUP),
    _counter("removed_unsettled", "removed", "Messages that retention removed before a queue settled them.", *_GROUP),
)

#: Shown for queues in which somebody has used priorities.
LANES: Final = (
    _gauge("lane_ready", "ready", "Messages of a priority that can be leased.", *_GROUP, "lane"),
    _gauge("lane_inflight", "leased", "Messages of a priority that are leased.", *_GROUP, "lane"),
    _counter("lane_delivered", "served", "Messages of a priority that were leased.", *_GROUP, "lane"),
)

STREAMS: Final = (
    _gauge("group_lag", "lag", "Messages that a stream group has not committed yet, counted by offsets.", *_GROUP),
    _gauge(
        "group_lag_seconds",
        "oldest_ms",
        "Age of the oldest message that a stream group has not committed yet.",
        *_GROUP,
        scale=_MS,
    ),
    _gauge("group_members", "members", "Members of a stream group.", *_GROUP),
    _gauge("group_rebalancing", "rebalancing", "1 while partitions move between members.", *_GROUP),
)

#: As their runners report them.
PIPELINES: Final = (
    _gauge("pipeline_up", "up", "1 while a pipeline runs and reports.", *_PIPELINE),
    _gauge("pipeline_rows", "rows", "Rows that a pipeline has read in this run.", *_PIPELINE),
    _gauge("pipeline_rows_per_second", "rows_per_s", "Rows per second that a pipeline reads now.", *_PIPELINE),
    _gauge("pipeline_lag", "lag", "Messages in its sources that a pipeline has not read.", *_PIPELINE),
    _gauge("pipeline_batch", "batch", "The number of the last micro-batch of a pipeline's run.", *_PIPELINE),
    _gauge("pipeline_batch_seconds", "batch_ms", "How long the last micro-batch took.", *_PIPELINE, scale=_MS),
    _gauge("pipeline_restarts", "restarts", "How often a run was restarted after a failure.", *_PIPELINE),
    _gauge("pipeline_silent_seconds", "silent_ms", "Time since a pipeline last reported.", *_PIPELINE, scale=_MS),
)

HISTOGRAMS: Final = (
    Family("publish_seconds", "histogram", "Time from arrival to confirmation, per message.", "publish"),
    Family("fsync_seconds", "histogram", "Time of one round of syncing files to disk.", "fsync"),
    Family("processing_seconds", "histogram", "Time from lease to ack, per message.", "processing"),
    Family(
        "end_to_end_seconds",
        "histogram",
        "Time from append to delivery, per message: the first one to queues, each one to others.",
        "to_",
        ("kind",),
    ),
    Family(
        "rebalance_seconds", "histogram", "Time until a stream group's partitions are where they belong.", "rebalance"
    ),
    Family(
        "http_request_seconds",
        "histogram",
        "Time of HTTP requests, including the waiting of long polls.",
        "http",
        ("family",),
    ),
)

BUILD: Final = Family(
    "build_info", "gauge", "Always 1; the labels say which version and which node.", "", ("version", "node")
)
MODE: Final = Family("mode", "gauge", "1 for the mode that the broker is in.", "", ("mode",))
CONNECTIONS: Final = Family(
    "connections", "gauge", "Clients that are connected, by the door they came through.", "", ("door",)
)
FOLDED: Final = Family(
    "series_folded",
    "gauge",
    "How many topics and groups beyond metrics.series_max are summed up as `_other`.",
    "",
    ("of",),
)


def all_families() -> list[tuple[str, tuple[Family, ...]]]:
    """Every metric, under the headings of the reference."""
    return [
        ("Broker", (BUILD, MODE, CONNECTIONS, *BROKER, FOLDED)),
        ("Topics", TOPICS),
        ("Queues", QUEUES),
        ("Priorities", LANES),
        ("Stream groups", STREAMS),
        ("Pipelines", PIPELINES),
        ("Latencies", HISTOGRAMS),
    ]
