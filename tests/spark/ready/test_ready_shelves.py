"""What a shelf does with files, without Spark to write them."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.errors import DataDamaged
from millstream.spark.pipelines.ready import replay, shelves
from millstream.spark.pipelines.ready.shelves import ParquetShelf
from tests.waiting import eventually


class Stand(ParquetShelf):
    """Its rows are a name, which is the file that they are written to."""

    def _new(self, rows: Any, kept: Any) -> Any:
        return rows

    def _stage(self, rows: Any, *, files: int | None = None) -> Path | None:
        staged = self._books / "staged" / f"{rows.name}-of-a-length-that-differs"
        (staged / "date=2026-11-18").mkdir(parents=True)
        (staged / "date=2026-11-18" / "part-0.parquet").write_text(rows.name)
        rows.meanwhile()
        return staged


def rows(name: str, meanwhile: Any = lambda: None) -> Any:
    read = SimpleNamespace(parquet=lambda path: Path(path).name)
    return SimpleNamespace(name=name, meanwhile=meanwhile, sparkSession=SimpleNamespace(read=read))


@pytest.fixture(autouse=True)
def _kept_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "_further", lambda kept, name: {**kept, name: (1, "orders", 0)})


def test_two_archives_in_one_directory_leave_each_others_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = threading.Thread(target=lambda: Stand(str(tmp_path), 16, 1).add(rows("second"), 0))
    waits = threading.Event()
    lock = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if threading.current_thread() is other:
            waits.set()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    def meanwhile() -> None:
        other.start()
        eventually(lambda: waits.is_set() or not other.is_alive())

    shelf = Stand(str(tmp_path), 16, 1)
    shelf.add(rows("first", meanwhile), 0)
    other.join()
    assert sorted(file.read_text() for file in shelf.files()) == ["first", "second"]
    assert len(shelf.kept()) == 2


def test_what_was_to_be_added_and_is_gone_is_not_taken_for_added(tmp_path: Path) -> None:
    shelf = Stand(str(tmp_path), 16, 1)
    shelf.add(rows("first"), 0)
    (file,) = shelf.files()
    gone = ("_archive/staged/x/date=2026-11-18/part-0.parquet", "date=2026-11-18/compact.parquet")
    with pytest.raises(DataDamaged, match=r"part-0.parquet.* is gone"):
        shelf._commit([gone], [str(file.relative_to(tmp_path))], {})
    assert shelf.files() == [file], "it was to be replaced, and there is nothing to replace it"
    assert len(shelf.kept()) == 1


def half_compacted(root: Path) -> None:
    """As a crash leaves an archive after the files that are replaced are gone, and before the others are there."""
    Stand(str(root), 16, 1).add(rows("first"), 0)
    staged = root / "_archive" / "staged" / "x" / "date=2026-11-18" / "part-0.parquet"
    staged.parent.mkdir(parents=True)
    staged.write_text("compacted")
    move = (str(staged.relative_to(root)), "date=2026-11-18/compact.parquet")
    (old,) = (root / "date=2026-11-18").glob("*.parquet")
    pending = {"move": [move], "remove": [str(old.relative_to(root))], "kept": {}}
    (root / "_archive" / "pending.json").write_text(json.dumps(pending))
    old.unlink()


def read(root: Path) -> list[str]:
    """What a replay reads."""
    parquet = SimpleNamespace(parquet=lambda path: [each.read_text() for each in Path(path).glob("date=*/*.parquet")])
    found: Any = replay._archived(SimpleNamespace(read=parquet), str(root))  # type: ignore[arg-type]
    return list(found)


def test_a_replay_reads_an_archive_whose_compaction_was_cut_short(tmp_path: Path) -> None:
    half_compacted(tmp_path)
    assert read(tmp_path) == ["compacted"]


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


def test_a_replay_of_an_archive_that_it_may_not_write_says_so_before_it_leaves_rows_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_compacted(tmp_path)
    monkeypatch.setattr("fcntl.flock", _refuse)
    with pytest.raises(DataDamaged, match="was cut short, and it cannot be finished from here"):
        read(tmp_path)
    (tmp_path / "_archive" / "pending.json").unlink()
    assert read(tmp_path) == []
