"""The sections of the broker's settings: what each is called, what it may be, and what it is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from millstream.names import NAMESPACE_EXPRESSION

__all__ = [
    "AccessSettings",
    "GroupSettings",
    "HttpSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "MqttSettings",
    "ScheduleSettings",
    "Section",
    "ServerSettings",
    "StorageRule",
    "StorageSettings",
    "TlsSettings",
    "TopicSettings",
    "TraceSettings",
    "WebhookSettings",
    "parse_bytes",
    "parse_duration_ms",
]

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_GIB: Final = 1024 * _MIB
_SECOND_MS: Final = 1000
_HOUR_MS: Final = 3600 * _SECOND_MS
_DAY_MS: Final = 24 * _HOUR_MS

_SIZE_UNITS: Final = {
    "": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": _KIB, "mib": _MIB, "gib": _GIB, "tib": 1024 * _GIB,
}  # fmt: skip
_DURATION_UNITS: Final = {
    "": 1, "ms": 1, "s": _SECOND_MS, "m": 60 * _SECOND_MS, "min": 60 * _SECOND_MS,
    "h": _HOUR_MS, "d": _DAY_MS, "w": 7 * _DAY_MS,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)")
#: An MQTT topic filter without commas: wildcards are whole levels, and `#` is the last.
_TOPIC_FILTER: Final = re.compile(r"(?:(?:\+|[^/+#,]*)/)*(?:\+|#|[^/+#,]*)")


def parse_bytes(value: object) -> object:
    """A size as a number of bytes: `64MiB`, `10 GB`, `4096`.  What is not such a text is returned as it came."""
    return _parse_quantity(value, _SIZE_UNITS)


def parse_duration_ms(value: object) -> object:
    """A duration in milliseconds: `30s`, `5m`, `7d`, `1500`.  What is not such a text is returned as it came."""
    return _parse_quantity(value, _DURATION_UNITS)


def _parse_quantity(value: object, units: Mapping[str, int]) -> object:
    if not isinstance(value, str) or (match := _QUANTITY.fullmatch(value.strip())) is None:
        return value
    number, unit = match[1].replace("_", ""), units.get(match[2].lower())
    if unit is None:
        return value
    try:
        amount = float(number) * unit if "." in number else int(number) * unit
        return int(amount) if amount == int(amount) else value
    except (OverflowError, ValueError):  # hundreds of digits
        return value


_Bytes = Annotated[int, BeforeValidator(parse_bytes)]
_Millis = Annotated[int, BeforeValidator(parse_duration_ms)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Section):
    """Where the broker listens, and what one connection may cost it."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on. The default serves only this machine."
    )
    port: int = Field(default=9092, ge=0, le=65_535, description="Port of the native protocol; 0 picks any free port.")
    max_connections: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Connections beyond this number are turned away."
    )
    frame_bytes_max: _Bytes = Field(
        default=10 * _MIB, ge=64 * _KIB, le=_GIB, description="The largest request or answer; a batch cannot be larger."
    )
    connection_memory_bytes: _Bytes = Field(
        default=32 * _MIB,
        ge=64 * _KIB,
        le=16 * _GIB,
        description="Memory for the waiting answers of one connection. Beyond it, nothing is read from the connection.",
    )
    memory_bytes_warning: _Bytes = Field(
        default=0,
        ge=0,
        le=1024 * _GIB,
        description="Memory of the whole broker above which it slows publishers down; 0 = no check.",
    )
    memory_bytes_critical: _Bytes = Field(
        default=0,
        ge=0,
        le=1024 * _GIB,
        description="Memory above which the broker takes neither messages nor new connections; 0 = no check.",
    )
    heartbeat_ms: _Millis = Field(
        default=30_000,
        ge=100,
        le=_HOUR_MS,
        description="A connection that is silent for this long has missed one heartbeat.",
    )
    heartbeat_misses: int = Field(
        default=3, ge=1, le=100, description="Missed heartbeats after which a connection is closed."
    )
    drain_ms: _Millis = Field(
        default=10_000,
        ge=0,
        le=_HOUR_MS,
        description="Time that running requests have to finish when the broker stops.",
    )
    backlog: int = Field(default=512, ge=1, le=65_535, description="Connections that may wait to be accepted.")
    stay_awake_us: int = Field(
        default=300,
        ge=0,
        le=100_000,
        description="How long (µs) the broker stays awake for the next request of a client that sends one after the "
        "other; twice as long while that client waits for the disk. 0 = it never stays awake.",
    )


class HttpSettings(Section):
    """The HTTP door: API, WebSocket, dashboard and metrics."""

    enabled: bool = Field(default=True, description="Whether the broker answers HTTP at all.")
    port: int = Field(default=8080, ge=0, le=65_535, description="Port of HTTP; 0 picks any free port.")
    keep_alive_ms: _Millis = Field(
        default=75_000, ge=1000, le=_HOUR_MS, description="An idle HTTP connection is closed after this time."
    )
    request_ms: _Millis = Field(
        default=30_000,
        ge=100,
        le=_HOUR_MS,
        description="Time that a client has to send the head of a request, and as long again for the body.",
    )


class StorageRule(NamedTuple):
    """Whether what is published to the MQTT topics of a filter is stored."""

    filter: str
    store: Literal["auto", "always", "never"]


def _storage_rules(text: str) -> tuple[StorageRule, ...]:
    """`debug/#=never, orders/#=always` as rules.  Raises ValueError."""
    rules = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        topics, _, store = part.rpartition("=")
        if not topics or _TOPIC_FILTER.fullmatch(topics) is None or store not in ("auto", "always", "never"):
            raise ValueError(f"{part!r} is not FILTER=auto, FILTER=always or FILTER=never")
        rules.append(StorageRule(topics, cast(Literal["auto", "always", "never"], store)))
    return tuple(rules)


def _checked_storage_rules(text: str) -> str:
    _storage_rules(text)
    return text


class MqttSettings(Section):
    """The MQTT door: 3.1.1 and 5, over TCP and, at `/mqtt` of the HTTP port, over WebSocket."""

    enabled: bool = Field(default=True, description="Whether the broker speaks MQTT at all.")
    port: int = Field(default=1883, ge=0, le=65_535, description="Port of MQTT; 0 picks any free port.")
    namespace: str = Field(
        default="default",
        pattern=f"^{NAMESPACE_EXPRESSION}$",
        examples=["a namespace: 1 to 64 lower-case letters, digits and '-'"],
        description="The namespace of clients whose user name does not name one, as `team-a:device-7` does.",
    )
    storage: Annotated[str, AfterValidator(_checked_storage_rules)] = Field(
        default="",
        description="Which publishes are stored, by topic filter; the first filter that matches decides. `auto` stores "
        "them if the topic exists or a durable session reads it, and also applies where no filter matches.",
        examples=["filters and what holds for them, such as `debug/#=never, orders/#=always, +/status=auto`"],
    )
    share_durable: bool = Field(
        default=False,
        description="Whether `$share/GROUP/FILTER` is the queue group GROUP, so that no message is lost with a member.",
    )
    connect_timeout_ms: _Millis = Field(
        default=10_000, ge=100, le=_HOUR_MS, description="Time that a new connection has to send its CONNECT."
    )
    keep_alive_max_s: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="The longest keep-alive, in seconds. A 5.0 client that asks for more or none gets this. 0 leaves "
        "it to clients.",
    )
    max_packet_bytes: _Bytes = Field(
        default=_MIB, ge=_KIB, le=256 * _MIB, description="The largest packet that is accepted from a client."
    )
    receive_maximum: int = Field(
        default=100, ge=1, le=65_535, description="How many publishes of QoS 1 and 2 a client may have unconfirmed."
    )
    inflight_max: int = Field(
        default=100,
        ge=1,
        le=65_535,
        description="How many publishes of QoS 1 and 2 a client gets before it confirms, even if it takes more.",
    )
    topic_alias_max: int = Field(
        default=16, ge=0, le=65_535, description="How many topic aliases a client may use, and the broker as well."
    )
    queued_messages_max: int = Field(
        default=10_000,
        ge=1,
        le=10_000_000,
        description="How many messages may wait for a slow client outside of the log, or in a share. Beyond it, the "
        "newest are dropped.",
    )
    queued_bytes_max: _Bytes = Field(
        default=8 * _MIB,
        ge=_KIB,
        le=16 * _GIB,
        description="The same as `queued_messages_max`, in bytes of the messages.",
    )
    client_id_bytes_max: _Bytes = Field(
        default=256, ge=23, le=65_535, description="The longest client identifier that is accepted."
    )
    subscriptions_max: int = Field(
        default=1_000, ge=1, le=1_000_000, description="How many subscriptions a session may have."
    )
    sessions_max: int = Field(
        default=100_000,
        ge=1,
        le=10_000_000,
        description="How many sessions of clients there may be, connected or remembered.",
    )
    session_expiry_max_ms: _Millis = Field(
        default=7 * _DAY_MS,
        ge=0,
        le=36_500 * _DAY_MS,
        description="The longest time that a session is remembered while its client is away; `never` becomes this.",
    )
    retained_max: int = Field(default=100_000, ge=0, le=10_000_000, description="How many retained messages are kept.")
    retained_bytes_max: _Bytes = Field(
        default=256 * _MIB,
        ge=0,
        le=1024 * _GIB,
        description="How many bytes all retained messages may have, with their topics and properties.",
    )
    system_interval_ms: _Millis = Field(
        default=10_000, ge=0, le=_HOUR_MS, description="Time between two rounds of `$SYS` topics; 0 publishes none."
    )

    @property
    def storage_rules(self) -> tuple[StorageRule, ...]:
        return _storage_rules(self.storage)


class StorageSettings(Section):
    """Where messages are kept, and when they count as stored."""

    data: str = Field(default="./data", min_length=1, description="Directory that holds everything the broker knows.")
    fsync: Literal["group", "interval", "always", "never"] = Field(
        default="group",
        description="When a publish is confirmed: with `group` after an fsync shared with its neighbours, with "
        "`always` after an fsync of its own, with `interval` and `never` once the operating system has it.",
    )
    visible: Literal["confirmed", "written"] = Field(
        default="confirmed",
        description="When readers see a message: with `confirmed` when its publisher is answered, with `written` at "
        "once, before an fsync that the publisher waits for.",
    )
    fsync_interval_ms: _Millis = Field(
        default=1000, ge=10, le=_HOUR_MS, description="Time between two fsyncs when `fsync` is `interval`."
    )
    ack_flush_interval_ms: _Millis = Field(
        default=50, ge=1, le=10_000, description="The longest time that an ack waits in memory before it is written."
    )
    segment_bytes: _Bytes = Field(
        default=64 * _MIB, ge=4096, le=_GIB, description="Size of a log file; retention deletes whole files."
    )
    index_interval_bytes: _Bytes = Field(
        default=4096,
        ge=64,
        le=_GIB,
        description="Bytes of log between two index entries. A smaller value makes finding faster, but costs disk "
        "space.",
    )
    tail_cache_bytes: _Bytes = Field(
        default=16 * _MIB,
        ge=0,
        le=1024 * _GIB,
        description="Memory for the newest messages, which serves readers that keep up.",
    )
    open_files_max: int = Field(
        default=256, ge=8, le=1_000_000, description="How many log files are kept open at a time."
    )
    cleanup_interval_ms: _Millis = Field(
        default=60_000, ge=100, le=_DAY_MS, description="Time between two rounds of retention and compaction."
    )
    clock_wait_ms: _Millis = Field(
        default=600_000,
        ge=0,
        le=30 * _DAY_MS,
        description="How long the machine's clock must stay set ahead before what is old only because of that is "
        "deleted; 0 = no time.",
    )
    free_bytes_min: _Bytes = Field(
        default=256 * _MIB, ge=0, le=1024 * _GIB, description="Free disk space below which the broker is read-only."
    )


class TopicSettings(Section):
    """What topics are like when their creator does not say, and how many there may be."""

    auto_create: bool = Field(default=True, description="Whether publishing to an unknown topic creates it.")
    default_partitions: int = Field(
        default=1, ge=1, le=10_000, description="How many partitions a topic that is created by use gets."
    )
    max_topics: int = Field(default=10_000, ge=1, le=1_000_000, description="How many topics the broker holds at most.")
    max_partitions: int = Field(
        default=100_000, ge=1, le=10_000_000, description="How many partitions of all topics the broker holds at most."
    )
    max_namespaces: int = Field(
        default=10_000, ge=1, le=1_000_000, description="How many namespaces the broker holds at most."
    )
    retention_ms: _Millis = Field(
        default=7 * _DAY_MS, ge=0, le=36_500 * _DAY_MS, description="Age at which messages are deleted; 0 keeps them."
    )
    max_message_bytes: _Bytes = Field(
        default=_MIB, ge=1, le=9 * _MIB, description="The largest single message, with key and headers."
    )


class GroupSettings(Section):
    """What consumer groups may ask for, and how long they are remembered."""

    max_groups: int = Field(
        default=10_000, ge=1, le=1_000_000, description="How many stream groups the broker holds at most."
    )
    session_ms_max: _Millis = Field(
        default=_HOUR_MS,
        ge=1000,
        le=_DAY_MS,
        description="The longest `session_ms` that a member may ask for: how long it may be silent.",
    )
    offsets_retention_ms: _Millis = Field(
        default=7 * _DAY_MS,
        ge=0,
        le=36_500 * _DAY_MS,
        description="Time after which the offsets of a group without members are dropped; 0 keeps them.",
    )


class ScheduleSettings(Section):
    """How far ahead, and how much, may be scheduled."""

    max_delay_ms: _Millis = Field(
        default=0,
        ge=0,
        le=36_500 * _DAY_MS,
        description="How far ahead a message may be scheduled at most; 0 sets no limit.",
    )
    max_pending: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000_000,
        description="How many scheduled messages a topic holds at most; 0 sets no limit.",
    )


class StageSettings(Section):
    """Messages that are staged, to be published all at once."""

    ttl_ms: _Millis = Field(
        default=_DAY_MS,
        ge=1000,
        le=365 * _DAY_MS,
        description="How long a stage is kept after something was last put into it, unless it is published.",
    )
    bytes_max: _Bytes = Field(
        default=16 * _GIB, ge=_MIB, le=1024 * 1024 * _GIB, description="How many bytes all stages hold at most."
    )
    stages_max: int = Field(default=10_000, ge=1, le=1_000_000, description="How many stages may exist at a time.")
    queries_max: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="How many queries are remembered with their last batch. Beyond it, the one that has been silent "
        "for longest is forgotten.",
    )
    query_ttl_ms: _Millis = Field(
        default=30 * _DAY_MS,
        ge=1000,
        le=36_500 * _DAY_MS,
        description="Time after which a silent query is forgotten. A batch that it repeats later is published again.",
    )


class PipelineSettings(Section):
    """Pipelines that report to the broker."""

    pipelines_max: int = Field(default=1_000, ge=1, le=100_000, description="How many pipelines are remembered.")
    lost_ms: _Millis = Field(
        default=30_000, ge=1000, le=_DAY_MS, description="Silence after which a running pipeline is shown as lost."
    )
    forget_ms: _Millis = Field(
        default=7 * _DAY_MS, ge=1000, le=36_500 * _DAY_MS, description="Silence after which a pipeline is forgotten."
    )


class AccessSettings(Section):
    """Who may use the broker."""

    mode: Literal["auto", "off", "keys"] = Field(
        default="auto",
        description="`keys` asks everybody for an API key, `off` asks nobody. `auto` means `off` while only this "
        "machine can connect (or `insecure` is set), and `keys` otherwise.",
    )
    insecure: bool = Field(
        default=False, description="Lets the broker serve other machines even without keys or without TLS."
    )
    audit: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether what administrators do is written to the topic `_audit`. With `auto`, it is when there "
        "are keys.",
    )
    audit_retention_ms: _Millis = Field(
        default=90 * _DAY_MS,
        ge=0,
        le=36_500 * _DAY_MS,
        description="Age at which audit entries are deleted; 0 keeps them.",
    )


class TlsSettings(Section):
    """Encryption of every port. The files are read again on SIGHUP."""

    certificate: str = Field(default="", description="PEM file of the certificate and its chain; empty = no TLS.")
    key: str = Field(default="", description="PEM file of the private key; empty = it is in the certificate's file.")
    client_ca: str = Field(
        default="", description="PEM file of authorities. If set, clients must have a certificate from one of them."
    )


class LimitSettings(Section):
    """How fast one client may send requests; 0 sets no limit."""

    requests_per_s_per_address: int = Field(
        default=0, ge=0, le=10_000_000, description="HTTP requests per second from one address."
    )
    requests_per_s_per_key: int = Field(
        default=0, ge=0, le=10_000_000, description="HTTP requests per second with one key."
    )
    burst: int = Field(
        default=0, ge=0, le=10_000_000, description="Requests that may come at once; 0 = as many as a second allows."
    )
    connections_per_s_per_address: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Connections per second from one address: native, MQTT and WebSocket.",
    )
    wrong_keys_per_minute: int = Field(
        default=30, ge=0, le=10_000_000, description="Wrong keys from one address before it is told to wait."
    )


class WebhookSettings(Section):
    """Requests that the broker sends to others: webhooks, and alerts of dead letters."""

    allow_private: bool = Field(
        default=True,
        description="Whether these requests may go to addresses outside the public internet: this machine, private "
        "networks, link-local and the like. Use `false` where those who register webhooks must not reach the broker's "
        "own network.",
    )


class TraceSettings(Section):
    """What is recorded about what happens to messages, and for how long."""

    enabled: bool = Field(default=True, description="Whether anything is recorded.")
    sample: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="The share of messages of which it is recorded that all went well. Failures are always recorded.",
    )
    retention_ms: _Millis = Field(
        default=7 * _DAY_MS, ge=0, le=36_500 * _DAY_MS, description="Age at which records are deleted; 0 keeps them."
    )
    max_bytes: _Bytes = Field(
        default=256 * _MIB,
        ge=_MIB,
        le=1024 * _GIB,
        description="Disk space for records. Beyond it, the oldest are deleted.",
    )
    otlp_endpoint: str = Field(
        default="",
        description="Where spans of messages with a sampled `traceparent` are sent by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/traces`; empty = nowhere. This needs `pip install millstream[otel]`.",
    )


class MetricsSettings(Section):
    """What the broker shows in its metrics."""

    series_max: int = Field(
        default=2_000,
        ge=1,
        le=1_000_000,
        description="How many topics, and how many groups, have series of their own in `/metrics`. The others are "
        "summed up.",
    )


class LogSettings(Section):
    """The log in which the broker says what it does, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The level of the least important entries that are shown."
    )
    format: Literal["auto", "json", "text"] = Field(
        default="auto", description="`auto` means text on a terminal and JSON lines elsewhere."
    )
