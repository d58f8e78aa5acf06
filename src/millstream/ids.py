"""Message ids: a ULID that says where its message is.

48 bits append time in milliseconds, 32 bits partition uid (drawn once, when the partition is made), 48 bits offset.
Costs no storage, sorts by time, never repeats across nodes or restarts, and finds its message without an index.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.errors import InvalidArgument

__all__ = ["OFFSET_BITS", "SCHEDULES", "MessagePlace", "message_id", "parse_message_id", "schedule_uid"]

#: Added to a partition's number it names the log of the messages that are scheduled for that partition.
SCHEDULES: Final = 0x8000_0000
#: Offsets stay below two to the power of this; ids and due times are packed with them.
OFFSET_BITS: Final = 48

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32
_VALUE: Final = {letter: value for value, letter in enumerate(_ALPHABET)}
_TWO_LETTERS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]


class MessagePlace(NamedTuple):
    append_time_ms: int
    partition_uid: int
    offset: int


def message_id(append_time_us: int, partition_uid: int, offset: int) -> str:
    """The 26 letters of a message's id."""
    number = (append_time_us // 1000 & 0xFFFF_FFFF_FFFF) << 80 | partition_uid << 48 | offset
    return "".join([_TWO_LETTERS[number >> shift & 0x3FF] for shift in range(120, -1, -10)])


def parse_message_id(text: str) -> MessagePlace:
    """Where the message with this id is.  Raises InvalidArgument when the text is not an id."""
    number = 0
    for letter in text.upper():
        value = _VALUE.get(letter)
        if value is None:
            break
        number = number << 5 | value
    else:
        if len(text) == 26 and number < 1 << 128:
            return MessagePlace(number >> 80, number >> 48 & 0xFFFF_FFFF, number & 0xFFFF_FFFF_FFFF)
    raise InvalidArgument(f"{text[:40]!r} is not a message id: an id has 26 letters and digits")


def schedule_uid(partition_uid: int) -> int:
    """The uid of the log of what is scheduled for a partition."""
    return partition_uid ^ 0x8000_0000
