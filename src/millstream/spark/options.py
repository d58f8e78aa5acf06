"""The options of the data source, as Spark's Kafka source has them, checked before anything is read or written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from millstream.durations import parse_ms
from millstream.errors import InvalidArgument
from millstream.names import DEFAULT_NAMESPACE, check_group, check_namespace, check_topic
from millstream.spark.columns import suggestion
from millstream.spark.offsets import Offsets, Place, from_json

__all__ = ["SINK_OPTIONS", "SOURCE_OPTIONS", "Bound", "SinkOptions", "SourceOptions", "Target", "Topics"]

#: How to reach the broker.
_TARGET_OPTIONS: Final = ("bootstrap.servers", "namespace", "token", "tls.ca", "timeout")
_TOPIC_OPTIONS: Final = ("subscribe", "subscribePattern", "assign")
_ENDING_OPTIONS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
SOURCE_OPTIONS: Final = (
    *_TARGET_OPTIONS,
    *("path", *_TOPIC_OPTIONS),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *_ENDING_OPTIONS,
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("minPartitions", "maxRecordsPerPartition", "fetch.max.bytes"),
    *("failOnDataLoss", "isolation", "groupId", "pushdown", "claim", "table"),
    *("includeHeaders", "includePriority", "includeId"),
)
SINK_OPTIONS: Final = (*_TARGET_OPTIONS, "topic", "delivery", "transactionalId", "compression")
#: Spark's own, which it passes on to us.
_OF_SPARK: Final = ("checkpointLocation", "queryName", "serialization.format")

KEY_VARIABLE: Final = "MILLSTREAM_KEY"
_TIMEOUT: Final = "60s"
_TRIGGER_DELAY: Final = "15m"  # as in Spark's Kafka source
_FETCH_BYTES: Final = 4 * 1024 * 1024
_FETCH_BYTES_MAX: Final = 9 * 1024 * 1024  # a frame holds 10 MiB
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES: Final = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?")
#: What Kafka's JSON calls the two ends.
_EARLIEST, _LATEST = -2, -1


@dataclass(frozen=True)
class Target:
    """Where the broker is, and who asks."""

    servers: tuple[str, ...]
    namespace: str = DEFAULT_NAMESPACE
    #: Never shown: this object ends up in tracebacks.
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Topics:
    """Which topics to read: those of these names, those that match, or some partitions of some."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    #: None: all of them.
    places: frozenset[Place] | None = None

    def holds(self, place: Place) -> bool:
        return self.places is None or place in self.places

    def chooses(self, place: Place) -> bool:
        """Whether it is read, as one need not be that a checkpoint still has."""
        named = place.topic in self.names if self.pattern is None else re.fullmatch(self.pattern, place.topic)
        return bool(named) and self.holds(place)


@dataclass(frozen=True)
class Bound:
    """Where reading begins or ends."""

    at: Literal["earliest", "latest", "offsets", "time"]
    #: For `offsets`: by partition, with Kafka's -2 and -1; for `time`: ms by partition.
    places: Mapping[Place, int] = field(default_factory=dict)
    time_ms: int | None = None
    #: A time after the last message means the end; otherwise that is an error.
    late_is_latest: bool = True


class _Given:
    """The options that somebody gave, by their names in whatever case."""

    def __init__(self, options: Mapping[str, str], known: Collection[str], what: str) -> None:
        names = {name.lower() for name in (*known, *_OF_SPARK)}
        for name in options:
            if name.lower() not in names:
                raise InvalidArgument(f"there is no {what} option {name!r}{suggestion(name, known)}")
        self._options = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        return None if value is None or not str(value).strip() else str(value).strip()

    def flag(self, name: str, otherwise: bool) -> bool:
        value = (self.text(name) or str(otherwise)).lower()
        if value not in ("true", "false"):
            raise InvalidArgument(f"option {name} is true or false, not {value!r}")
        return value == "true"

    def number(self, name: str, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < least:
            raise InvalidArgument(f"option {name} must be a whole number from {least} on, not {value!r}")
        return int(value)

    def size(self, name: str, most: int | None = None) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        match = _BYTES.fullmatch(value.lower())
        if match is None or not int(match[1]):
            raise InvalidArgument(f"option {name} must be a number of bytes, such as 1048576 or 16m, not {value!r}")
        size = int(match[1]) * _UNITS[match[2]]
        if most is not None and size > most:
            raise InvalidArgument(f"option {name} is {most} bytes at most, not {size}")
        return size

    def choice(self, name: str, *allowed: str) -> str:
        """The first one is the default."""
        value = (self.text(name) or allowed[0]).lower()
        if value not in allowed:
            raise InvalidArgument(f"option {name} is {' or '.join(allowed)}, not {value!r}")
        return value

    def document(self, name: str) -> Any:
        value = self.text(name)
        if value is None:
            return None
        try:
            return json.loads(value)
        except ValueError as problem:
            raise InvalidArgument(f"option {name} is not JSON: {problem}") from None

    def target(self) -> Target:
        servers = self.text("bootstrap.servers") or ""
        return Target(
            servers=tuple(filter(None, map(str.strip, servers.split(",")))),
            namespace=check_namespace(self.text("namespace") or DEFAULT_NAMESPACE),
            token=self.text("token") or os.environ.get(KEY_VARIABLE) or None,
            ca=self.text("tls.ca"),
            timeout_s=parse_ms(self.text("timeout") or _TIMEOUT, "option timeout") / 1000,
        )


@dataclass(frozen=True)
class SourceOptions:
    """How to read."""

    target: Target
    topics: Topics
    starting: Bound
    ending: Bound
    path: str | None = None
    offsets_per_trigger_max: int | None = None
    bytes_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_s: float = 900.0
    partitions_min: int = 0
    records_per_partition_max: int | None = None
    fetch_bytes: int = _FETCH_BYTES
    fail_on_data_loss: bool = True
    group: str | None = None
    pushdown: bool = False
    claim: str | None = None
    table: str | None = None
    headers: bool = False
    priority: bool = False
    ids: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Raises InvalidArgument with a sentence about the first option that is wrong."""
        given = _Given(options, SOURCE_OPTIONS, "source")
        target, path, table = given.target(), _path(given.text("path")), given.text("table")
        if bool(target.servers) == bool(path):
            raise InvalidArgument(
                "say where to read: option bootstrap.servers for a broker, or path for the data directory of one"
                + (", not both" if path else "")
            )
        given.choice("isolation", "read_committed")
        ended = next((name for name in _ENDING_OPTIONS if streaming and given.text(name)), None)
        if ended is not None:
            raise InvalidArgument(f"option {ended} is for batch reads: a stream reads on and on")
        if given.text("maxOffsetsPerTrigger") and given.text("maxBytesPerTrigger"):
            raise InvalidArgument("a micro-batch is limited by maxOffsetsPerTrigger or maxBytesPerTrigger, not both")
        group, claim = given.text("groupId"), given.text("claim")
        for name, value in (("groupId", group), ("claim", claim), ("table", table)):
            if path and value:
                raise InvalidArgument(f"option {name} needs a broker: give bootstrap.servers instead of path")
        return cls(
            target=target,
            path=path,
            topics=Topics() if table and not any(map(given.text, _TOPIC_OPTIONS)) else _topics(given),
            # What is in a queue waits for somebody, whenever it came.
            starting=_bound(given, "starting", Bound("latest" if streaming and not claim else "earliest")),
            ending=_bound(given, "ending", Bound("latest")),
            offsets_per_trigger_max=given.number("maxOffsetsPerTrigger"),
            bytes_per_trigger_max=given.size("maxBytesPerTrigger"),
            offsets_per_trigger_min=given.number("minOffsetsPerTrigger"),
            trigger_delay_s=parse_ms(given.text("maxTriggerDelay") or _TRIGGER_DELAY, "option maxTriggerDelay") / 1000,
            partitions_min=given.number("minPartitions") or 0,
            records_per_partition_max=given.number("maxRecordsPerPartition"),
            fetch_bytes=given.size("fetch.max.bytes", _FETCH_BYTES_MAX) or _FETCH_BYTES,
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            group=check_group(group) if group else None,
            pushdown=given.flag("pushdown", False),
            claim=check_group(claim) if claim else None,
            table=table,
            headers=given.flag("includeHeaders", False),
            priority=given.flag("includePriority", False),
            ids=given.flag("includeId", False),
        )


@dataclass(frozen=True)
class SinkOptions:
    """How to write."""

    target: Target
    #: None: a column says it.
    topic: str | None = None
    exactly_once: bool = True
    #: Under which a batch is recognised when it comes again; the id of the query unless said.
    transactional_id: str | None = None
    compression: str = "none"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SinkOptions:
        given = _Given(options, SINK_OPTIONS, "sink")
        target, topic = given.target(), given.text("topic")
        if not target.servers:
            raise InvalidArgument("say where to write: option bootstrap.servers, for example localhost:9092")
        return cls(
            target=target,
            topic=check_topic(topic) if topic else None,
            exactly_once=given.choice("delivery", "exactly_once", "at_least_once") == "exactly_once",
            transactional_id=given.text("transactionalId"),
            compression=given.choice("compression", "none", "lz4", "zstd"),
        )


def _path(path: str | None) -> str | None:
    """A directory of this machine; Spark's catalogue writes it as a URI."""
    if path is None or not path.startswith("file:"):
        return path
    return unquote(urlsplit(path).path)


def _topics(given: _Given) -> Topics:
    named = [name for name in _TOPIC_OPTIONS if given.text(name)]
    if len(named) != 1:
        raise InvalidArgument(
            f"say what to read by exactly one of the options {', '.join(_TOPIC_OPTIONS)}"
            + (f", not by {' and '.join(named)}" if named else "")
        )
    names, pattern = given.text("subscribe"), given.text("subscribePattern")
    if names:
        return Topics(names=tuple(sorted({check_topic(name.strip()) for name in names.split(",")})))
    if pattern:
        try:
            re.compile(pattern)
        except re.error as problem:
            raise InvalidArgument(f"option subscribePattern is not a regular expression: {problem}") from None
        return Topics(pattern=pattern)
    places = _assigned(given.document("assign"))
    return Topics(names=tuple(sorted({place.topic for place in places})), places=places)


def _assigned(document: Any) -> frozenset[Place]:
    if not isinstance(document, dict) or not document:
        raise InvalidArgument('option assign must look like {"orders": [0, 1]}')
    places: set[Place] = set()
    for topic, partitions in document.items():
        if not isinstance(partitions, list) or not partitions or any(type(number) is not int for number in partitions):
            raise InvalidArgument(f"option assign must list the partitions of topic {topic!r} as numbers")
        places.update(Place(check_topic(topic), number) for number in partitions)
    return frozenset(places)


def _bound(given: _Given, which: Literal["starting", "ending"], otherwise: Bound) -> Bound:
    """As in Spark's Kafka source: a time for all partitions goes before times for each, and these before offsets."""
    strategy = "error" if which == "ending" else given.choice(f"{which}OffsetsByTimestampStrategy", "error", "latest")
    late_is_latest = which == "ending" or strategy == "latest"
    time_ms = given.number(f"{which}Timestamp", 0)
    if time_ms is not None:
        return Bound("time", time_ms=time_ms, late_is_latest=late_is_latest)
    by_time = given.document(f"{which}OffsetsByTimestamp")
    if by_time is not None:
        places = from_json(by_time, f"option {which}OffsetsByTimestamp")
        return Bound("time", places=places, late_is_latest=late_is_latest)
    text = given.text(f"{which}Offsets")
    if text is None:
        return otherwise
    word = text.lower()
    if word in ("earliest", "latest"):
        if which == "ending" and word == "earliest":
            raise InvalidArgument("option endingOffsets cannot be earliest: nothing would be read")
        return Bound("earliest" if word == "earliest" else "latest")
    if not text.startswith("{"):
        raise InvalidArgument(f"option {which}Offsets is earliest, latest or JSON, not {text!r}")
    return Bound("offsets", places=_checked(given.document(f"{which}Offsets"), which))


def _checked(document: Any, which: str) -> Offsets:
    places = from_json(document, f"option {which}Offsets")
    for place, offset in places.items():
        if offset < _EARLIEST or (which == "ending" and offset == _EARLIEST):
            raise InvalidArgument(f"option {which}Offsets has {place} at {offset}, which is no place to be {which} at")
    return places
