"""What a batch must be like before a partition takes it."""

from __future__ import annotations

from typing import Final

from millstream.compression import raw_size
from millstream.errors import BatchDamaged, InvalidArgument, PayloadTooLarge, UnsupportedVersion
from millstream.records import HEADER_BYTES, MAGIC, VERSION, Batch, BatchHeader, Buffer, Columns, check_batch

__all__ = ["check_storable", "largest_message_bytes"]

_DELIVER_AT: Final = int(Columns.DELIVER_AT)
_KEYS: Final = int(Columns.KEYS)
_HEADERS: Final = int(Columns.HEADERS)


def check_storable(batch: memoryview, max_message_bytes: int, due_column: int) -> tuple[BatchHeader, list[int] | None]:
    """The header of a batch, and when its messages are due in a log of schedules (which has a `due_column`).

    Raises MillstreamError when it cannot be stored there.
    """
    try:
        header = check_batch(batch, 0, len(batch))
    except BatchDamaged:
        if len(batch) >= HEADER_BYTES and batch[0] | batch[1] << 8 == MAGIC and batch[2] > VERSION:
            # To send it again, as after damage on the way, would not help.
            raise UnsupportedVersion(f"the batch has version {batch[2]}, this broker knows {VERSION}") from None
        raise
    due_us = None
    if header.flags & _DELIVER_AT != due_column or due_column:
        due_us = _check_due(batch, due_column)
    if header.length > max_message_bytes or header.codec:
        largest = largest_message_bytes(batch, header, max_message_bytes)
        if largest > max_message_bytes:
            raise PayloadTooLarge(f"a message has {largest} bytes, the topic allows {max_message_bytes}")
    return header, due_us


def largest_message_bytes(batch: Buffer, header: BatchHeader, limit: int) -> int:
    """The size of the largest message with its key and headers; of all of them, if that is not more than `limit`."""
    size = header.length
    if header.codec:
        start = HEADER_BYTES + (8 if header.flags & _DELIVER_AT else 0)
        size = raw_size(batch, start, header.length)
    if size <= limit:
        return size
    opened = Batch.parse(batch, verify=False)
    at = opened.sections
    heaps_at = at.keys if header.flags & _KEYS else at.headers if header.flags & _HEADERS else at.values
    if (size := (len(opened.block) if header.codec else header.length) - heaps_at) <= limit:
        return size
    columns = [opened.values(), opened.keys(), opened.raw_headers()]
    sizes = [[len(item or b"") for item in column] for column in columns if column is not None]
    return max(map(sum, zip(*sizes, strict=True)))


def _check_due(batch: memoryview, due_column: int) -> list[int]:
    """Only what is scheduled has a time to deliver it, and then every message has one; returns these times."""
    if not due_column:
        raise InvalidArgument("delayed messages are published to the log of schedules: partition number + 2**31")
    due_us = Batch.parse(batch, verify=False).deliver_at_us()
    if due_us is None or min(due_us) <= 0:
        raise InvalidArgument("every message that is published to a log of schedules needs a time to deliver it")
    return due_us
