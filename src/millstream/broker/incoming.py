"""What a batch must be like before a partition takes it."""

from __future__ import annotations

from typing import Final

from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.records import Batch, BatchHeader, Columns, check_batch, largest_message_bytes

__all__ = ["check_storable"]

_DELIVER_AT: Final = int(Columns.DELIVER_AT)


def check_storable(batch: memoryview, max_message_bytes: int, due_column: int) -> tuple[BatchHeader, list[int] | None]:
    """The header of a batch, and when its messages are due in a log of schedules (which has a `due_column`).

    Raises MillstreamError when it cannot be stored there.
    """
    header = check_batch(batch, 0, len(batch))
    due_us = None
    if header.flags & _DELIVER_AT != due_column or due_column:
        due_us = _check_due(batch, due_column)
    if header.length > max_message_bytes or header.codec:
        largest = largest_message_bytes(batch, header, max_message_bytes)
        if largest > max_message_bytes:
            raise PayloadTooLarge(f"a message has {largest} bytes, the topic allows {max_message_bytes}")
    return header, due_us


def _check_due(batch: memoryview, due_column: int) -> list[int]:
    """Only what is scheduled has a time to deliver it, and then every message has one; returns these times."""
    if not due_column:
        raise InvalidArgument("delayed messages are published to the log of schedules: partition number + 2**31")
    due_us = Batch.parse(batch, verify=False).deliver_at_us()
    if due_us is None or min(due_us) <= 0:
        raise InvalidArgument("every message that is published to a log of schedules needs a time to deliver it")
    return due_us
