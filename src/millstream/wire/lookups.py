"""The question that comes before the first publish to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.entries import AnyEntry, has_dedup_id, message_bytes
from millstream.wire.calls import Metadata

__all__ = ["metadata_for"]


def metadata_for(topic: str, entries: Sequence[AnyEntry], partitions: Iterable[int | None] | None) -> Metadata:
    """Ask for a topic and have it made, if need be, for these messages and the partitions that they ask for."""
    return Metadata(
        topics=[topic],
        create=True,
        message_bytes=max(map(message_bytes, entries), default=0),
        partition=max((wanted for wanted in partitions or () if wanted is not None), default=0),
        dedup_id=any(map(has_dedup_id, entries)),
    )
