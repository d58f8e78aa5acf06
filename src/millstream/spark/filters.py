"""Conditions of a query that spare work: on topic, partition and offset they narrow what is read.

Those on the timestamp leave rows out before they go to Spark, and no more: it is the producer's, so it need not grow
with the offsets.  What was *appended* when is what the options startingTimestamp and endingTimestamp go by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from millstream.spark.offsets import Range

__all__ = ["Wanted"]

_COMPARISONS: Final[dict[type[Filter], str]] = {
    EqualTo: "equal",
    GreaterThan: "greater",
    GreaterThanOrEqual: "greater_equal",
    LessThan: "less",
    LessThanOrEqual: "less_equal",
}


@dataclass(frozen=True)
class Wanted:
    """What a query wants, as far as its conditions are of use.  Without any, everything."""

    first: int = 0
    until: int | None = None
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    #: Names of comparisons, and moments to compare with.
    times: tuple[tuple[str, datetime], ...] = ()

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Wanted:
        first, until = 0, None
        topics: frozenset[str] | None = None
        partitions: frozenset[int] | None = None
        times: list[tuple[str, datetime]] = []
        for each in filters:
            column = getattr(each, "attribute", ())
            value: Any = getattr(each, "value", None)
            kind = type(each)
            if column == ("topic",):
                topics = _narrowed(topics, each)
            elif column == ("partition",):
                partitions = _narrowed(partitions, each)
            elif column == ("offset",) and kind in _COMPARISONS and isinstance(value, int):
                if kind in (EqualTo, GreaterThan, GreaterThanOrEqual):
                    first = max(first, value + (kind is GreaterThan))
                if kind in (EqualTo, LessThan, LessThanOrEqual):
                    end = value + (kind is not LessThan)
                    until = end if until is None else min(until, end)
            elif column == ("timestamp",) and kind in _COMPARISONS and isinstance(value, datetime):
                times.append((_COMPARISONS[kind], value))
        return cls(first, until, topics, partitions, tuple(times))

    def narrowed(self, ranges: Iterable[Range]) -> Iterator[Range]:
        for each in ranges:
            if self.topics is not None and each.topic not in self.topics:
                continue
            if self.partitions is not None and each.partition not in self.partitions:
                continue
            until = each.until if self.until is None else min(each.until, self.until)
            yield each._replace(first=max(each.first, self.first), until=until)

    def matching(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Without the rows whose timestamp is of no use, where there are timestamps to look at."""
        for batch in batches:
            if self.times and "timestamp" in batch.schema.names:
                batch = batch.filter(self._in_time(batch.column("timestamp")))
            if batch.num_rows:
                yield batch

    def _in_time(self, column: pa.Array) -> pa.Array:
        masks = []
        for comparison, moment in self.times:
            compare: Callable[..., pa.Array] = getattr(pc, comparison)
            masks.append(compare(column, pa.scalar(moment, column.type)))
        mask = masks[0]
        for other in masks[1:]:
            mask = pc.and_(mask, other)
        return mask


def _narrowed(known: frozenset[Any] | None, condition: Filter) -> frozenset[Any] | None:
    if isinstance(condition, EqualTo):
        allowed = frozenset((condition.value,))
    elif isinstance(condition, In):
        allowed = frozenset(condition.value)
    else:
        return known
    return allowed if known is None else known & allowed
