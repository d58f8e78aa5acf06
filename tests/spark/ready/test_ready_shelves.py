"""What a shelf does with files, without Spark to write them."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.errors import DataDamaged
from millstream.spark.pipelines.ready import shelves
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
