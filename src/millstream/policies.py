"""What can be set about a queue group, with defaults, limits and one clear sentence for every mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from millstream.errors import ConfigInvalid
from millstream.retries import parse_retry, within_limits
from millstream.settings import check_bounds, check_stored, limits, merge_settings, within_bounds

__all__ = ["LEASE_MS_MAX", "LEASE_MS_MIN", "QueuePolicy"]

LEASE_MS_MIN: Final = 100  # what is due is acted on within 100 ms, so a shorter lease would mean nothing
LEASE_MS_MAX: Final = 12 * 3_600_000
_LIMITS: Final = limits("processing_ms", "max_deliveries")
_FAIR_BY: Final = re.compile(r"header:.{1,255}|key:.")

Ordering = Literal["none", "key", "strict"]
Start = Literal["earliest", "latest"]
AckDurability = Literal["async", "sync"]


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of one queue group."""

    #: `none`: a stuck message holds up no other. `key`: one unsettled message per key. `strict`: one at a time.
    ordering: Ordering = "none"
    #: `header:NAME` or `key:C` (the key up to the first character C): by what messages take turns when many wait.
    fair_by: str = ""
    #: How long a consumer may take over a message; 0 = what the topic says.
    lease_ms: int = 0
    #: How long the lease of one delivery can be extended in all; 0 = without limit.
    processing_ms: int = 300_000
    #: A retry policy as text; empty = what the topic says.
    retry: str = ""
    #: A message that was handed out this often without being settled becomes a dead letter; 0 = without limit.
    max_deliveries: int = 100
    #: Give up on messages that fail everywhere, before their retries are used up. An outage looks the same.
    poison: bool = False
    #: Nothing is handed out while this is set.
    paused: bool = False
    #: `sync`: an ack is answered when it is on disk.
    ack_durability: AckDurability = "async"
    #: Where a new group begins.
    start: Start = "earliest"

    def __post_init__(self) -> None:
        if self.lease_ms and not LEASE_MS_MIN <= self.lease_ms <= LEASE_MS_MAX:
            raise ConfigInvalid(f"lease_ms must be between {LEASE_MS_MIN} and {LEASE_MS_MAX}, not {self.lease_ms}")
        check_bounds(self, _LIMITS)
        if self.fair_by and not _FAIR_BY.fullmatch(self.fair_by):
            raise ConfigInvalid(f"fair_by is 'header:NAME' or 'key:' and one character, not {self.fair_by!r}")
        if self.fair_by and self.ordering != "none":
            raise ConfigInvalid("fair_by needs ordering=none: an order that is promised leaves no turns to give")
        if self.retry:
            parse_retry(self.retry)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: QueuePolicy | None = None) -> QueuePolicy:
        """The settings of `base` (or the defaults) with these changes; raises ConfigInvalid naming the bad key."""
        return merge_settings(cls, values, base, what="queue")

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> QueuePolicy:
        """Settings that were in force once: what is beyond the limits of today must not keep a broker from starting."""
        check_stored(cls, values, what="queue group")
        values = within_bounds(values, _LIMITS)
        if values.get("retry"):
            values["retry"] = within_limits(values["retry"])
        return cls.from_mapping(values)
