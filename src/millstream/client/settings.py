"""What producers and streams can be told, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeGuard

from millstream.client.arguments import as_dict
from millstream.client.delivery import WINDOW_MAX
from millstream.client.messages import TopicPartition
from millstream.client.publishing import acks_number, fsync_number
from millstream.durations import Duration, is_span, parse_ms
from millstream.errors import ConfigInvalid, InvalidArgument
from millstream.names import check_group, check_pattern, check_topic, is_pattern
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN, QueuePolicy
from millstream.records import PRODUCED_MAX, Codec
from millstream.wire.frames import FRAME_BYTES_MAX

__all__ = [
    "ProducerSettings",
    "QueueOptions",
    "QueueSettings",
    "StartAt",
    "StreamSettings",
    "check_timeout",
    "is_count",
    "is_offset",
    "lease_length_ms",
]

#: Where a stream begins: a word, a moment (local time without a time zone), an offset, or an offset per partition.
StartAt: TypeAlias = str | datetime | int | Mapping[int, int]

_CODECS: Final = {None: Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


_OFFSET_MAX: Final = 2**63 - 1


def is_offset(start: object) -> bool:
    return type(start) is int and 0 <= start <= _OFFSET_MAX


def _is_start(start: object) -> bool:
    if isinstance(start, Mapping):
        return all(map(is_offset, (*start, *start.values())))
    return start in ("earliest", "latest") or isinstance(start, datetime) or is_offset(start)


def lease_length_ms(lease: Duration | None) -> int:
    """How long a lease is to last; None leaves it to the queue, which is a 0 on the wire."""
    if lease is None:
        return 0
    lease_ms = parse_ms(lease, "lease")
    hours_max = LEASE_MS_MAX // 3_600_000
    _require(
        LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX,
        f"a lease lasts between {LEASE_MS_MIN} ms and {hours_max} hours, not {lease_ms} ms",
    )
    return lease_ms


def is_count(value: object, most: float = math.inf) -> TypeGuard[int]:
    """Whether it is a whole number from 1 on."""
    return type(value) is int and 1 <= value <= most


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvalidArgument(sentence)


def check_timeout(timeout_s: object) -> None:
    _require(timeout_s is None or is_span(timeout_s), f"timeout_s is a number of seconds or None, not {timeout_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    linger_ms: float
    batch_bytes: int
    batch_messages: int
    acks: str
    compression: str | None
    buffer_bytes: int
    window: int
    delivery_timeout_s: float
    send_timeout_s: float
    partition: int | None
    fsync: str | None

    def __post_init__(self) -> None:
        acks_number(self.acks)
        fsync_number(self.fsync)
        partition = self.partition
        _require(partition is None or type(partition) is int, f"partition is a number, not {partition!r}")
        _require(self.compression in tuple(_CODECS), f"compression is 'lz4', 'zstd' or None, not {self.compression!r}")
        _require(
            is_span(self.linger_ms) and self.linger_ms <= 60_000,
            f"linger_ms is between 0 and 60000, not {self.linger_ms!r}",
        )
        _require(
            is_count(self.batch_bytes, FRAME_BYTES_MAX // 2),
            f"batch_bytes is between 1 and {FRAME_BYTES_MAX // 2}, not {self.batch_bytes!r}",
        )
        _require(
            is_count(self.batch_messages, PRODUCED_MAX),
            f"batch_messages is 1 to {PRODUCED_MAX}, not {self.batch_messages!r}",
        )
        _require(is_count(self.window, WINDOW_MAX), f"window is between 1 and {WINDOW_MAX}, not {self.window!r}")
        _require(is_count(self.buffer_bytes), f"buffer_bytes must be more than 0, not {self.buffer_bytes!r}")
        for name, span in (("delivery_timeout_s", self.delivery_timeout_s), ("send_timeout_s", self.send_timeout_s)):
            _require(is_span(span), f"{name} is a number of seconds, not {span!r}")
        _require(self.delivery_timeout_s > 0, f"delivery_timeout_s must be more than 0, not {self.delivery_timeout_s}")

    @property
    def codec(self) -> int:
        return int(_CODECS[self.compression])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    topics: tuple[str, ...]
    group: str | None
    start: StartAt
    partitions: tuple[int, ...] | None
    commit: str
    commit_interval_s: float
    strategy: str
    protocol: str
    instance_id: str | None
    session_ms: int
    rebalance_ms: int
    max_bytes: int
    timeout_s: float | None
    on_assigned: Callable[[list[TopicPartition]], Any] | None
    on_revoked: Callable[[list[TopicPartition], bool], Any] | None
    on_damage: str

    def __post_init__(self) -> None:
        _require(bool(self.topics), "a stream needs at least one topic")
        for name, function in (("on_assigned", self.on_assigned), ("on_revoked", self.on_revoked)):
            _require(function is None or callable(function), f"{name} is a function, not {function!r}")
        for topic in self.topics:
            check_pattern(topic) if is_pattern(topic) else check_topic(topic)
        if self.group is not None:
            check_group(self.group)
            _require(self.partitions is None, "partitions= is for streams without a group, which assigns them itself")
        start = self.start
        _require(
            _is_start(start),
            f"start is 'earliest', 'latest', a datetime, an offset or offsets by partition, not {start!r}",
        )
        _require(is_count(self.session_ms), f"session_ms must be 1 or more, not {self.session_ms!r}")
        _require(is_count(self.rebalance_ms), f"rebalance_ms must be 1 or more, not {self.rebalance_ms!r}")
        _require(self.commit in ("auto", "manual"), f"commit is 'auto' or 'manual', not {self.commit!r}")
        _require(
            is_span(self.commit_interval_s) and self.commit_interval_s > 0,
            f"commit_interval_s must be more than 0, not {self.commit_interval_s!r}",
        )
        check_timeout(self.timeout_s)
        _require(self.on_damage in ("raise", "skip"), f"on_damage is 'raise' or 'skip', not {self.on_damage!r}")
        _require(
            is_count(self.max_bytes, FRAME_BYTES_MAX),
            f"max_bytes is 1 to {FRAME_BYTES_MAX}, not {self.max_bytes!r}",
        )

    @property
    def commits_itself(self) -> bool:
        return self.group is not None and self.commit == "auto"


class QueueOptions(TypedDict, total=False):
    """Options of a queue besides its topic and group."""

    #: How long the broker waits for a message to be settled; by default as the group or the topic says.
    lease: Duration | None
    #: The name of this consumer, for people; by default the client's id.
    consumer: str
    #: Where a new group begins; by default `earliest`.
    start: Literal["", "earliest", "latest"]
    #: A setting of a new group: whether messages of one key, or all, are handed out one at a time.
    ordering: Literal["none", "key", "strict"] | None
    #: A setting of a new group: what messages take turns by, such as `header:tenant`.
    fair_by: str | None
    #: A setting of a new group: its retry policy, such as `durable`.
    retry: str | None
    #: Further settings of a new group, by name; see QueuePolicy.
    policy: Mapping[str, Any] | None
    #: The broker acks messages when it sends them, so that there is nothing to settle.  What a crash leaves unfinished
    #: is lost.
    auto_ack: bool
    #: How long settles wait for others to be sent with; by default 50 ms.
    ack_linger: Duration
    #: Extend leases while their messages are held, up to `max_processing`; on by default.
    auto_extend: bool
    #: For how long leases are extended at most; by default 5 minutes.
    max_processing: Duration
    #: How many bytes to ask for at a time, at most; by default 1 MiB.
    max_bytes: int
    #: End the iteration when no message has come for this long.
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    topic: str
    group: str
    prefetch: int
    #: 0 = what the group or the topic says.
    lease_ms: int
    consumer: str
    start: str
    policy: Mapping[str, Any]
    auto_ack: bool
    ack_linger_ms: int
    auto_extend: bool
    max_processing_ms: int
    max_bytes: int
    timeout_s: float | None

    @classmethod
    def of(cls, topic: str, group: str, prefetch: int, options: QueueOptions) -> QueueSettings:
        """As users write them."""
        unknown = options.keys() - QueueOptions.__annotations__.keys()
        _require(not unknown, f"a queue has no option {', '.join(sorted(unknown))}")
        named = {name: options.get(name) for name in ("ordering", "fair_by", "retry")}
        named = {name: text for name, text in named.items() if text is not None}
        return cls(
            topic=topic,
            group=group,
            prefetch=prefetch,
            lease_ms=lease_length_ms(options.get("lease")),
            consumer=options.get("consumer", ""),
            start=options.get("start", ""),
            policy=as_dict("policy", options.get("policy")) | named,
            auto_ack=options.get("auto_ack", False),
            ack_linger_ms=parse_ms(options.get("ack_linger", "50ms"), "ack_linger"),
            auto_extend=options.get("auto_extend", True),
            max_processing_ms=parse_ms(options.get("max_processing", "5m"), "max_processing"),
            max_bytes=options.get("max_bytes", 1024 * 1024),
            timeout_s=options.get("timeout_s"),
        )

    def __post_init__(self) -> None:
        check_pattern(self.topic) if is_pattern(self.topic) else check_topic(self.topic)
        check_group(self.group)
        _require(is_count(self.prefetch, 1_000_000), f"prefetch is between 1 and 1000000, not {self.prefetch!r}")
        check_timeout(self.timeout_s)
        _require(self.start in ("", "earliest", "latest"), f"start is 'earliest' or 'latest', not {self.start!r}")
        _require(
            1 <= self.ack_linger_ms <= 60_000, f"ack_linger is between 1 ms and 1 min, not {self.ack_linger_ms} ms"
        )
        _require(
            is_count(self.max_bytes, FRAME_BYTES_MAX),
            f"max_bytes is 1 to {FRAME_BYTES_MAX}, not {self.max_bytes!r}",
        )
        try:
            QueuePolicy.from_mapping(self.policy)
        except ConfigInvalid as problem:
            raise InvalidArgument(str(problem)) from None

    @property
    def name(self) -> str:
        """What people call the queue."""
        return f"{self.topic}/{self.group}"
