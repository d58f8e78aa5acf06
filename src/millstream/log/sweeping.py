"""Sweeping: taking messages out of a log that are over and done with, wherever they stand.

A schedule log cannot rely on retention: one message that is due in a year would keep everything behind it.  So sealed
segments are rewritten without what is settled, with the machinery of compaction; offsets never change.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from millstream.log.compaction import Compaction, open_readable
from millstream.log.partition import PartitionLog
from millstream.log.scan import Found
from millstream.log.segment import Segment
from millstream.records import Batch

__all__ = ["Sweep"]

#: Less than this is not worth reading all the rest for.
_SETTLED_SHARE_MIN: Final = 0.5


class Sweep(Compaction):
    """One round over one log: `plan_sweep`, `rewrite` (in a thread), `swap`."""

    #: An id has the milliseconds of its message's append time, so these must stay.
    _merged_us = 1000
    _settled: Container[int] = frozenset()

    @classmethod
    def plan_sweep(cls, log: PartitionLog, settled: Container[int], pending: int) -> Sweep | None:
        """A sweep, if it is worth it.  `settled` must not change meanwhile; `pending` are left in sealed segments."""
        segments: list[Segment] = []
        for segment in log.segments[:-1]:
            if not segment.stored:
                break
            segments.append(segment)
        messages = sum(segment.messages for segment in segments)
        if not messages or messages - pending < _SETTLED_SHARE_MIN * messages:
            return None
        sweep = cls(log, segments, log.storage, horizon_us=0, keys_max=0)
        sweep._settled = settled
        return sweep

    def _map_keys(self) -> list[Segment]:
        return self._segments

    def _open(self, found: Found) -> Batch | None:
        return open_readable(found)

    def _survivors(self, batch: Batch, tombstones_stay: bool) -> list[int] | None:  # noqa: ARG002
        settled = self._settled
        places = [place for place, offset in enumerate(batch.offsets()) if offset not in settled]
        return None if len(places) == batch.count else places
