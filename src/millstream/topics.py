"""What can be set about a topic, with defaults, limits and one clear sentence for every mistake."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from millstream.errors import ConfigInvalid

__all__ = ["PARTITIONS_MAX", "TopicConfig"]

PARTITIONS_MAX: Final = 10_000  # each partition is a directory and two open files while it is written
_HOUR_MS: Final = 3_600_000
_MIB: Final = 1024 * 1024

Fsync = Literal["group", "interval", "always", "never"]
Cleanup = Literal["delete", "compact", "compact+delete"]
Mode = Literal["durable", "ephemeral"]


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of one topic.  0 means "no limit" for each retention."""

    #: When a publish is confirmed: see docs/guide/durability.md.  Empty = what the broker is set to.
    fsync: Fsync | Literal[""] = ""
    #: `ephemeral` keeps messages in memory only; they are confirmed as `memory` and gone after a restart.
    mode: Mode = "durable"
    #: Messages older than this go, a whole segment at a time.
    retention_ms: int = 168 * _HOUR_MS
    #: The oldest segments go when a partition is larger than this.
    retention_bytes: int = 0
    #: The oldest segments go when a partition holds more messages than this.
    retention_messages: int = 0
    #: `compact` keeps the newest message of each key.
    cleanup: Cleanup = "delete"
    #: How long a deletion marker (null value) stays readable in a compacted topic.
    tombstone_retention_ms: int = 24 * _HOUR_MS
    #: The largest single message, with key and headers.
    max_message_bytes: int = _MIB
    segment_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        for name in ("retention_ms", "retention_bytes", "retention_messages", "tombstone_retention_ms"):
            if getattr(self, name) < 0:
                raise ConfigInvalid(f"{name} must be 0 (no limit) or more, not {getattr(self, name)}")
        if not 1 <= self.max_message_bytes <= 9 * _MIB:
            raise ConfigInvalid(f"max_message_bytes must be between 1 and {9 * _MIB}, not {self.max_message_bytes}")
        if not 4096 <= self.segment_bytes <= 1024 * _MIB:
            raise ConfigInvalid(f"segment_bytes must be between 4096 and {1024 * _MIB}, not {self.segment_bytes}")

    @property
    def compacts(self) -> bool:
        return self.cleanup != "delete"

    @property
    def deletes(self) -> bool:
        return self.cleanup != "compact"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: TopicConfig | None = None) -> TopicConfig:
        """The settings of `base` (or the defaults) with these changes; raises ConfigInvalid naming the bad key."""
        fields = {field.name: field for field in msgspec.structs.fields(cls)}
        merged = msgspec.structs.asdict(base) if base is not None else {}
        for key, value in values.items():
            if key not in fields:
                close = difflib.get_close_matches(key, fields, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(sorted(fields))}"
                raise ConfigInvalid(f"unknown topic setting {key!r}{hint}")
            try:
                # Not strict: settings also come from command lines, where every value is text.
                merged[key] = msgspec.convert(value, fields[key].type, strict=False)
            except msgspec.ValidationError as problem:
                raise ConfigInvalid(f"topic setting {key}={value!r} is not allowed: {problem}") from None
        return cls(**merged)
