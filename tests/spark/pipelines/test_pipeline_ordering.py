"""Rows that a shuffle has brought together, in the order of the log again.  No Spark."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.spark.pipelines import ordering
from millstream.spark.pipelines.ordering import TASK, in_order


def rows(task: int, values: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": values, TASK: pa.array([task] * len(values), pa.int32())})


def shuffled(seed: int) -> list[pa.RecordBatch]:
    """What many tasks have read, as it arrives: one task after the other, cut into batches anyhow."""
    draw = random.Random(seed)
    tasks = [rows(task, [f"{task} {number}" for number in range(50)]) for task in range(30)]
    draw.shuffle(tasks)
    table = pa.Table.from_batches(tasks).combine_chunks()
    return table.to_batches(max_chunksize=draw.randint(1, 120))


@pytest.mark.parametrize("memory_bytes", [0, 5_000, 10**9], ids=["in a file", "some in a file", "in memory"])
@pytest.mark.parametrize("seed", range(5))
def test_what_tasks_have_read_is_in_the_order_of_the_tasks(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, seed: int
) -> None:
    monkeypatch.setattr(ordering, "_MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(ordering, "_ROWS", 200)
    found = list(in_order(shuffled(seed)))
    assert [row["value"] for batch in found for row in batch.to_pylist()] == [
        f"{task} {number}" for task in range(30) for number in range(50)
    ]
    assert len(found) <= 9
    assert found[0].schema.names == ["value"]


def test_large_rows_are_not_joined_to_what_nobody_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number alone, rows of 300 KB came to gigabytes, which Arrow does not put into one column."""
    monkeypatch.setattr(ordering, "_BYTES", 10_000)
    found = list(in_order([rows(task, ["x" * 1000] * 4) for task in range(20)]))
    assert sum(batch.num_rows for batch in found) == 80
    assert max(batch.nbytes for batch in found) <= 10_000


def test_what_waits_in_a_file_has_no_name_that_could_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "_MEMORY_BYTES", 0)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},elsewhere")
    found = in_order(shuffled(1))
    assert next(found).num_rows
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_nothing() -> None:
    assert list(in_order([])) == []
    assert list(in_order([rows(0, []), rows(1, [])])) == []
