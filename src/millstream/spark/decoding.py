"""From stored batches to Arrow: what Spark reads.

Small batches are joined and unpacked a few megabytes at a time, large ones are used as they lie in memory; both are
handed out in pieces of the size that suits Spark.  Nothing here looks at one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import BatchDamaged
from millstream.ids import message_id
from millstream.records import batch_next_offset, read_header
from millstream.spark.columns import COLUMNS, Columns
from millstream.spark.header_columns import headers_from_rows
from millstream.spark.stored import BadBatch, StoredBatches
from millstream.spark.walking import walk

__all__ = ["BatchDecoder"]

#: Of a record batch.  From 2,500 to 20,000 rows of 100 B none was clearly better for the JVM; the worker that writes
#: them prefers few.
ROWS_PER_BATCH: Final = 16_384
BYTES_PER_BATCH: Final = 2 * 1024 * 1024
_LITTLE_BYTES: Final = BYTES_PER_BATCH // 8
#: What is unpacked at once: every column costs a few calls, however many rows there are.
_CHUNK_ROWS: Final = 4 * ROWS_PER_BATCH
_CHUNK_BYTES: Final = 4 * 1024 * 1024
#: From here on joining costs more than unpacking a batch by itself.
_LARGE_ROWS: Final = 8_000
_LARGE_BYTES: Final = 1024 * 1024
#: What Kafka calls CreateTime: a message's timestamp is the one its producer gave it.
_CREATE_TIME: Final = 0
_SHARED_BITS: Final = 40  # below these bits the offset is in the last 8 letters of an id
_LETTERS: Final = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # those of ids.py
_PAIRS: Final = np.frombuffer(b"".join(bytes((a, b)) for a in _LETTERS for b in _LETTERS), "<u2")


class BatchDecoder:
    """Turns the stored batches of one partition into record batches with the columns that were chosen.

    Record batches may share memory with the buffers they came from, so nobody may write to those any more.  A buffer
    whose address is a multiple of 4, as that of any `bytes` is, spares a copy.
    """

    def __init__(
        self, columns: Columns, *, topic: str, partition: int, uid: int = 0, rows_per_batch: int = ROWS_PER_BATCH
    ) -> None:
        self._columns = columns
        self._schema = columns.arrow_schema
        self._topic = topic
        self._partition = partition
        self._uid = uid
        self._rows_per_batch = rows_per_batch
        self._large_rows = min(_LARGE_ROWS, rows_per_batch)
        #: With less than this a record batch is not worth its cost.
        self._little_rows = rows_per_batch // 8
        self._constants: dict[str, pa.Array] = {}
        self._waiting: list[pa.RecordBatch] = []  # too small to be worth a record batch
        self._waiting_rows = self._waiting_bytes = 0
        self._next_offset = 0  # behind what was read last

    def feed(
        self, buffer: bytes | memoryview, *, first: int, until: int, verify: bool = True
    ) -> Iterator[pa.RecordBatch]:
        """The messages with offsets from `first` to before `until` in whole batches that lie behind each other.

        What is too little for a record batch waits for the next call, or for `finish`.  Raises BatchDamaged, which
        names the offsets, at a batch that cannot be read; what stood before it is not lost.  With verify=False the
        checksums are taken as checked.
        """
        view = memoryview(buffer)
        position = 0
        self._next_offset = max(self._next_offset, first)
        while position < len(view):
            chunk = walk(
                view,
                position,
                until=until,
                rows=_CHUNK_ROWS,
                size=_CHUNK_BYTES,
                large_rows=self._large_rows,
                large_bytes=_LARGE_BYTES,
                verify=verify,
            )
            if chunk.positions:
                part = view[position : chunk.stop]
                places = [place - position for place in chunk.positions] if position else chunk.positions
                yield from self._take(part, places, first, until, chunk.bytes)
            if chunk.problem is not None:
                raise self._damaged(view, chunk.stop, chunk.problem)
            if chunk.stop == position:
                return  # what follows lies behind `until`
            position = chunk.stop

    def finish(self) -> Iterator[pa.RecordBatch]:
        """What still waits."""
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        if len(waiting) == 1:
            yield waiting[0]
        elif waiting:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()

    def _take(self, view: memoryview, places: list[int], first: int, until: int, size: int) -> Iterator[pa.RecordBatch]:
        try:
            rows = self._decode(view, places, first, until)
        except BadBatch as bad:
            if bad.number:
                yield from self._take(view, places[: bad.number], first, until, size)
            raise self._damaged(view, places[bad.number], str(bad)) from None
        if not rows.num_rows:
            return
        if rows.num_rows >= self._little_rows or size >= _LITTLE_BYTES:
            yield from self.finish()
            yield from self._pieces(rows)
            return
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += size
        if self._waiting_rows >= self._little_rows or self._waiting_bytes >= _LITTLE_BYTES:
            yield from self.finish()

    def _pieces(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Rows in pieces of the size that Spark likes, all of about the same length."""
        count = max(-(-rows.num_rows // self._rows_per_batch), -(-rows.nbytes // BYTES_PER_BATCH))
        step = -(-rows.num_rows // min(count, rows.num_rows))
        for start in range(0, rows.num_rows, step):
            yield rows.slice(start, step)

    def _damaged(self, view: memoryview, position: int, reason: str) -> BatchDamaged:
        try:
            header = read_header(view, position)
            last = header.base_offset + header.count - 1
            with suppress(BatchDamaged):
                last = batch_next_offset(view, position, header) - 1
            where = f"offsets {header.base_offset} to {last}"
        except BatchDamaged:
            where = f"offset {self._next_offset} and behind it"
        return BatchDamaged(f"{self._topic}/{self._partition}: the batch with {where} cannot be read: {reason}")

    def _decode(self, view: memoryview, places: list[int], first: int, until: int) -> pa.RecordBatch:
        stored = StoredBatches(view, places)
        arrays = [self._column(name, stored) for name in self._columns.names]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        offsets = stored.offsets
        self._next_offset = int(offsets[-1]) + 1
        if offsets[0] >= first and offsets[-1] < until:
            return rows
        start, stop = np.searchsorted(offsets, (first, until)).tolist()
        return rows.slice(start, max(stop - start, 0))

    def _column(self, name: str, stored: StoredBatches) -> pa.Array:
        if name == "value":
            return stored.values()
        if name == "key":
            return stored.keys()
        if name == "offset":
            return pa.array(stored.offsets)
        if name == "timestamp":
            memory = pa.py_buffer(np.ascontiguousarray(stored.timestamps_us()))
            return pa.Array.from_buffers(COLUMNS[name][1], stored.rows, [None, memory])
        if name == "headers":
            return headers_from_rows(stored.raw_headers())
        if name == "priority":
            return pa.array(stored.priorities())
        if name == "id":
            return self._ids(stored)
        return self._constant(name, stored.rows)

    def _constant(self, name: str, rows: int) -> pa.Array:
        """A column that says the same for every message; made once, then cut to length."""
        known = self._constants.get(name)
        if known is None or len(known) < rows:
            value = {"topic": self._topic, "partition": self._partition, "timestampType": _CREATE_TIME}[name]
            known = self._constants[name] = pa.repeat(pa.scalar(value, COLUMNS[name][1]), max(rows, self._large_rows))
        return known.slice(0, rows)

    def _ids(self, stored: StoredBatches) -> pa.Array:
        """As message_id makes them: 18 letters that the messages of a batch share, 8 for the rest of the offset."""
        offsets = stored.offsets
        first = offsets[stored.first_rows]
        last = offsets[stored.first_rows + stored.counts - 1]
        times = stored.head["append_us"].tolist()
        if (first >> _SHARED_BITS != last >> _SHARED_BITS).any():
            rows = zip(stored.per_message(stored.head["append_us"]).tolist(), offsets.tolist(), strict=True)
            return pa.array([message_id(time_us, self._uid, offset) for time_us, offset in rows])
        fronts = "".join(
            [message_id(time_us, self._uid, offset)[:18] for time_us, offset in zip(times, first.tolist(), strict=True)]
        )
        letters: npt.NDArray[np.uint8] = np.empty((stored.rows, 26), np.uint8)
        front = np.frombuffer(fronts.encode(), np.uint8).reshape(-1, 18)
        letters[:, :18] = np.repeat(front, stored.counts, axis=0)
        pairs = np.stack([_PAIRS[offsets >> shift & 1023] for shift in (30, 20, 10, 0)], axis=1)
        letters[:, 18:] = pairs.view(np.uint8)
        ends = np.arange(0, letters.nbytes + 1, 26, dtype=np.int32)
        return pa.StringArray.from_buffers(stored.rows, pa.py_buffer(ends), pa.py_buffer(letters))
