"""Stepping over stored batches: where each of them lies in a buffer, and whether it is as it was written."""

from __future__ import annotations

from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.compression import raw_size
from millstream.errors import BatchDamaged
from millstream.records import CRC_FROM, HEADER_BYTES, MAGIC, STAMP_BYTES, VERSION, Columns

__all__ = ["NO_LIMIT", "Chunk", "walk"]

NO_LIMIT: Final = 2**62
_DELIVER_AT, _OFFSETS, _CONTROL = int(Columns.DELIVER_AT), int(Columns.OFFSETS), int(Columns.CONTROL)
#: Magic, version and codec, length, checksum, base offset, stamp's checksum, count, flags.
_BRIEF: Final = Struct("<HBBII4xQ8xII20xH")


class Chunk:
    """Where batches lie behind each other in a buffer, what follows them, and why it does not."""

    __slots__ = ("bytes", "last", "needs", "positions", "problem", "rows", "stop")

    def __init__(self, stop: int) -> None:
        self.positions: list[int] = []
        self.stop = stop
        self.last = -1  # the position of the last batch before `stop`
        self.rows = 0
        self.bytes = 0  # unpacked
        #: What is wrong with the batch at `stop`, if anything is.
        self.problem: str | None = None
        #: How many bytes from `stop` on are missed, if the buffer is only too short.
        self.needs = 0


def walk(
    view: memoryview,
    position: int,
    *,
    until: int,
    verify: bool,
    rows: int = NO_LIMIT,
    size: int = NO_LIMIT,
    large_rows: int = NO_LIMIT,
    large_bytes: int = NO_LIMIT,
) -> Chunk:
    """Step over batches from a position on: those below offset `until`, about `rows` messages or `size` bytes of them.

    A large batch stands alone, as nothing is gained by joining it to others.
    """
    chunk = Chunk(position)
    end = len(view)
    unpack = _BRIEF.unpack_from
    add = chunk.positions.append
    rows_seen = bytes_seen = 0
    while position < end:
        if end - position < HEADER_BYTES:
            chunk.problem, chunk.needs = "it ends inside its header", HEADER_BYTES
            break
        magic, version, codec, length, crc, base_offset, stamp_crc, count, flags = unpack(view, position)
        if verify and crc32c(view[position : position + STAMP_BYTES]) != stamp_crc:
            chunk.problem = "its header does not match its checksum"
            break
        if magic != MAGIC or version != VERSION or length < HEADER_BYTES or length & 7:
            chunk.problem = "it is not one that this version can read"
            break
        if base_offset >= until:
            break
        stop = position + length
        if stop > end:
            chunk.problem, chunk.needs = f"it ends {stop - end} bytes early", length
            break
        if verify and crc32c(view[position + CRC_FROM : stop]) != crc:
            chunk.problem = "it does not match its checksum"
            break
        if codec:
            try:
                length = raw_size(view, _block_at(position, count, flags), stop)
            except BatchDamaged as problem:
                chunk.problem = str(problem)
                break
        if flags & _CONTROL:
            chunk.last, position = position, stop
            continue
        if count >= large_rows or length >= large_bytes:
            if not rows_seen:
                add(position)
                chunk.last, position = position, stop
                rows_seen, bytes_seen = count, length
            break
        add(position)
        chunk.last, position = position, stop
        rows_seen += count
        bytes_seen += length
        if rows_seen >= rows or bytes_seen >= size:
            break
    chunk.stop, chunk.rows, chunk.bytes = position, rows_seen, bytes_seen
    return chunk


def _block_at(position: int, count: int, flags: int) -> int:
    """Where the block of a batch begins: behind the header and the prelude."""
    return (
        position + HEADER_BYTES + (8 if flags & _DELIVER_AT else 0) + ((4 * count + 7) & ~7 if flags & _OFFSETS else 0)
    )
