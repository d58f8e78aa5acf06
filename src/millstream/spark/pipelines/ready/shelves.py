"""Where an archive stands.  Both kinds add a batch once, however often it comes, and let no offset in twice.

Parquet has no transactions, so there is a note of what is about to be done (`_archive/pending.json`) beside the files.
Decide, record, replay: files are written where no reader looks, the note names all of them and where they go, and then
they are moved.  Who finds a note does what it says; all of it may be done twice.  Several archives may stand in one
directory: they take turns, or one would take what another is about to add for something left over.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigInvalid, DataDamaged
from millstream.spark.pipelines.delta import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["DeltaShelf", "ParquetShelf", "Shelf", "date_of"]

#: Readers of Parquet and Delta step over names that begin like this.
_BOOKS: Final = "_archive"
_STATE, _PENDING, _STAGED, _LOCK = "state.json", "pending.json", "staged", "lock"
#: Partition, as ids of messages name it -> the offset after the last one that is here, and which partition that is.
#: A topic that is deleted and made again has other partitions, which begin at 0 again.
Kept = dict[str, tuple[int, str, int]]


class Shelf(ABC):
    """A directory with rows by date."""

    def __init__(self, path: str, compact_files: int, file_bytes: int) -> None:
        if "://" in path:
            raise ConfigInvalid(f"an archive stands in a directory of this machine, not at {path}")
        self.root = Path(path)
        self._books = self.root / _BOOKS
        self._compact_files = compact_files
        self._file_bytes = file_bytes

    @abstractmethod
    def add(self, rows: DataFrame, batch: int) -> None:
        """Take in a batch of a stream.  Rows that are here already are left out."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that a reader of the archive reads."""

    def kept(self) -> Kept:
        """How far the archive is."""
        return _read(self._books / _STATE) or {}

    def _new(self, rows: DataFrame, kept: Kept) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        if not kept:
            return rows
        pairs = [F.lit(each) for mark, (until, *_) in kept.items() for each in (mark, until)]
        known = F.create_map(*pairs)[_mark()]
        return rows.filter(known.isNull() | (F.col("offset") >= known))


class ParquetShelf(Shelf):
    """`date=2026-11-16/000017-….parquet`: files that anything can read."""

    def add(self, rows: DataFrame, batch: int) -> None:
        with self._alone():
            self.recover()
            kept = self.kept()
            staged = self._stage(self._new(rows, kept))
            spark = rows.sparkSession
            if staged is not None:
                self._commit(self._moves(staged, f"{batch:06d}"), [], _further(kept, spark.read.parquet(str(staged))))
            for date in sorted(self.root.glob("date=*")):
                self._compact(spark, date)

    def files(self) -> list[Path]:
        return sorted(self.root.glob("date=*/*.parquet"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other archive works in this directory."""
        self._books.mkdir(parents=True, exist_ok=True)
        with (self._books / _LOCK).open("a") as file:
            with suppress(OSError):  # a file system without locks is one that nobody shares, as far as can be known
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """While nothing is half done here: for a reader that wants every row."""
        with ExitStack() as held:
            try:
                file = held.enter_context((self._books / _LOCK).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a copy, one that only others may write to, or no locks there: nothing is changed then
                self._refuse_half_done()
            else:
                pending = _read(self._books / _PENDING)
                if pending is not None:
                    self._apply(pending)
            yield

    def _refuse_half_done(self) -> None:
        if (self._books / _PENDING).exists():
            raise DataDamaged(
                f"a change of the archive in {self.root} was cut short, and it cannot be finished from here: start the "
                "pipeline that writes it once more, or let this one write there"
            )

    def recover(self) -> None:
        """Do what was decided before; throw away what was only begun."""
        pending = _read(self._books / _PENDING)
        if pending is not None:
            self._apply(pending)
        for left in sorted((self._books / _STAGED).glob("*")):
            _remove_tree(left)

    def _stage(self, rows: DataFrame, *, files: int | None = None) -> Path | None:
        """Rows as files that nobody sees yet; None if there are none."""
        staged = self._books / _STAGED / uuid.uuid4().hex
        rows = rows if files is None else rows.repartitionByRange(files, "topic", "partition", "offset")
        rows = rows.sortWithinPartitions("date", "topic", "partition", "offset")
        rows.write.option("compression", "zstd").partitionBy("date").parquet(str(staged))
        files_made = list(staged.rglob("*.parquet"))
        for each in files_made:
            _sync(each)
        return staged if files_made else None

    def _moves(self, staged: Path, name: str) -> list[tuple[str, str]]:
        """From where to where, by names that no other batch uses."""
        moves = []
        for number, file in enumerate(sorted(staged.rglob("*.parquet"))):
            target = self.root / file.parent.name / f"{name}-{number:03d}-{staged.name[:12]}.parquet"
            moves.append((str(file.relative_to(self.root)), str(target.relative_to(self.root))))
        return moves

    def _commit(self, moves: list[tuple[str, str]], removed: list[str], kept: Kept) -> None:
        pending = {"move": moves, "remove": removed, "kept": kept}
        _write(self._books / _PENDING, pending)
        self._apply(pending)

    def _apply(self, pending: Mapping[str, Any]) -> None:
        for source, target in pending["move"]:
            if not ((self.root / source).exists() or (self.root / target).exists()):
                raise DataDamaged(
                    f"{self.root / source}, which was about to be added to the archive, is gone: remove "
                    f"{self._books / _PENDING} to have its batch done again"
                )
        # What is replaced goes first: a reader that comes just then misses rows for a moment, and sees none twice.
        for name in pending["remove"]:
            (self.root / name).unlink(missing_ok=True)
        for source, target in pending["move"]:
            (self.root / target).parent.mkdir(parents=True, exist_ok=True)
            if (self.root / source).exists():
                (self.root / source).replace(self.root / target)
        for directory in {(self.root / target).parent for _, target in pending["move"]}:
            _sync(directory)
        _write(self._books / _STATE, pending["kept"])
        (self._books / _PENDING).unlink()

    def _compact(self, spark: SparkSession, date: Path) -> None:
        """Make few files of many, sorted by offset."""
        sizes = {file: file.stat().st_size for file in sorted(date.glob("*.parquet"))}
        small = [file for file, size in sizes.items() if size < self._file_bytes // 2]
        if not self._compact_files or len(small) < self._compact_files:
            return
        files = max(1, round(sum(sizes[file] for file in small) / self._file_bytes))
        rows = spark.read.option("basePath", str(self.root)).parquet(*map(str, small))
        from pyspark.sql import functions as F  # noqa: N812

        # Spark takes what directories say for a date.
        rows = rows.withColumn("date", F.lit(date.name.removeprefix("date=")))
        staged = self._stage(rows, files=files)
        assert staged is not None
        self._commit(self._moves(staged, "compact"), [str(file.relative_to(self.root)) for file in small], self.kept())


class DeltaShelf(Shelf):
    """A Delta table: a batch, and each compaction, is one commit of its own."""

    def add(self, rows: DataFrame, batch: int) -> None:
        kept = self._kept_by_table(rows.sparkSession) if batch == 0 else self.kept()
        before = self.files()
        DeltaTable(str(self.root), ("date",)).append(self._new(rows, kept), batch)
        added = sorted(set(self.files()) - set(before))
        if added:
            kept = _further(kept, rows.sparkSession.read.parquet(*map(str, added)))
        else:
            kept = self._kept_by_table(rows.sparkSession)  # it was added before, and nobody wrote down how far that is
        _write(self._books / _STATE, kept)
        self._compact()

    def files(self) -> list[Path]:
        return [Path(file) for file in DeltaTable(str(self.root)).files()]

    def _kept_by_table(self, spark: SparkSession) -> Kept:
        """For a query that begins anew: what was kept by another one."""
        files = self.files()
        return _further({}, spark.read.parquet(*map(str, files))) if files else {}

    def _compact(self) -> None:
        import deltalake

        small = Counter(date_of(file) for file in self.files() if file.stat().st_size < self._file_bytes // 2)
        if self._compact_files and max(small.values(), default=0) >= self._compact_files:
            table = deltalake.DeltaTable(str(self.root))
            table.optimize.compact(target_size=self._file_bytes)


def date_of(file: Path) -> str:
    """The day that a file is about, as its directory says."""
    return next(part.removeprefix("date=") for part in file.parts if part.startswith("date="))


def _further(kept: Kept, rows: DataFrame) -> Kept:
    """How far an archive is with some more rows."""
    from pyspark.sql import functions as F  # noqa: N812

    further = dict(kept)
    ends = rows.groupBy(_mark().alias("mark"), "topic", "partition").agg((F.max("offset") + 1).alias("until"))
    for row in ends.collect():
        before = further.get(row["mark"], (0,))[0]
        further[row["mark"]] = (max(before, row["until"]), row["topic"], row["partition"])
    return further


def _mark() -> Column:
    """30 of the 32 bits of a partition's uid, which are the letters of an id between its time and its offset."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.substring("id", 11, 6)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _sync(path: Path) -> None:
    """What is written here survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, document: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    with beside.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync(path.parent)


def _remove_tree(path: Path) -> None:
    for each in sorted(path.rglob("*"), reverse=True):
        each.unlink() if each.is_file() else each.rmdir()
    path.rmdir() if path.is_dir() else path.unlink()
