"""The broker's settings: one typed model, and the rule by which file, environment and flags make it.

A setting is a section and a key, `server.port`.  The YAML file is overruled by `MILLSTREAM_SERVER__PORT` and that by
flags, and for each value the loader remembers which of them it came from, so that a mistake can be found as easily as
it is reported.  Nothing here reads files or the environment: texts and mappings come in as arguments.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Final, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from millstream.errors import ConfigInvalid

__all__ = [
    "FLAGS",
    "AccessSettings",
    "GroupSettings",
    "HttpSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "ScheduleSettings",
    "ServerSettings",
    "Settings",
    "StorageSettings",
    "TlsSettings",
    "TopicSettings",
    "TraceSettings",
    "WebhookSettings",
    "allowed_values",
    "environment_name",
    "load_settings",
    "parse_bytes",
    "parse_duration_ms",
    "setting_fields",
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

ENVIRONMENT_PREFIX: Final = "MILLSTREAM_"

#: Settings that have a flag of their own on `millstream serve` and `millstream config show`.
FLAGS: Final[Mapping[str, str]] = {
    "server.host": "--host",
    "server.port": "--port",
    "http.port": "--http-port",
    "storage.data": "--data",
    "storage.fsync": "--fsync",
    "access.insecure": "--insecure",
    "log.level": "--log-level",
    "log.format": "--log-format",
}


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
    amount = float(number) * unit if "." in number else int(number) * unit
    return int(amount) if amount == int(amount) else value


_Bytes = Annotated[int, BeforeValidator(parse_bytes)]
_Millis = Annotated[int, BeforeValidator(parse_duration_ms)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(_Section):
    """Where the broker listens, and what one connection may cost it."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; only this machine unless changed."
    )
    port: int = Field(default=9092, ge=0, le=65_535, description="Port of the native protocol; 0 takes any free one.")
    max_connections: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Connections beyond this number are turned away."
    )
    frame_bytes_max: _Bytes = Field(
        default=10 * _MIB, ge=64 * _KIB, le=_GIB, description="The largest request or answer; it bounds a batch."
    )
    connection_memory_bytes: _Bytes = Field(
        default=32 * _MIB,
        ge=64 * _KIB,
        le=16 * _GIB,
        description="Memory for the waiting answers of one connection; beyond it the connection is not read from.",
    )
    memory_bytes_warning: _Bytes = Field(
        default=0,
        ge=0,
        le=1024 * _GIB,
        description="Memory of the whole broker above which it slows publishers down; 0 does not look.",
    )
    memory_bytes_critical: _Bytes = Field(
        default=0,
        ge=0,
        le=1024 * _GIB,
        description="Memory above which it takes neither messages nor new connections; 0 does not look.",
    )
    heartbeat_ms: _Millis = Field(
        default=30_000,
        ge=100,
        le=_HOUR_MS,
        description="A connection silent for this long counts as one missed heartbeat.",
    )
    heartbeat_misses: int = Field(
        default=3, ge=1, le=100, description="Missed heartbeats after which a connection is closed."
    )
    drain_ms: _Millis = Field(
        default=10_000, ge=0, le=_HOUR_MS, description="Time that running requests get to finish when the broker stops."
    )
    backlog: int = Field(default=512, ge=1, le=65_535, description="Connections that may wait to be accepted.")


class HttpSettings(_Section):
    """The HTTP door: API, WebSocket, dashboard and metrics."""

    enabled: bool = Field(default=True, description="Whether the broker answers HTTP at all.")
    port: int = Field(default=8080, ge=0, le=65_535, description="Port of HTTP; 0 takes any free one.")
    keep_alive_ms: _Millis = Field(
        default=75_000, ge=1000, le=_HOUR_MS, description="An idle HTTP connection is closed after this time."
    )
    request_ms: _Millis = Field(
        default=30_000,
        ge=100,
        le=_HOUR_MS,
        description="Time a client gets to send a request, head and body each.",
    )


class StorageSettings(_Section):
    """Where messages are kept, and when they count as stored."""

    data: str = Field(default="./data", min_length=1, description="Directory that holds everything the broker knows.")
    fsync: Literal["group", "interval", "always", "never"] = Field(
        default="group",
        description="When a publish is confirmed: `group` after an fsync shared with its neighbours, `always` after "
        "its own, `interval` and `never` once the operating system has it.",
    )
    fsync_interval_ms: _Millis = Field(
        default=1000, ge=10, le=_HOUR_MS, description="Time between two fsyncs with fsync `interval`."
    )
    ack_flush_interval_ms: _Millis = Field(
        default=50, ge=1, le=10_000, description="Longest time that an ack waits in memory before it is written."
    )
    segment_bytes: _Bytes = Field(
        default=64 * _MIB, ge=4096, le=_GIB, description="Size of a log file; retention deletes whole files."
    )
    index_interval_bytes: _Bytes = Field(
        default=4096,
        ge=64,
        le=_GIB,
        description="Bytes of log between two index entries; smaller finds faster, costs disk.",
    )
    tail_cache_bytes: _Bytes = Field(
        default=16 * _MIB, ge=0, le=1024 * _GIB, description="Newest messages kept in memory for readers that keep up."
    )
    open_files_max: int = Field(default=256, ge=8, le=1_000_000, description="Log files kept open at a time.")
    cleanup_interval_ms: _Millis = Field(
        default=60_000, ge=100, le=_DAY_MS, description="Time between two rounds of retention and compaction."
    )
    free_bytes_min: _Bytes = Field(
        default=256 * _MIB, ge=0, le=1024 * _GIB, description="Free disk space below which the broker is read-only."
    )


class TopicSettings(_Section):
    """What a topic is like when its creator does not say."""

    auto_create: bool = Field(default=True, description="Whether publishing to an unknown topic creates it.")
    default_partitions: int = Field(default=1, ge=1, le=10_000, description="Partitions of a topic created by use.")
    max_topics: int = Field(default=10_000, ge=1, le=1_000_000, description="Topics that the broker holds at most.")
    retention_ms: _Millis = Field(
        default=7 * _DAY_MS, ge=0, le=36_500 * _DAY_MS, description="Age at which messages are deleted; 0 keeps them."
    )
    max_message_bytes: _Bytes = Field(
        default=_MIB, ge=1, le=9 * _MIB, description="The largest single message, with key and headers."
    )


class GroupSettings(_Section):
    """What consumer groups may ask for, and how long they are remembered."""

    session_ms_max: _Millis = Field(
        default=_HOUR_MS, ge=1000, le=_DAY_MS, description="The longest silence a member may ask to be forgiven."
    )
    offsets_retention_ms: _Millis = Field(
        default=7 * _DAY_MS,
        ge=0,
        le=36_500 * _DAY_MS,
        description="Time after which the offsets of a group without members are dropped; 0 keeps them.",
    )


class ScheduleSettings(_Section):
    """How far ahead, and how much, may be scheduled."""

    max_delay_ms: _Millis = Field(
        default=0,
        ge=0,
        le=36_500 * _DAY_MS,
        description="The furthest a message may be scheduled ahead; 0 sets no limit.",
    )
    max_pending: int = Field(
        default=0, ge=0, le=1_000_000_000_000, description="Scheduled messages a topic holds at most; 0 sets no limit."
    )


class AccessSettings(_Section):
    """Who may use the broker."""

    mode: Literal["auto", "off", "keys"] = Field(
        default="auto",
        description="`keys` asks everybody for an API key, `off` nobody; `auto` is `off` while only this machine can "
        "connect (or `insecure` is set), and `keys` otherwise.",
    )
    insecure: bool = Field(
        default=False, description="Lets the broker serve other machines without keys or without TLS."
    )
    audit: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether what administrators do is written to the topic `_audit`; `auto` does when there are keys.",
    )
    audit_retention_ms: _Millis = Field(
        default=90 * _DAY_MS, ge=0, le=36_500 * _DAY_MS, description="Age at which audit entries are deleted; 0 keeps."
    )


class TlsSettings(_Section):
    """Encryption of every port; read again on SIGHUP."""

    certificate: str = Field(default="", description="PEM file of the certificate and its chain; empty is no TLS.")
    key: str = Field(default="", description="PEM file of the private key; empty if it is in the certificate's file.")
    client_ca: str = Field(
        default="", description="PEM file of authorities; if set, clients must have a certificate of one of them."
    )


class LimitSettings(_Section):
    """How fast one client may ask; 0 sets no limit."""

    requests_per_s_per_address: int = Field(
        default=0, ge=0, le=10_000_000, description="HTTP requests a second from one address."
    )
    requests_per_s_per_key: int = Field(
        default=0, ge=0, le=10_000_000, description="HTTP requests a second with one key."
    )
    burst: int = Field(
        default=0, ge=0, le=10_000_000, description="Requests that may come at once; 0 is what a second allows."
    )
    connections_per_s_per_address: int = Field(
        default=0, ge=0, le=10_000_000, description="Connections a second from one address, of the native protocol."
    )
    wrong_keys_per_minute: int = Field(
        default=30, ge=0, le=10_000_000, description="Wrong keys from one address before it is told to wait."
    )


class WebhookSettings(_Section):
    """Requests that the broker sends to others: webhooks, and alerts of dead letters."""

    allow_private: bool = Field(
        default=True,
        description="Whether they may go to addresses outside the public internet: this machine, private networks, "
        "link-local and the like.  `false` where those who register webhooks must not reach the broker's own network.",
    )


class TraceSettings(_Section):
    """What is recorded about what happens to messages, and for how long."""

    enabled: bool = Field(default=True, description="Whether anything is recorded.")
    sample: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="The share of messages of which it is recorded that all went well; failures always are.",
    )
    retention_ms: _Millis = Field(
        default=7 * _DAY_MS, ge=0, le=36_500 * _DAY_MS, description="Age at which records are deleted; 0 keeps them."
    )
    max_bytes: _Bytes = Field(
        default=256 * _MIB, ge=_MIB, le=1024 * _GIB, description="Disk space for records; beyond it the oldest go."
    )
    otlp_endpoint: str = Field(
        default="",
        description="Where spans of messages with a sampled `traceparent` are sent, by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/traces`; empty sends none.  Needs `pip install millstream[otel]`.",
    )


class MetricsSettings(_Section):
    """What the broker shows of its own numbers."""

    series_max: int = Field(
        default=2_000,
        ge=1,
        le=1_000_000,
        description="Topics with series of their own in `/metrics`, and as many groups; the others are summed up.",
    )


class LogSettings(_Section):
    """What the broker says about itself, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least important entry shown."
    )
    format: Literal["auto", "json", "text"] = Field(
        default="auto", description="`auto` is text on a terminal and JSON lines elsewhere."
    )


class Settings(_Section):
    """Everything that can be set about a broker."""

    server: ServerSettings = ServerSettings()
    http: HttpSettings = HttpSettings()
    storage: StorageSettings = StorageSettings()
    topics: TopicSettings = TopicSettings()
    groups: GroupSettings = GroupSettings()
    schedules: ScheduleSettings = ScheduleSettings()
    webhooks: WebhookSettings = WebhookSettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    limits: LimitSettings = LimitSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()
    log: LogSettings = LogSettings()

    @property
    def is_public(self) -> bool:
        """Whether other machines can connect."""
        host = self.server.host
        if host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        except ValueError:
            return True

    @property
    def needs_keys(self) -> bool:
        """Whether clients need an API key."""
        mode = self.access.mode
        return mode == "keys" or (mode == "auto" and self.is_public and not self.access.insecure)

    @property
    def keeps_audit(self) -> bool:
        return self.access.audit == "on" or (self.access.audit == "auto" and self.needs_keys)


def setting_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as `section.key`, in the order of the reference."""
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, leaf in model.model_fields.items():
            yield f"{section}.{key}", leaf


_FIELDS: Final = dict(setting_fields())


def environment_name(key: str) -> str:
    """The variable that sets `section.key`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def allowed_values(key: str) -> str:
    """What a setting accepts, as it reads after "use" in a sentence."""
    field = _FIELDS[key]
    if get_origin(field.annotation) is Literal:
        *most, last = [str(choice) for choice in get_args(field.annotation)]
        return f"{', '.join(most)} or {last}"
    if field.annotation is bool:
        return "true or false"
    if field.annotation is str:
        return "a text that is not empty"
    low, high = (_bound(field, name) for name in ("ge", "le"))
    if "_ms" in key:
        return f"a duration such as 500ms, 30s or 7d, from {low:,} to {high:,} ms"
    if "bytes" in key:
        return f"a size such as 512KiB or 64MiB, from {low:,} to {high:,} bytes"
    if field.annotation is float:
        return f"a number from {low:,} to {high:,}, such as 0.5"
    return f"a whole number from {low:,} to {high:,}"


def _bound(field: FieldInfo, name: str) -> int:
    return next(int(getattr(rule, name)) for rule in field.metadata if hasattr(rule, name))


class _Given(NamedTuple):
    """A setting as it was given, and the words that say where."""

    key: str
    value: object
    source: str


def load_settings(
    yaml_text: str | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    overrides: Mapping[str, str] | None = None,
    file_name: str = "the configuration file",
) -> tuple[Settings, dict[str, str]]:
    """The settings, and for each `section.key` where its value came from.

    `flags` maps `section.key` to the value of the setting's own flag, None if that was not given; `overrides` are the
    pairs of `--set`, below flags and above everything else.  Raises ConfigInvalid with one sentence that names the key,
    the value, its source and what is allowed.
    """
    given: dict[str, _Given] = {}
    nested: dict[str, dict[str, object]] = {}
    for entry in chain(
        _from_yaml(yaml_text or "", file_name),
        _from_environment(env),
        (_Given(key, value, "--set") for key, value in (overrides or {}).items()),
        (_Given(key, value, FLAGS[key]) for key, value in flags.items() if value is not None),
    ):
        if entry.key not in _FIELDS:
            raise ConfigInvalid(f"unknown setting {entry.key!r} ({entry.source}){_suggestion(entry.key)}")
        given[entry.key] = entry
        section, name = entry.key.split(".")
        nested.setdefault(section, {})[name] = entry.value
    try:
        settings = Settings.model_validate(nested)
    except ValidationError as problem:
        entry = given[".".join(str(part) for part in problem.errors()[0]["loc"][:2])]
        raise ConfigInvalid(
            f"{entry.key} = {_shown(entry.value)} ({entry.source}) is not allowed: use {allowed_values(entry.key)}"
        ) from None
    sources = {key: given[key].source if key in given else "default" for key in _FIELDS}
    _check_together(settings, sources)
    return settings, sources


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Limits that contain each other; a broker that violates them would refuse what it advertises."""
    frame, message = settings.server.frame_bytes_max, settings.topics.max_message_bytes
    memory = settings.server.connection_memory_bytes
    if message >= frame:
        key, value, relation = "topics.max_message_bytes", message, "smaller than"
    elif memory < frame:
        key, value, relation = "server.connection_memory_bytes", memory, "at least"
    else:
        return
    raise ConfigInvalid(
        f"{key} = {value:,} ({sources[key]}) is not allowed: it must be {relation} server.frame_bytes_max, "
        f"which is {frame:,} ({sources['server.frame_bytes_max']})"
    )


def _from_yaml(text: str, file_name: str) -> Iterator[_Given]:
    """Settings of a YAML text.

    Walks the node tree instead of loading it: that keeps the line numbers, finds the key given twice (the loader would
    take the last) and leaves the reading of values to the model (YAML takes 1:30 for the number 90).
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        line = f" line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise ConfigInvalid(
            f"{file_name}{line} is not valid YAML: {(problem.problem or '').removeprefix('but ')}"
        ) from None
    except yaml.YAMLError as problem:
        raise ConfigInvalid(f"{file_name} is not valid YAML: {' '.join(str(problem).split())}") from None
    if root is None:
        return
    for section, section_node, place in _entries(root, file_name, "the file", "sections such as `server:`"):
        if section not in Settings.model_fields:
            raise ConfigInvalid(f"unknown section {section!r} ({place}){_suggestion(section)}")
        if _is_null(section_node):  # a section whose lines are all commented out
            continue
        for key, node, place in _entries(section_node, file_name, section, "keys and values"):
            if not isinstance(node, yaml.ScalarNode):
                raise ConfigInvalid(f"{section}.{key} must be a single value ({place})")
            yield _Given(f"{section}.{key}", None if _is_null(node) else node.value, place)


def _entries(node: yaml.Node, file_name: str, what: str, expected: str) -> Iterator[tuple[str, yaml.Node, str]]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigInvalid(f"{what} must hold {expected} ({file_name} line {node.start_mark.line + 1})")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        place = f"{file_name} line {key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigInvalid(f"{key!r} is given twice ({place})")
        seen.add(key)
        yield key, value_node, place


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _from_environment(env: Mapping[str, str]) -> Iterator[_Given]:
    """Settings among the variables: those with a double underscore.

    The others are not ours to judge: Kubernetes gives every pod beside a service called `millstream` a MILLSTREAM_PORT.
    """
    for name in sorted(env):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest != name and "__" in rest:
            yield _Given(rest.lower().replace("__", ".", 1), env[name], name)


def _suggestion(key: str) -> str:
    """`; did you mean ...?`, for a misspelt key as well as for a right one in the wrong section."""
    places: dict[str, str] = {}
    for known in _FIELDS:
        places.setdefault(known.partition(".")[2], known)
    *_, name = key.split(".")
    if key != name and name in places:
        return f"; did you mean {places[name]!r}?"
    close = difflib.get_close_matches(key, [*Settings.model_fields, *_FIELDS], 1, cutoff=0.75)
    close = close or [places[found] for found in difflib.get_close_matches(name, places, 1, cutoff=0.75)]
    return f"; did you mean {close[0]!r}?" if close else f"; known sections: {', '.join(Settings.model_fields)}"


def _shown(value: object) -> str:
    text = "nothing" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
