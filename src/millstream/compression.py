"""Packing the block of a batch.

A packed block begins with its raw and its packed size (u32 each): the raw size is checked before anything is unpacked,
and the packed size says where padding begins, which lz4 would take for data.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from struct import Struct
from typing import Final

import lz4.block
import zstandard

from millstream.errors import BatchDamaged

__all__ = ["RAW_BLOCK_BYTES_MAX", "Codec", "compress", "decompress", "decompress_produced", "raw_size"]

#: A compressed batch may not unpack to more than this: a frame of 10 MiB could otherwise ask for gigabytes.
RAW_BLOCK_BYTES_MAX: Final = 64 * 1024 * 1024
#: A producer's block unpacks to so many times its size at most, which is what lz4 can do; a small one to anything.
_TIMES_MAX: Final = 255
_SMALL_BYTES: Final = 2 * 1024 * 1024
_SIZES: Final = Struct("<II")


class _Mine(threading.local):
    """What a thread keeps for itself: making one takes longer than unpacking a small batch."""

    def __init__(self) -> None:
        self.unpacker = zstandard.ZstdDecompressor()


_mine: Final = _Mine()


class Codec(IntEnum):
    NONE = 0
    LZ4 = 1
    ZSTD = 2


def raw_size(buffer: bytes | bytearray | memoryview, start: int, end: int) -> int:
    """What the packed block at `start` claims to unpack to; raises BatchDamaged when that is beyond the limit."""
    if end - start < _SIZES.size:
        raise BatchDamaged("a compressed batch ends before its data")
    size: int = _SIZES.unpack_from(buffer, start)[0]
    if size > RAW_BLOCK_BYTES_MAX:
        raise BatchDamaged(f"a batch unpacks to {size} bytes, the limit is {RAW_BLOCK_BYTES_MAX}")
    return size


def compress(codec: int, raw: bytes) -> bytes:
    if codec == Codec.LZ4:
        packed: bytes = lz4.block.compress(raw, store_size=False)
    else:
        packed = zstandard.ZstdCompressor(level=1).compress(raw)
    return _SIZES.pack(len(raw), len(packed)) + packed


def decompress(codec: int, block: memoryview) -> bytes:
    """The raw block; raises BatchDamaged when the data, its sizes or the codec are not what they say."""
    size = raw_size(block, 0, len(block))
    data = block[_SIZES.size : _SIZES.size + _SIZES.unpack_from(block)[1]]
    try:
        if codec == Codec.LZ4:
            raw: bytes = lz4.block.decompress(data, uncompressed_size=size)
        elif codec == Codec.ZSTD:
            if zstandard.frame_content_size(data) == size:
                raw = _mine.unpacker.decompress(data)
            else:
                # The stream reader never writes more than it is asked for, whatever the frame claims.
                raw = _mine.unpacker.stream_reader(data).read(size)
        else:
            raise BatchDamaged(f"codec {codec} is unknown")
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as problem:
        raise BatchDamaged(f"a compressed batch cannot be unpacked: {problem}") from None
    if len(raw) != size:
        raise BatchDamaged(f"a batch unpacks to {len(raw)} bytes instead of {size}")
    return raw


def decompress_produced(codec: int, block: memoryview) -> bytes:
    """As `decompress`, for a block that a client has just sent, and which must not unpack to many times its size."""
    if raw_size(block, 0, len(block)) > max(_SMALL_BYTES, _TIMES_MAX * len(block)):
        raise BatchDamaged(f"a batch unpacks to more than {_TIMES_MAX} times its size")
    return decompress(codec, block)
