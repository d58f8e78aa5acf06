"""What producers and streams can be told, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from millstream.client.delivery import WINDOW_MAX
from millstream.client.messages import TopicPartition
from millstream.client.publishing import acks_number, fsync_number
from millstream.errors import InvalidArgument
from millstream.names import check_group, check_pattern, check_topic, is_pattern
from millstream.records import Codec
from millstream.wire.frames import FRAME_BYTES_MAX

__all__ = ["ProducerSettings", "StartAt", "StreamSettings"]

#: Where a stream begins: a word, a moment, an offset, or an offset per partition.
StartAt: TypeAlias = str | datetime | int | Mapping[int, int]

_CODECS: Final = {None: Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvalidArgument(sentence)


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
        _require(self.compression in _CODECS, f"compression is 'lz4', 'zstd' or None, not {self.compression!r}")
        _require(0 <= self.linger_ms <= 60_000, f"linger_ms is between 0 and 60000, not {self.linger_ms}")
        _require(
            1 <= self.batch_bytes <= FRAME_BYTES_MAX // 2,
            f"batch_bytes is between 1 and {FRAME_BYTES_MAX // 2}, not {self.batch_bytes}",
        )
        _require(1 <= self.batch_messages <= 1_000_000, f"batch_messages is 1 to 1000000, not {self.batch_messages}")
        _require(1 <= self.window <= WINDOW_MAX, f"window is between 1 and {WINDOW_MAX}, not {self.window}")
        _require(self.buffer_bytes >= 1, f"buffer_bytes must be more than 0, not {self.buffer_bytes}")
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
        for topic in self.topics:
            check_pattern(topic) if is_pattern(topic) else check_topic(topic)
        if self.group is not None:
            check_group(self.group)
            _require(self.partitions is None, "partitions= is for streams without a group, which assigns them itself")
        start = self.start
        good = (
            start in ("earliest", "latest")
            if isinstance(start, str)
            else isinstance(start, datetime | Mapping) or (type(start) is int and start >= 0)
        )
        _require(good, f"start is 'earliest', 'latest', a datetime, an offset or offsets by partition, not {start!r}")
        _require(self.commit in ("auto", "manual"), f"commit is 'auto' or 'manual', not {self.commit!r}")
        _require(self.commit_interval_s > 0, f"commit_interval_s must be more than 0, not {self.commit_interval_s}")
        _require(self.on_damage in ("raise", "skip"), f"on_damage is 'raise' or 'skip', not {self.on_damage!r}")
        _require(1 <= self.max_bytes <= FRAME_BYTES_MAX, f"max_bytes is 1 to {FRAME_BYTES_MAX}, not {self.max_bytes}")

    @property
    def commits_itself(self) -> bool:
        return self.group is not None and self.commit == "auto"
