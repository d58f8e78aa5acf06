"""Appending to a Delta table without a jar: Spark writes Parquet files, delta-rs makes them part of the table.

The commit carries the id of the query and the number of the batch, so a batch that is done again after a crash is
recognised.  Files of attempts that never got so far belong to nothing; `vacuum` removes them.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from millstream.errors import StartFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["DeltaTable"]

_QUERY: Final = "sql.streaming.queryId"
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class DeltaTable:
    """A table in a directory, made with the first rows."""

    path: str
    partition_by: tuple[str, ...] = ()

    def append(self, rows: DataFrame, batch: int | None) -> None:
        """Add rows; of a stream, unless this batch was added before."""
        deltalake = _deltalake()
        query = None if batch is None else rows.sparkSession.sparkContext.getLocalProperty(_QUERY)
        there = deltalake.DeltaTable.is_deltatable(self.path)
        if there and query is not None and batch is not None:
            last = deltalake.DeltaTable(self.path).transaction_version(query)
            if last is not None and last >= batch:
                return
        folder = f"rows/{batch if batch is not None else 'once'}-{uuid.uuid4().hex}"
        writer = rows.write.option("compression", "zstd")
        (writer.partitionBy(*self.partition_by) if self.partition_by else writer).parquet(f"{self.path}/{folder}")
        actions, schema = self._written(rows, folder, deltalake)
        if not there:
            deltalake.DeltaTable.create(self.path, schema, mode="ignore", partition_by=list(self.partition_by))
        transactions = None if query is None or batch is None else [deltalake.Transaction(query, batch)]
        if actions or transactions:
            deltalake.DeltaTable(self.path).create_write_transaction(
                actions,
                mode="append",
                schema=schema,
                partition_by=list(self.partition_by),
                commit_properties=deltalake.CommitProperties(app_transactions=transactions),
            )

    @property
    def is_there(self) -> bool:
        """Told by what is on this machine, without the package."""
        return Path(self.path.removeprefix("file:"), "_delta_log").is_dir()

    def files(self) -> list[str]:
        """The files that make up the table now.  Until `vacuum` others lie beside them, replaced or unfinished."""
        deltalake = _deltalake()
        if not deltalake.DeltaTable.is_deltatable(self.path):
            return []
        table = deltalake.DeltaTable(self.path)
        root = table.table_uri.removeprefix("file://")  # is quoted, and what follows it is as it is called
        return [unquote(root) + uri.removeprefix(root) for uri in table.file_uris()]

    def _written(self, rows: DataFrame, folder: str, deltalake: Any) -> tuple[list[Any], Any]:
        """The files that Spark wrote, as Delta lists them."""
        from deltalake.transaction import AddAction
        from pyspark.sql.pandas.types import to_arrow_schema

        system, root = _file_system(self.path)
        listed = system.get_file_info(pyarrow.fs.FileSelector(f"{root}/{folder}", recursive=True))
        actions = []
        for info in listed:
            if info.type != pyarrow.fs.FileType.File or not info.path.endswith(".parquet"):
                continue
            relative = PurePosixPath(info.path).relative_to(root)
            with system.open_input_file(info.path) as file:
                count = pq.read_metadata(file).num_rows
            if count:
                actions.append(
                    AddAction(
                        path=str(relative),
                        size=info.size,
                        partition_values=_partition_values(relative, self.partition_by),
                        modification_time=int(info.mtime_ns // 1_000_000),
                        data_change=True,
                        stats=json.dumps({"numRecords": count}),
                    )
                )
        fields = [pa.field(field.name, field.type) for field in to_arrow_schema(rows.schema, timezone="UTC")]
        return actions, deltalake.Schema.from_arrow(pa.schema(fields))


def _deltalake() -> Any:
    try:
        import deltalake
    except ImportError:
        raise StartFailed("Delta needs the package deltalake: `pip install 'millstream[delta]'`") from None
    return deltalake


def _file_system(path: str) -> tuple[Any, str]:
    if "://" not in path and not path.startswith("file:"):
        return pyarrow.fs.LocalFileSystem(), path.rstrip("/")
    # What Hadoop calls s3a everybody else calls s3.
    uri = f"s3://{path.removeprefix('s3a://')}" if path.startswith("s3a://") else path
    system, root = pyarrow.fs.FileSystem.from_uri(uri)
    return system, root.rstrip("/")


def _partition_values(path: PurePosixPath, names: tuple[str, ...]) -> dict[str, str | None]:
    """`day=2026-01-31/country=DE`, as the directories say it."""
    values: dict[str, str | None] = {}
    for part in path.parts:
        name, equals, text = part.partition("=")
        if equals and unquote(name) in names:
            values[unquote(name)] = None if text == _NULL else unquote(text)
    return values
