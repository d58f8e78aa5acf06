"""Message ids: a ULID that says where its message is.

48 bits append time in milliseconds, 32 bits partition uid (drawn once, when the partition is made; one in memory is
made at every start of the broker), 48 bits offset.
Costs no storage, sorts by time, never repeats across nodes or restarts, and finds its message without an index.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument

__all__ = ["OFFSET_BITS", "SCHEDULES", "MessagePlace", "message_id", "parse_message_id", "schedule_uid"]

#: Added to a partition's number it names the log of the messages that are scheduled for that partition.
SCHEDULES: Final = 0x8000_0000
#: Offsets stay below two to the power of this; ids and due times are packed with them.
OFFSET_BITS: Final = 48

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32
#: From our digits to those of `int(text, 32)`; the letters that we leave out become something that is no digit.
_AS_PYTHON: Final = str.maketrans(_ALPHABET + "ILOU", "0123456789abcdefghijklmnopqrstuv!!!!")
_TWO_LETTERS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]


class MessagePlace(NamedTuple):
    append_time_ms: int
    partition_uid: int
    offset: int


def message_id(append_time_us: int, partition_uid: int, offset: int) -> str:
    """The 26 letters of a message's id."""
    two = _TWO_LETTERS
    # Neighbours have all but the last eight letters in common.
    front = _front((append_time_us // 1000 & 0xFFFF_FFFF_FFFF) << 40 | partition_uid << 8 | offset >> 40)
    return f"{front}{two[offset >> 30 & 1023]}{two[offset >> 20 & 1023]}{two[offset >> 10 & 1023]}{two[offset & 1023]}"


@lru_cache(maxsize=1024)
def _front(number: int) -> str:
    return "".join([_TWO_LETTERS[number >> shift & 0x3FF] for shift in range(80, -1, -10)])


def parse_message_id(text: str) -> MessagePlace:
    """Where the message with this id is.  Raises InvalidArgument when the text is not an id."""
    if len(text) == 26 and text.isascii() and text.isalnum():
        with suppress(ValueError):
            number = int(text.upper().translate(_AS_PYTHON), 32)
            if number < 1 << 128:
                return MessagePlace(number >> 80, number >> 48 & 0xFFFF_FFFF, number & 0xFFFF_FFFF_FFFF)
    raise InvalidArgument(f"{text[:40]!r} is not a message id: an id has 26 letters and digits")


def schedule_uid(partition_uid: int) -> int:
    """The uid of the log of what is scheduled for a partition."""
    return partition_uid ^ 0x8000_0000
