"""Which messages somebody looks for.  A batch in which nothing can match is told by one search, and is not opened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument
from millstream.headers import readable_headers
from millstream.records import PRIORITY_DEFAULT, Batch, Columns
from millstream.wire.message_calls import BrowseMessages

__all__ = ["MessageFilter", "Row", "row_at"]

_HEADERS: Final = int(Columns.HEADERS)


class Row(NamedTuple):
    """One message of a batch."""

    offset: int
    value: bytes | None
    key: bytes | None
    raw_headers: bytes | None
    timestamp_us: int
    priority: int
    expiry_us: int


class MessageFilter:
    """The conditions of a call that are about single messages."""

    def __init__(self, call: BrowseMessages) -> None:
        self._key = call.key
        name, equals, content = call.header.partition("=")
        if call.header and not name:
            raise InvalidArgument(f"header is a name or name=value, not {call.header[:80]!r}")
        try:
            self._text = call.text.encode()
            self._header = name.encode()
            self._content = content.encode() if equals else None
        except UnicodeEncodeError:
            raise InvalidArgument("text and header are Unicode text; half of a surrogate pair is none") from None
        self._name = name

    def rows(self, batch: Batch, *, reverse: bool) -> Iterator[Row]:
        """The messages of a batch that match.  Lazily: of thousands mostly a few are wanted."""
        if not self._may_match(batch):
            return
        columns = _Columns(batch)
        values, keys, raw_headers = columns.values, columns.keys, columns.raw_headers
        places: Iterable[int] = reversed(range(batch.count)) if reverse else range(batch.count)
        if self._key is not None and keys is not None:
            places = (place for place in places if keys[place] == self._key)
        if self._text:
            places = (place for place in places if self._text in (values[place] or b""))
        if self._name and raw_headers is not None:
            places = (place for place in places if self._has_header(raw_headers[place]))
        yield from map(columns.row, places)

    def _may_match(self, batch: Batch) -> bool:
        at, block = batch.sections, batch.block
        assert isinstance(block, bytes), "what is read from a log is bytes"
        if self._key is not None:
            keys = batch.keys()
            if keys is None or self._key not in keys:
                return False
        if self._header and not batch.header.flags & _HEADERS:
            return False
        if self._header and block.find(self._header, at.headers, at.values) < 0:
            return False
        return not self._text or block.find(self._text, at.values, at.values + at.value_bytes) >= 0

    def _has_header(self, raw: bytes | None) -> bool:
        content = self._content
        return any(
            name == self._name and (content is None or value == content) for name, value in readable_headers(raw)
        )


def row_at(batch: Batch, offset: int) -> Row | None:
    """The message of a batch that has an offset."""
    offsets = batch.offsets()
    place = bisect_left(offsets, offset)
    return _Columns(batch).row(place) if place < len(offsets) and offsets[place] == offset else None


class _Columns:
    """A batch, opened once."""

    def __init__(self, batch: Batch) -> None:
        self.values, self.keys, self.raw_headers = batch.values(), batch.keys(), batch.raw_headers()
        self._offsets, self._timestamps = batch.offsets(), batch.timestamps_us()
        self._priorities, self._expiry = batch.priorities(), batch.expiry_us()
        self._base_timestamp_us = batch.header.base_timestamp_us

    def row(self, place: int) -> Row:
        return Row(
            self._offsets[place],
            self.values[place],
            self.keys[place] if self.keys else None,
            self.raw_headers[place] if self.raw_headers else None,
            self._timestamps[place] if self._timestamps else self._base_timestamp_us,
            self._priorities[place] if self._priorities else PRIORITY_DEFAULT,
            self._expiry[place] if self._expiry else 0,
        )
