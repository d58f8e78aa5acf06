"""What partitions share: open files, and the bytes appended last.

Both are bounded for the whole broker rather than per partition, so that a thousand quiet partitions cost nothing.
Neither is safe to use from two threads; work in threads opens its own files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from typing import Final

from millstream.log.storage import File, Storage

__all__ = ["PIECE_BYTES", "FileCache", "Tail", "TailCache"]


#: What a piece takes beside its bytes: objects, and places in lists (measured).
PIECE_BYTES: Final = 160


class FileCache:
    """Open files, the least recently used closed first.

    A pinned file is never closed: it has bytes that are not synced yet, and the error of a failed write-back is
    reported only to descriptors that were open when it happened.  Pinned files may exceed the limit, and leave room for
    a few others even then, so that readers do not open a file per read when everything is being written to.
    """

    def __init__(self, limit: int = 256) -> None:
        assert limit > 0
        self._limit = limit
        self._idle: OrderedDict[tuple[Storage, str], File] = OrderedDict()
        self._pinned: dict[tuple[Storage, str], File] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    @property
    def is_crowded(self) -> bool:
        """Whether more files are pinned than there should be open at all: some should be synced, and so let go of."""
        return len(self._pinned) > self._limit

    def get(self, storage: Storage, path: str) -> File:
        """An open file, for use until the next call of the cache."""
        key = (storage, path)
        file = self._pinned.get(key) or self._idle.get(key)
        if file is None:
            file = storage.open(path)
            self._keep(key, file)
        elif key in self._idle:
            self._idle.move_to_end(key)
        return file

    def pin(self, storage: Storage, path: str) -> File:
        """An open file that stays open until `unpin`."""
        key = (storage, path)
        file = self._pinned.get(key) or self._idle.pop(key, None) or storage.open(path)
        self._pinned[key] = file
        return file

    def unpin(self, storage: Storage, path: str) -> None:
        key = (storage, path)
        file = self._pinned.pop(key, None)
        if file is not None:
            self._keep(key, file)

    def drop(self, storage: Storage, path: str) -> None:
        """Close a file that is about to be removed or replaced; fine when it is not open."""
        key = (storage, path)
        file = self._pinned.pop(key, None) or self._idle.pop(key, None)
        if file is not None:
            file.close()

    def _keep(self, key: tuple[Storage, str], file: File) -> None:
        self._idle[key] = file
        room = max(self._limit - len(self._pinned), min(self._limit, 16))
        while len(self._idle) > room:
            self._idle.popitem(last=False)[1].close()


class TailCache:
    """The bytes appended last, over all partitions, in the order of their arrival.

    Readers at the end of a log get the very objects that were written, so fan-out to many readers costs no copy and no
    system call.  First in, first out: readers follow the end, so what was appended first is also wanted last.
    """

    def __init__(self, bytes_max: int = 16 * 1024 * 1024) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._order: deque[tuple[Tail, int]] = deque()

    @property
    def size_bytes(self) -> int:
        """What it takes of the memory, with all that there is around the bytes."""
        return self._bytes

    def attach(self) -> Tail:
        """The part of one partition."""
        return Tail(self)

    def added(self, tail: Tail, size: int) -> None:
        """Account for a piece that a tail has taken in, at the cost of the oldest ones anywhere."""
        size += PIECE_BYTES
        self._order.append((tail, size))
        self._bytes += size
        while self._bytes > self._bytes_max:
            oldest, evicted = self._order.popleft()
            self._bytes -= evicted
            oldest.evict()


class Tail:
    """One partition's share of the tail cache: consecutive pieces, each the bytes of one append."""

    __slots__ = ("_cache", "_forgotten", "bases", "first", "first_offset", "pieces")

    def __init__(self, cache: TailCache) -> None:
        self._cache = cache
        self._forgotten = 0
        self.bases: list[int] = []  # base offset of each piece
        self.pieces: list[bytes] = []
        self.first = 0  # pieces before this one are evicted, and cut off the lists from time to time
        self.first_offset = -1  # base offset of the first piece, -1 when there is none

    def add(self, base_offset: int, piece: bytes) -> None:
        if self.first_offset < 0:
            self.first_offset = base_offset
        self.bases.append(base_offset)
        self.pieces.append(piece)
        self._cache.added(self, len(piece))

    def find(self, offset: int) -> int:
        """Number of the piece with the offset, which must not lie before `first_offset`."""
        return bisect_right(self.bases, offset, self.first) - 1

    def evict(self) -> None:
        """Let the oldest piece go; called by the cache, in the order in which pieces were added."""
        if self._forgotten:
            self._forgotten -= 1
        else:
            self._drop_first()

    def forget_before(self, offset: int, next_offset: int) -> None:
        """Forget the pieces that lie before an offset as a whole; the last piece ends at `next_offset`."""
        while self.first < len(self.bases):
            second = self.first + 1
            if (self.bases[second] if second < len(self.bases) else next_offset) > offset:
                return
            self._drop_first()
            # The cache still counts the piece and will evict it in its turn, as the oldest one.
            self._forgotten += 1

    def _drop_first(self) -> None:
        first = self.first
        self.pieces[first] = b""
        self.first = first = first + 1
        if first == len(self.bases):
            self.bases.clear()
            self.pieces.clear()
            self.first, self.first_offset = 0, -1
            return
        self.first_offset = self.bases[first]
        if first >= 1024 and first * 2 > len(self.bases):
            del self.bases[:first], self.pieces[:first]
            self.first = 0

    def clear(self) -> None:
        """Forget everything, because the partition goes or its end was cut off."""
        # The cache still counts these pieces and will evict each of them in its turn.
        self._forgotten += len(self.bases) - self.first
        self.bases.clear()
        self.pieces.clear()
        self.first, self.first_offset = 0, -1
