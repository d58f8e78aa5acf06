"""Receipt handles: the right to settle one delivery, as text.  `orders:0:42:1:a1b2c3d4e5f67890`

Topic, partition, offset, delivery count, and a number that is new for every lease.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument

__all__ = ["ReceiptHandle"]

_HANDLE: Final = re.compile(r"([A-Za-z0-9_.-]{1,255}):(\d{1,10}):(\d{1,15}):(\d{1,10}):([0-9a-f]{16})")


class ReceiptHandle(NamedTuple):
    topic: str
    partition: int
    offset: int
    delivery: int
    nonce: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}:{self.delivery}:{self.nonce:016x}"

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """Raises InvalidArgument when the text is not a receipt handle."""
        match = _HANDLE.fullmatch(text)
        if match is None:
            raise InvalidArgument(
                f"{text[:80]!r} is not a receipt handle: topic:partition:offset:delivery:16 hex digits is expected"
            )
        topic, partition, offset, delivery, nonce = match.groups()
        return cls(topic, int(partition), int(offset), int(delivery), int(nonce, 16))
