"""What the broker knows, as tables: option `table` of a batch read.

Each has fixed columns.  Where it is cheap the broker itself leaves out what is not wanted: by the options `subscribe`,
`subscribePattern`, `startingTimestamp` and `endingTimestamp`, and with `pushdown` by the conditions of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from millstream.dead_letters import REASONS
from millstream.errors import InvalidArgument, InvalidName
from millstream.names import check_group, check_topic
from millstream.spark.columns import suggestion
from millstream.spark.connection import BrokerConnection, connect
from millstream.spark.options import SourceOptions
from millstream.spark.table_rows import ROWS, Row, Scope

__all__ = ["TABLES", "FilteringTableReader", "TableReader", "table_columns"]

_HEADERS: Final = "array<struct<key:string,value:binary>>"
_ATTEMPTS: Final = "array<struct<consumer:string,delivered:timestamp,ended:timestamp,kind:string,reason:string>>"
_TIME: Final = pa.timestamp("us", tz="UTC")
_TYPES: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": _TIME,
    _HEADERS: pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    _ATTEMPTS: pa.list_(
        pa.field(
            "element",
            pa.struct(
                [
                    ("consumer", pa.string()),
                    ("delivered", _TIME),
                    ("ended", _TIME),
                    ("kind", pa.string()),
                    ("reason", pa.string()),
                ]
            ),
        )
    ),
}


@dataclass(frozen=True)
class Table:
    """The columns of a table, all of which may be null as far as Spark knows."""

    columns: dict[str, str]
    #: By which time its rows are chosen.
    time: str = ""

    @property
    def ddl(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in self.columns.items())

    def arrow_schema(self, names: Iterable[str]) -> pa.Schema:
        return pa.schema([pa.field(name, _TYPES[self.columns[name]]) for name in names])


TABLES: Final[dict[str, Table]] = {
    "dead_letters": Table(
        {
            "id": "string",
            # Where it came from.
            "topic": "string",
            "partition": "int",
            "offset": "bigint",
            "originalId": "string",
            "group": "string",
            "reason": "string",
            "error": "string",
            "deliveries": "int",
            "failures": "int",
            "firstDelivery": "timestamp",
            "died": "timestamp",
            "keptUntil": "timestamp",
            "attempts": _ATTEMPTS,
            "key": "binary",
            "value": "binary",
            "headers": _HEADERS,
            "timestamp": "timestamp",
            "priority": "int",
            # Where it lies.
            "letterTopic": "string",
            "letterPartition": "int",
            "letterOffset": "bigint",
        },
        time="died",
    ),
    "schedules": Table(
        {
            "id": "string",
            "topic": "string",
            "partition": "int",
            "offset": "bigint",
            "key": "binary",
            "due": "timestamp",
            "published": "timestamp",
            "expires": "timestamp",
            "priority": "int",
            "sizeBytes": "bigint",
        },
        time="due",
    ),
    "groups": Table(
        {
            "group": "string",
            "state": "string",
            "generation": "bigint",
            "members": "int",
            "paused": "boolean",
            "topic": "string",
            "partition": "int",
            "committed": "bigint",
            "end": "bigint",
            "lag": "bigint",
            "lagMs": "bigint",
            "member": "string",
        }
    ),
    "queues": Table(
        {
            "topic": "string",
            "group": "string",
            "depth": "bigint",
            "ready": "bigint",
            "leased": "bigint",
            "waiting": "bigint",
            "consumers": "int",
            "paused": "boolean",
            "oldestMs": "bigint",
            "acked": "bigint",
            "dead": "bigint",
            "expired": "bigint",
            "evicted": "bigint",
            "purged": "bigint",
            "gone": "bigint",
        }
    ),
    "passports": Table(
        {
            "id": "string",
            "topic": "string",
            "partition": "int",
            "offset": "bigint",
            "event": "string",
            "time": "timestamp",
            "traceId": "string",
            "key": "binary",
            "group": "string",
            "consumer": "string",
            "error": "string",
            "note": "string",
            "link": "string",
            "messages": "bigint",
        },
        time="time",
    ),
    "topics": Table(
        {
            "topic": "string",
            "partition": "int",
            "startOffset": "bigint",
            "endOffset": "bigint",
            "messages": "bigint",
            "sizeBytes": "bigint",
            "segments": "int",
            "damaged": "bigint",
            "failed": "string",
            "created": "timestamp",
        }
    ),
}


def table_columns(options: SourceOptions) -> str:
    """The columns of the table that is asked for, as Spark writes them."""
    return _table(options).ddl


def _table(options: SourceOptions) -> Table:
    table = TABLES.get(options.table or "")
    if table is None:
        raise InvalidArgument(f"there is no table {options.table!r}{suggestion(options.table or '', TABLES)}")
    return table


class TableReader(DataSourceReader):
    """Read by one task: what the broker tells about itself is small beside what it stores."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._table = _table(options)
        self._names = schema.names
        for field in schema.fields:
            ours = self._table.columns.get(field.name)
            if ours is None:
                known = suggestion(field.name, self._table.columns)
                raise InvalidArgument(f"table {options.table!r} has no column {field.name!r}{known}")
            if field.dataType.simpleString() != ours or not field.nullable:
                raise InvalidArgument(f"column {field.name!r} of table {options.table!r} is {ours}, and may be null")
        _check(options, self._table)
        self._scope = _scope(options)

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:  # noqa: ARG002
        rows: Callable[[BrokerConnection, Scope], Iterator[list[Row]]] = ROWS[self._options.table or ""]
        schema = self._table.arrow_schema(self._names)
        for page in rows(connect(self._options.target), self._scope):
            wanted = [row for row in page if self._scope.holds(row.get("topic"), row.get("partition"))]
            if wanted:
                yield pa.RecordBatch.from_pylist(
                    [{name: row[name] for name in self._names} for row in wanted], schema=schema
                )


class FilteringTableReader(TableReader):
    """With conditions pushed down; a class of its own for the reason that FilteringBatchReader is one."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            self._narrow(each)
        return filters  # Spark looks once more

    def _narrow(self, condition: Filter) -> None:
        column = getattr(condition, "attribute", ())
        value: Any = getattr(condition, "value", None)
        scope = self._scope
        if column in (("topic",), ("group",), ("reason",)) and isinstance(condition, EqualTo | In):
            name = f"{column[0]}s"
            given = value if isinstance(condition, In) else (value,)
            values = frozenset(each for each in given if _is_possible(column[0], each))
            known = getattr(scope, name)
            narrowed: dict[str, Any] = {name: values if known is None else known & values}
            self._scope = replace(scope, **narrowed)
        elif column == (self._table.time,) and isinstance(value, datetime):
            time_ms = int(value.timestamp() * 1000)
            if isinstance(condition, EqualTo | GreaterThan | GreaterThanOrEqual):
                scope = replace(scope, since_ms=max(scope.since_ms, time_ms))
            if isinstance(condition, EqualTo | LessThan | LessThanOrEqual):
                if time_ms < 0:  # nothing is that old
                    scope = replace(scope, topics=frozenset())
                else:
                    scope = replace(scope, until_ms=min(scope.until_ms or time_ms + 1, time_ms + 1))
            self._scope = scope


def _is_possible(column: str, value: Any) -> bool:
    """Whether a row may have it.  Spark may look for anything; the broker calls some of it a mistake."""
    if column == "reason":
        return value in REASONS
    try:
        return bool(value and (check_topic if column == "topic" else check_group)(value))
    except InvalidName:
        return False


def _check(options: SourceOptions, table: Table) -> None:
    """Options of reads of topics that would leave nothing out here."""
    for which, bound in (("starting", options.starting), ("ending", options.ending)):
        if bound.places or (which == "starting" and bound.at == "latest"):
            raise InvalidArgument(f"a table has no offsets: rows are chosen by {which}Timestamp, for all topics alike")
        if bound.time_ms is not None and not table.time:
            raise InvalidArgument(f"table {options.table!r} has no times: leave option {which}Timestamp out")
    for name, given in (("claim", options.claim), ("groupId", options.group)):
        if given is not None:
            raise InvalidArgument(f"option {name} does not go with a table: nothing is settled or committed")


def _scope(options: SourceOptions) -> Scope:
    topics = options.topics
    return Scope(
        topics=frozenset(topics.names) if topics.names else None,
        pattern=topics.pattern,
        places=topics.places,
        since_ms=options.starting.time_ms or 0,
        until_ms=options.ending.time_ms or 0,
    )
