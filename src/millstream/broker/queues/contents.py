"""The messages of a batch, for answers that show them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from millstream.headers import readable_headers
from millstream.ids import message_id
from millstream.records import PRIORITY_DEFAULT, Batch

__all__ = ["contents"]


def contents(batch: Batch, uid: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Offsets, and what the messages there say and when; for answers that have these fields."""
    time_us = batch.append_time_us
    rows = zip(
        batch.offsets(),
        batch.values(),
        batch.keys() or repeat(None),
        batch.raw_headers() or repeat(None),
        batch.timestamps_us() or repeat(batch.header.base_timestamp_us),
        batch.priorities() or repeat(PRIORITY_DEFAULT),
        strict=False,
    )
    for offset, value, key, raw_headers, timestamp_us, priority in rows:
        yield (
            offset,
            {
                "id": message_id(time_us, uid, offset),
                "append_time_ms": time_us // 1000,
                "timestamp_ms": timestamp_us // 1000,
                "priority": priority,
                "key": key,
                "value": value,
                "headers": readable_headers(raw_headers),
            },
        )
