"""What can be set about a topic, with defaults, limits and one clear sentence for every mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from millstream.errors import ConfigInvalid, InvalidName
from millstream.names import check_topic
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.retries import parse_retry, within_limits
from millstream.settings import check_bounds, check_stored, limits, merge_settings, within_bounds

__all__ = ["LANES", "PARTITIONS_MAX", "TopicConfig", "parse_lanes"]

PARTITIONS_MAX: Final = 10_000  # each partition is a directory and two open files while it is written
LANES: Final = 5  # critical, high, normal, low, background
_HOUR_MS: Final = 3_600_000
_MIB: Final = 1024 * 1024

Fsync = Literal["group", "interval", "always", "never"]
Visible = Literal["confirmed", "written"]
Cleanup = Literal["delete", "compact", "compact+delete", "settled"]
OnExpiry = Literal["drop", "dead_letter"]
Overflow = Literal["reject", "evict"]
Mode = Literal["durable", "ephemeral"]

_LIMITS: Final = limits(
    "retention_ms",
    "retention_bytes",
    "retention_messages",
    "tombstone_retention_ms",
    "message_ttl_ms",
    "dedup_window_ms",
    "max_depth",
    "starvation_ms",
    "throttle_lag_ms",
    "throttle_depth",
)


def parse_lanes(text: str) -> tuple[int, ...]:
    """The five weights of a text such as `50,25,15,7,3`; none of them when it says `strict`."""
    if text == "strict":
        return ()
    try:
        weights = tuple(int(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != LANES or not all(1 <= weight <= 1000 for weight in weights):
        raise ConfigInvalid(f"lanes is 'strict' or {LANES} weights from 1 to 1000 such as '50,25,15,7,3', not {text!r}")
    return weights


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of one topic.  0 means "no limit" for each retention."""

    #: When a publish is confirmed (see docs/guide/durability.md). Empty = as the broker is set.
    fsync: Fsync | Literal[""] = ""
    #: When readers see a message: when its publisher is answered, or at once. Empty = as the broker is set.
    visible: Visible | Literal[""] = ""
    #: `ephemeral` keeps messages in memory only; they are confirmed as `memory` and gone after a restart.
    mode: Mode = "durable"
    #: Messages older than this are removed, a whole segment at a time.
    retention_ms: int = 168 * _HOUR_MS
    #: The oldest segments are removed when a partition is larger than this.
    retention_bytes: int = 0
    #: The oldest segments are removed when a partition holds more messages than this.
    retention_messages: int = 0
    #: `compact` keeps the newest message of each key. `settled` is for queues: retention removes only what every queue
    #: group has settled.
    cleanup: Cleanup = "delete"
    #: How long a deletion marker (null value) stays readable in a compacted topic.
    tombstone_retention_ms: int = 24 * _HOUR_MS
    #: The largest single message, with key and headers.
    max_message_bytes: int = _MIB
    segment_bytes: int = 64 * _MIB
    #: How long a consumer of a queue may take over a message before another one gets it.
    lease_ms: int = 30_000
    #: When a queue tries a failed message again: a profile, or a profile with changes (see millstream/retries.py).
    retry: str = "standard"
    #: Queues do not deliver messages older than this; 0 = no limit.
    message_ttl_ms: int = 0
    on_expiry: OnExpiry = "drop"
    #: Within this time, a publish that repeats a dedup id is recognised and not stored again; 0 = not looked for.
    dedup_window_ms: int = 0
    #: How many messages may wait to be settled; 0 = no limit.
    max_depth: int = 0
    overflow: Overflow = "reject"
    #: How the priorities critical, high, normal, low and background share deliveries; or `strict`.
    lanes: str = "50,25,15,7,3"
    #: A message of any priority that has waited this long is served next; 0 = never.
    starvation_ms: int = 30_000
    #: Where dead letters go; empty = the topic's name with `.dlq`.
    dead_letter_topic: str = ""
    #: A URL that is told of every dead letter by an HTTP POST.
    dead_letter_alert: str = ""
    #: Publishers are slowed down when the oldest message waits longer than this, or more messages wait; 0 = never.
    throttle_lag_ms: int = 0
    throttle_depth: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, _LIMITS)
        if not 1 <= self.max_message_bytes <= 9 * _MIB:
            raise ConfigInvalid(f"max_message_bytes must be between 1 and {9 * _MIB}, not {self.max_message_bytes}")
        if not 4096 <= self.segment_bytes <= 1024 * _MIB:
            raise ConfigInvalid(f"segment_bytes must be between 4096 and {1024 * _MIB}, not {self.segment_bytes}")
        if not LEASE_MS_MIN <= self.lease_ms <= LEASE_MS_MAX:
            raise ConfigInvalid(f"lease_ms must be between {LEASE_MS_MIN} and {LEASE_MS_MAX}, not {self.lease_ms}")
        parse_retry(self.retry)
        parse_lanes(self.lanes)
        if self.dead_letter_topic:
            try:
                check_topic(self.dead_letter_topic)
            except InvalidName as problem:
                raise ConfigInvalid(f"dead_letter_topic: {problem}") from None
        if self.dead_letter_alert and not self.dead_letter_alert.startswith(("http://", "https://")):
            raise ConfigInvalid(f"dead_letter_alert must be an http or https URL, not {self.dead_letter_alert!r}")

    @property
    def compacts(self) -> bool:
        return self.cleanup in ("compact", "compact+delete")

    @property
    def deletes(self) -> bool:
        return self.cleanup != "compact"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: TopicConfig | None = None) -> TopicConfig:
        """The settings of `base` (or the defaults) with these changes; raises ConfigInvalid naming the bad key."""
        return merge_settings(cls, values, base, what="topic")

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> TopicConfig:
        """Settings that were in force once: what is beyond the limits of today must not keep a broker from starting."""
        check_stored(cls, values, what="topic")
        values = within_bounds(values, _LIMITS)
        if "retry" in values:
            values["retry"] = within_limits(values["retry"])
        return msgspec.convert(values, cls)
