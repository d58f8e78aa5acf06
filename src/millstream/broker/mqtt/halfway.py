"""Large batches that sessions are in the middle of: read and unpacked once, and not again for every few messages."""

from __future__ import annotations

from typing import Final, TypeAlias

from millstream.records import Batch

__all__ = ["Halfway"]

#: For all sessions; a single batch may be larger.
_BYTES_MAX: Final = 16 * 1024 * 1024

#: The uid of the partition, and the first offset of the batch.
_Place: TypeAlias = tuple[int, int]


class Halfway:
    """The batches that were kept last, as many as there is room for."""

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._batches: dict[_Place, Batch] = {}
        self._bytes = 0
        #: Those that somebody has needed since the last sweep.
        self._needed: set[_Place] = set()

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, uid: int, batch: Batch) -> None:
        place = uid, batch.base_offset
        self._drop(place)
        self._batches[place] = batch
        self._bytes += len(batch.block)
        self._needed.add(place)
        while self._bytes > self._bytes_max and len(self._batches) > 1:
            self._drop(next(iter(self._batches)))

    def find(self, uid: int, first: int) -> Batch | None:
        self._needed.add((uid, first))
        return self._batches.get((uid, first))

    def sweep(self) -> None:
        """Forget those that nobody has needed for a while."""
        for place in [place for place in self._batches if place not in self._needed]:
            self._drop(place)
        self._needed = set()

    def _drop(self, place: _Place) -> None:
        batch = self._batches.pop(place, None)
        if batch is not None:
            self._bytes -= len(batch.block)
