"""Message bodies: all different, half of each random, so that neither caches nor compression flatter anyone.

The first eight bytes are the message's number, or the time it was due when latency is measured.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

__all__ = ["NUMBER", "Schedule", "make_bodies"]

NUMBER: Final = struct.Struct("<q")
_NOISE_BYTES: Final = 64 * 1024 * 1024
_TEXT = b'{"order":"2024-00017","customer":"Mill Lane Bakery","items":[{"sku":"flour-25","quantity":4}]} ' * 64


def make_bodies(count: int, size: int, *, first: int = 0) -> list[bytes]:
    """`count` bodies of `size` bytes, numbered from `first`; the same arguments give the same bytes."""
    random_size = size // 2
    text = _TEXT[: size - random_size - NUMBER.size]
    noise = _noise(random.Random(first), count * random_size)
    return [
        NUMBER.pack(first + index) + text + noise[index * random_size : (index + 1) * random_size]
        for index in range(count)
    ]


def _noise(source: random.Random, size: int) -> bytes:
    # In pieces: randbytes counts bits in a C int, which ends at 256 MiB.
    return b"".join(source.randbytes(min(_NOISE_BYTES, size - at)) for at in range(0, size, _NOISE_BYTES))


class Schedule:
    """Hands out `rate` bodies a second, each stamped with the time from which its latency counts.

    That is the time it fell due, so that a publisher still busy with the last one pays for its delay (no
    coordinated omission).  Timers that wake a little late are our doing and not the contestant's: after a
    wait the stamp is the time of waking, unless that is later than a coarse timer explains.
    """

    _OVERSLEEP_NS_MAX = 2_000_000  # asyncio and pika round their waits up to whole milliseconds

    def __init__(self, bodies: Sequence[bytes], rate: int) -> None:
        self._bodies = iter(bodies)
        self._left = len(bodies)
        self._step_ns = 1_000_000_000 // rate
        self._due_ns = time.monotonic_ns() + self._step_ns
        self._waited = False

    def __len__(self) -> int:
        """How many are still to come."""
        return self._left

    def wait_seconds(self) -> float:
        """How long until the next body is due; 0 if it is."""
        ahead_ns = self._due_ns - time.monotonic_ns()
        self._waited = self._waited or ahead_ns > 0
        return max(0, ahead_ns) / 1e9

    def take(self) -> bytes:
        """The next body, stamped; call it once `wait_seconds` is 0."""
        stamp_ns = self._due_ns
        if self._waited:
            stamp_ns = min(time.monotonic_ns(), self._due_ns + self._OVERSLEEP_NS_MAX)
        self._waited = False
        self._due_ns += self._step_ns
        self._left -= 1
        return NUMBER.pack(stamp_ns) + next(self._bodies)[NUMBER.size :]

    def __iter__(self) -> Iterator[bytes]:
        """The bodies as they fall due, for clients that may block in between."""
        while self._left:
            while (seconds := self.wait_seconds()) > 0:
                time.sleep(seconds)
            yield self.take()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The same for clients with an event loop, which runs in between."""
        while self._left:
            # Also when there is nothing to wait for: one turn of the loop lets answers be read.
            await asyncio.sleep(self.wait_seconds())
            yield self.take()
