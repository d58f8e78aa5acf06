"""How much a namespace may have and do; 0 = no limit."""

from __future__ import annotations

import msgspec

from millstream.access.rates import Bucket
from millstream.errors import InvalidArgument, QuotaExceeded, Throttled

__all__ = ["Meter", "Quota"]


class Quota(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The limits of one namespace."""

    topics: int = 0
    partitions: int = 0
    storage_bytes: int = 0
    publish_messages_per_s: int = 0
    publish_bytes_per_s: int = 0
    connections: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise InvalidArgument(f"quota {name} must be 0 (no limit) or more, not {getattr(self, name)}")


class Meter:
    """What a namespace with a quota does to its limits."""

    __slots__ = ("_bytes", "_messages", "namespace", "quota", "refused", "stored_bytes")

    def __init__(self, namespace: str, quota: Quota, now_ms: int) -> None:
        self.namespace = namespace
        self.quota = quota
        # A burst is what a second allows: short peaks are nobody's trouble.
        self._messages = _bucket(quota.publish_messages_per_s, now_ms)
        self._bytes = _bucket(quota.publish_bytes_per_s, now_ms)
        #: As measured last, and what was let in since.
        self.stored_bytes = 0
        self.refused = 0

    def publish(self, messages: int, size: int, now_ms: int) -> None:
        """Let a batch in, or raise Throttled (slow down) or QuotaExceeded (there is no room)."""
        self.check(size, now_ms)
        self._take(messages, size)
        self.stored_bytes += size

    def check(self, size: int, now_ms: int) -> None:
        """Raise what `publish` would, and let nothing in."""
        limit = self.quota.storage_bytes
        if limit and self.stored_bytes + size > limit:
            self.refused += 1
            raise QuotaExceeded(
                f"namespace {self.namespace!r} stores {self.stored_bytes} bytes of its quota of {limit} (storage_bytes)"
            )
        self._check_rate(now_ms)

    def pass_on(self, messages: int, size: int, now_ms: int) -> None:
        """As `publish`, for what is not stored: only how fast it comes matters."""
        self._check_rate(now_ms)
        self._take(messages, size)

    def _check_rate(self, now_ms: int) -> None:
        for bucket, unit in ((self._messages, "messages"), (self._bytes, "bytes")):
            if bucket is not None and (wait_ms := bucket.wait_ms(now_ms)):
                self.refused += 1
                raise Throttled(
                    f"namespace {self.namespace!r} publishes more {unit} a second than its quota; wait {wait_ms} ms"
                )

    def _take(self, messages: int, size: int) -> None:
        if self._messages is not None:
            self._messages.take(messages)
        if self._bytes is not None:
            self._bytes.take(size)

    def check_topics(self, held: int) -> None:
        if self.quota.topics and held >= self.quota.topics:
            self.refused += 1
            raise QuotaExceeded(f"namespace {self.namespace!r} has {held} topics, its quota")

    def check_partitions(self, held: int, more: int) -> None:
        if self.quota.partitions and held + more > self.quota.partitions:
            self.refused += 1
            raise QuotaExceeded(
                f"namespace {self.namespace!r} has {held} partitions of its quota of {self.quota.partitions}, "
                f"and {more} more are too many"
            )

    def check_connections(self, held: int) -> None:
        if self.quota.connections and held >= self.quota.connections:
            self.refused += 1
            raise QuotaExceeded(f"namespace {self.namespace!r} has {held} connections, its quota")


def _bucket(rate: int, now_ms: int) -> Bucket | None:
    return Bucket(rate, rate, now_ms) if rate else None
