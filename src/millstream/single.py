"""The batch of one plain value, which is what `publish` sends most: the bytes of `records.encode_parts`, for less.

There are no columns to look for and nothing to add up; what never changes is packed beforehand.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.errors import PayloadTooLarge
from millstream.records import CRC_FROM, MAGIC, PRIORITY_DEFAULT, RAW_BLOCK_BYTES_MAX, VERSION, Columns

__all__ = ["encode_single"]

# See records.py for the fields.
_HEAD: Final = Struct("<4sII24x")  # magic, version and codec; length; checksum; room for the broker's stamp
_TAIL: Final = Struct("<IQqIHBBII")  # the rest of the header, and the two ends of a single value
_START: Final = Struct("<HBB").pack(MAGIC, VERSION, 0)
_FIXED_VALUES: Final = int(Columns.FIXED_VALUES)
_LANE: Final = 1 << PRIORITY_DEFAULT
_PADDING: Final = tuple(bytes(n) for n in range(8))
assert _HEAD.size == CRC_FROM


def encode_single(
    value: bytes, *, base_timestamp_us: int, producer: int = 0, first_sequence: int = 0
) -> tuple[bytes, bytes]:
    """A batch in two pieces."""
    size = len(value)
    if size > RAW_BLOCK_BYTES_MAX:
        raise PayloadTooLarge(f"a batch holds {RAW_BLOCK_BYTES_MAX} bytes at most, not {size}")
    flags = _FIXED_VALUES if size else 0
    fixed = _TAIL.pack(1, producer, base_timestamp_us, first_sequence, flags, _LANE, 0, 0, size)
    tail = b"".join((fixed, value, _PADDING[-size & 7]))
    return _HEAD.pack(_START, CRC_FROM + len(tail), crc32c(tail)), tail
