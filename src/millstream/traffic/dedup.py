"""Which messages came before: the dedup ids of one partition, for as long as its topic's window lasts.

An id is kept as a 128-bit hash, so that no id costs more than another and two different ones are never taken for the
same.  Ids live in two generations: new ones go to the younger, and when that has filled up or grown as old as the
window, it becomes the elder and the elder is forgotten as a whole.  So forgetting costs nothing per id, and memory has
a bound: the newest `ids_max / 2` ids are always known, more than `ids_max` never.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

__all__ = ["IDS_MAX", "DedupWindow", "Seen", "fingerprint"]

#: Per partition; about 14 MB when it is full.
IDS_MAX: Final = 100_000


class Seen(NamedTuple):
    """The message that came first."""

    offset: int
    append_time_us: int


def fingerprint(dedup_id: bytes) -> bytes:
    return blake2b(dedup_id, digest_size=16).digest()


#: A message is held as one number, its offset in front of its time: half the size of a tuple, and the garbage
#: collector does not look at numbers.
_TIME_BITS: Final = 64
_TIME: Final = (1 << _TIME_BITS) - 1


class DedupWindow:
    """The ids of one partition."""

    def __init__(self, *, ids_max: int = IDS_MAX) -> None:
        self._generation_max = max(1, ids_max // 2)
        self._younger: dict[bytes, int] = {}
        self._elder: dict[bytes, int] = {}
        self._began_us = 0

    def __len__(self) -> int:
        return len(self._younger) + len(self._elder)

    def find(self, mark: bytes, *, now_us: int, window_us: int) -> Seen | None:
        """The message with this fingerprint, if it was stored within the window."""
        held = self._younger.get(mark)
        if held is None:
            held = self._elder.get(mark)
        if held is None or now_us - (held & _TIME) >= window_us:
            return None
        return Seen(held >> _TIME_BITS, held & _TIME)

    def add(self, mark: bytes, seen: Seen, *, window_us: int) -> None:
        """Note a stored message; times never go back."""
        younger = self._younger
        if not younger:
            self._began_us = seen.append_time_us
        elif len(younger) >= self._generation_max or seen.append_time_us - self._began_us >= window_us:
            self._elder, self._younger = younger, {}
            self._began_us = seen.append_time_us
        self._younger[mark] = seen.offset << _TIME_BITS | seen.append_time_us
