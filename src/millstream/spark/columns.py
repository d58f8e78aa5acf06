"""The columns that Spark sees: those of its Kafka source by name and type, and three more for who asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import pyarrow as pa

from millstream.errors import InvalidArgument
from millstream.names import closest

__all__ = ["COLUMNS", "NULLABLE", "STANDARD", "WRITTEN", "Columns", "columns_of", "suggestion"]

#: The names inside of a list and the zone of a timestamp are Spark's: it takes no other.
_HEADERS: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
#: What can be read: name -> type for Spark, type for Arrow.
COLUMNS: Final[dict[str, tuple[str, pa.DataType]]] = {
    "key": ("binary", pa.binary()),
    "value": ("binary", pa.binary()),
    "topic": ("string", pa.string()),
    "partition": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "timestamp": ("timestamp", pa.timestamp("us", tz="UTC")),
    "timestampType": ("int", pa.int32()),
    "headers": ("array<struct<key:string,value:binary>>", _HEADERS),
    "priority": ("int", pa.int32()),
    "id": ("string", pa.string()),
}
#: What is read unless somebody asks for more or less.
STANDARD: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
#: Where a message may have nothing.
NULLABLE: Final = frozenset(("key", "value", "headers"))
#: What can be written.
WRITTEN: Final = ("key", "value", "headers", "topic", "partition", "priority", "deliverAt", "timestamp")


@dataclass(frozen=True)
class Columns:
    """The columns of one read, in their order."""

    names: tuple[str, ...]
    nullable: frozenset[str] = NULLABLE

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([pa.field(name, COLUMNS[name][1], name in self.nullable) for name in self.names])

    @property
    def ddl(self) -> str:
        """The schema as Spark writes it."""
        return ", ".join(
            f"{name} {COLUMNS[name][0]}" + ("" if name in self.nullable else " not null") for name in self.names
        )

    def __contains__(self, name: str) -> bool:
        return name in self.names


def columns_of(
    names: Iterable[str] | None = None,
    *,
    headers: bool = False,
    priority: bool = False,
    ids: bool = False,
    nullable: Collection[str] = (),
) -> Columns:
    """The columns that were named, or else the usual ones and those asked for.

    Spark compares what comes with what was declared, so whoever declared a column `nullable` that never is gets it so.
    """
    if names is None:
        names = (*STANDARD, *["headers"] * headers, *["priority"] * priority, *["id"] * ids)
    chosen = tuple(names)
    for name in chosen:
        if name not in COLUMNS:
            raise InvalidArgument(f"there is no column {name!r}{suggestion(name, COLUMNS)}")
        if chosen.count(name) > 1:
            raise InvalidArgument(f"column {name!r} is named twice")
    return Columns(chosen, NULLABLE | frozenset(nullable))


def suggestion(name: str, known: Collection[str]) -> str:
    """`; did you mean ...?`, or else what there is."""
    folded = {other.lower().replace("_", ""): other for other in known}
    meant = closest(name.lower().replace("_", ""), folded)
    return f"; there are {', '.join(known)}" if meant is None else f"; did you mean {folded[meant]!r}?"
