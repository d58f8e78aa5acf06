"""What the columns of a batch must be like, asked of all its messages at once.

Whoever computes its own checksums can write anything into a column.  A batch is cut where its ends say: if these went
back and forth, a few bytes would become gigabytes, and readers that trust different columns would see different values.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import chain
from struct import Struct, iter_unpack
from typing import Final, TypeAlias

from millstream.errors import BatchDamaged

__all__ = [
    "Buffer",
    "check_ascending",
    "check_ends",
    "check_priorities",
    "check_steps",
    "cut_fixed",
    "marks_of",
    "read_validity",
    "write_validity",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

#: The priorities that a header can name, by a bit each.  There are fewer lanes; queues take the others for normal.
_PRIORITIES: Final = bytes(range(8))
#: So many ends are compared as one number: enough that a piece costs little, and few enough for the nearest cache.
_ENDS_AT_ONCE: Final = 4096
#: The highest bit of each.  No end has it: a batch is far smaller.
_HIGHEST: Final = int.from_bytes(b"\0\0\0\x80" * _ENDS_AT_ONCE, "little")
_FIXED_AT_A_TIME: Final = 64
_NOT_FIXED: Final = "the batch says that its values have one size, and they do not"
_U32: Final = Struct("<I")
#: From a 0 or a 1 to its digit, and back.
_DIGITS: Final = b"01" + bytes(254)
_MARKS: Final = bytes(digit == ord("1") for digit in range(256))


def check_ends(block: Buffer, at: int, count: int) -> None:
    """Raise BatchDamaged unless the ends of `count` messages ascend from 0; the last one is known to be right."""
    if _U32.unpack_from(block, at)[0]:
        raise BatchDamaged("the batch's ends do not begin at 0")
    if count > 1:
        check_ascending(memoryview(block)[at : at + 4 * count + 4])


def check_ascending(ends: memoryview) -> None:
    """Raise BatchDamaged if one of these ends is less than the one before it.

    They are the digits of one large number here, because a publish has no time for a step each.  Every end borrows its
    highest bit before the one in front of it is taken away, and has it still if it was not the smaller one.
    """
    for at in range(0, len(ends) - 4, 4 * (_ENDS_AT_ONCE - 1)):
        piece = ends[at : at + 4 * _ENDS_AT_ONCE]
        number = int.from_bytes(piece, "little")
        highest = _HIGHEST >> 32 * _ENDS_AT_ONCE - 8 * len(piece)
        but_one = highest >> 32
        if number & highest or ((number >> 32 | highest) - number) & but_one != but_one:
            raise BatchDamaged("the batch's ends descend")


def check_steps(block: Buffer, at: int, count: int, value_bytes: int) -> None:
    """Raise BatchDamaged unless the ends are those of values of one size."""
    if count == 1:
        check_ends(block, at, count)
    # Room for up to twice as many, so that batches that differ in their count share what is remembered.
    elif not _steps(value_bytes // count, 1 << count.bit_length()).startswith(
        memoryview(block)[at : at + 4 * count + 4]
    ):
        raise BatchDamaged(_NOT_FIXED)


@lru_cache(maxsize=32)
def _steps(size: int, count: int) -> bytes:
    return array("I", range(0, size * count, size)).tobytes() if size else bytes(4 * count)


def check_priorities(column: Buffer) -> None:
    """Raise BatchDamaged if one of them cannot be one."""
    if bytes(column).translate(None, _PRIORITIES):
        raise BatchDamaged(f"the batch has a priority that cannot be one; they are 0 to {_PRIORITIES[-1]}")


def cut_fixed(block: Buffer, at: int, value_bytes: int, count: int) -> list[bytes | None]:
    """Values of one size, many per call: four times as fast as cutting them one by one."""
    size, rest = divmod(value_bytes, count)
    if rest:
        raise BatchDamaged(_NOT_FIXED)
    values: list[bytes | None] = []
    many = _many_of(size)
    rest = at + size * (count - count % _FIXED_AT_A_TIME)
    for position in range(at, rest, many.size):
        values += many.unpack_from(block, position)
    values += chain.from_iterable(iter_unpack(f"{size}s", memoryview(block)[rest : at + size * count]))
    return values


@lru_cache(maxsize=256)
def _many_of(size: int) -> Struct:
    return Struct(f"{size}s" * _FIXED_AT_A_TIME)


def marks_of(bits: int) -> bytes:
    """A 1 or a 0 for each bit, from the lowest to the highest that is set.

    As digits, all at once: to shift a large number for each of them would take a step for every other one as well.
    """
    return f"{bits:b}"[::-1].encode().translate(_MARKS)


def read_validity(block: Buffer, at: int, count: int, first: int = 0) -> bytes:
    """For `count` messages from the one at place `first` on: a 1, or a 0 for each that has null there."""
    piece = memoryview(block)[at + (first >> 3) : at + (first + count + 7 >> 3)]
    bits = int.from_bytes(piece, "little") >> (first & 7) & (1 << count) - 1
    return marks_of(bits | 1 << count)[:count]


def write_validity(marks: bytes) -> bytes:
    """The bits of such marks, in whole words."""
    return int(marks[::-1].translate(_DIGITS), 2).to_bytes(len(marks) + 63 >> 6 << 3, "little")
