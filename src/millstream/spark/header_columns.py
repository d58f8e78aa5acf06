"""Headers of many messages at once: from the bytes of headers.py to Arrow's list of structs, and back."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.headers import readable_headers
from millstream.spark.columns import COLUMNS

__all__ = ["headers_from_rows", "headers_to_rows"]

_TYPE: Final = COLUMNS["headers"][1]
_NAME_BYTES_MAX: Final = 0xFFFF


def headers_from_rows(rows: pa.BinaryArray) -> pa.ListArray:
    """The headers of each message; null where there are none, as in Spark's Kafka source."""
    count = len(rows)
    ends = np.frombuffer(rows.buffers()[1], np.int32, count + 1, 4 * rows.offset) if rows.null_count < count else None
    if ends is None or ends[0] == ends[-1]:
        return pa.nulls(count, _TYPE)
    heap_buffer = rows.buffers()[2]
    cuts = _cut(np.frombuffer(heap_buffer, np.uint8), ends.astype(np.int64))
    if cuts is None:
        # Somebody wrote what is no header: slowly, then, and whatever cannot be read as bytes.
        return pa.array([readable_headers(row) or None for row in rows.to_pylist()], _TYPE)
    counts, borders = cuts
    total = (len(borders) - 1) // 4
    pieces = pa.BinaryArray.from_buffers(pa.binary(), 4 * total, [None, pa.py_buffer(borders), heap_buffer])
    names = _as_text(pieces.take(pa.array(np.arange(1, 4 * total, 4))))
    values = pieces.take(pa.array(np.arange(3, 4 * total, 4)))
    items = pa.StructArray.from_arrays([names, values], fields=list(_TYPE.value_type))
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    some = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.ListArray.from_buffers(_TYPE, count, [some, pa.py_buffer(starts)], children=[items])


def _cut(heap: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> tuple[Any, Any] | None:
    """How many headers each message has, and where size, name, size and value of each begin; None if they do not fit.

    Goes through all messages in step, a header of each at a time.
    """
    counts = np.zeros(len(ends) - 1, np.int64)
    row = np.flatnonzero(ends[1:] > ends[:-1])
    at, stop = ends[row], ends[row + 1]
    steps: list[tuple[Any, Any, Any, Any]] = []
    while len(row):
        if (at + 6 > stop).any():
            return None
        name_end = at + 2 + (heap[at] | heap[at + 1].astype(np.int64) << 8)
        if (name_end + 4 > stop).any():
            return None
        size = sum(heap[name_end + byte].astype(np.int64) << 8 * byte for byte in range(4))
        value_end = name_end + 4 + size
        if (value_end > stop).any():
            return None
        steps.append((at, at + 2, name_end, name_end + 4))
        counts[row] += 1
        more = value_end < stop
        row, at, stop = row[more], value_end[more], stop[more]
    # Headers lie one behind the other, so the order of their places is that of messages and headers.
    borders = np.empty(4 * int(counts.sum()) + 1, np.int32)
    for part in range(4):
        borders[part:-1:4] = np.concatenate([step[part] for step in steps])
    borders[:-1].sort()
    borders[-1] = ends[-1]
    return counts, borders


def _as_text(names: pa.BinaryArray) -> pa.StringArray:
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode("utf-8", "replace") for name in names.to_pylist()], pa.string())


def headers_to_rows(headers: pa.ListArray) -> pa.BinaryArray:
    """The headers of each message as headers.py writes them; empty where there are none."""
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    items = pc.list_flatten(headers)
    if items.null_count:
        raise InvalidArgument("column 'headers' has a header that is null")
    fields = dict(zip([field.name for field in items.type], items.flatten(), strict=True))
    names = fields["key"].cast(pa.binary())
    if names.null_count:
        raise InvalidArgument("column 'headers' has a header without a key")
    values = pc.fill_null(fields["value"].cast(pa.binary()), b"")
    name_sizes, value_sizes = (pc.binary_length(column).to_numpy(zero_copy_only=False) for column in (names, values))
    if len(names) and name_sizes.max() > _NAME_BYTES_MAX:
        raise PayloadTooLarge(f"a header name has {_NAME_BYTES_MAX} bytes at most, not {name_sizes.max()}")
    joined = pc.binary_join_element_wise(_numbers(name_sizes, "<u2"), names, _numbers(value_sizes, "<u4"), values, b"")
    ends = np.zeros(len(headers) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    borders = (
        np.frombuffer(joined.buffers()[1], np.int32, len(joined) + 1)[ends] if len(joined) else np.zeros_like(ends)
    )
    rows = [None, pa.py_buffer(borders.astype(np.int32)), joined.buffers()[2] or pa.py_buffer(b"")]
    return pa.BinaryArray.from_buffers(pa.binary(), len(headers), rows)


def _numbers(values: npt.NDArray[Any], kind: str) -> pa.BinaryArray:
    """Numbers as the bytes they are stored as."""
    items = values.astype(kind)
    ends = np.arange(0, items.nbytes + 1, items.itemsize, dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(items), [None, pa.py_buffer(ends), pa.py_buffer(items)])
