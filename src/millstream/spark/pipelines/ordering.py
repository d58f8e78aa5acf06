"""Rows of one task in the order in which others have read them, however they came together.  No Spark here.

After a shuffle a task gets rows of many others: those of each in their order, but one task after the other as they
come.  Spark would sort them, but not in a stream.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

__all__ = ["TASK", "in_order"]

#: The column with the number of the task that a row comes from.
TASK: Final = "__millstream_task"
#: What is kept in memory until all is there; with more than that, all of it waits in a file.
_MEMORY_BYTES: Final = 64 * 1024 * 1024
#: What belongs together is handed out together up to so many rows, and about so many bytes.
_ROWS: Final = 10_000
_BYTES: Final = 8 * 1024 * 1024


class _Run(NamedTuple):
    """Rows of one task."""

    task: int
    rows: pa.RecordBatch


def in_order(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All rows by the number of their task, without it."""
    incoming = iter(batches)
    runs: list[_Run] = []
    size = 0
    for batch in incoming:
        runs += _runs(batch)
        size += batch.nbytes
        if runs and size > _MEMORY_BYTES:
            yield from _in_order_by_file(runs, incoming)
            return
    yield from _gathered(runs[number].rows for number in _sorted([run.task for run in runs]))


def _in_order_by_file(runs: list[_Run], incoming: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """As `in_order`, with a file for what does not fit into memory; `runs` were read before the rest is."""
    tasks: list[int] = []
    # Where Spark has its own, and without a name: a task that Spark kills removes nothing.
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None
    with tempfile.TemporaryFile(dir=directory) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), runs[0].rows.schema) as stored:
            while runs:
                for run in runs:
                    tasks.append(run.task)
                    stored.write_batch(run.rows)
                runs = next((some for batch in incoming if (some := _runs(batch))), [])
        file.flush()
        reader = pa.ipc.open_file(pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ)))
        yield from _gathered(map(reader.get_batch, _sorted(tasks)))


def _runs(batch: pa.RecordBatch) -> list[_Run]:
    if not batch.num_rows:
        return []
    tasks = batch.column(TASK).to_numpy()
    rows = batch.drop_columns([TASK])
    cuts = [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), batch.num_rows]
    return [_Run(int(tasks[at]), rows.slice(at, until - at)) for at, until in pairwise(cuts)]


def _sorted(tasks: list[int]) -> list[int]:
    """Places in a list; those of one task stay as they came."""
    return sorted(range(len(tasks)), key=tasks.__getitem__)


def _gathered(runs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Few batches instead of many small ones."""
    some: list[pa.RecordBatch] = []
    count = size = 0
    for run in runs:
        if some and (count + run.num_rows > _ROWS or size + run.nbytes > _BYTES):
            yield pa.concat_batches(some) if len(some) > 1 else some[0]
            some, count, size = [], 0, 0
        some.append(run)
        count += run.num_rows
        size += run.nbytes
    if some:
        yield pa.concat_batches(some) if len(some) > 1 else some[0]
