"""Messages that wait for company: per partition a pile of entries, sealed into a batch by bytes, count or time.

The fast path of a producer is three steps on a pile (take from `left`, compare, append) and takes no lock: appending to
a list is atomic, and `left` only ever says "look closer".  Everything else is behind the *gate*: while it is closed the
producer sees piles whose `left` is 0, so that the next message takes the slow path, wakes the background work, and
reports an error or a shutdown.  An idle producer therefore costs nothing, and the fast path needs no flags.

`left` counts down bytes, with a surcharge per message so that it also reaches 0 before the pile has too many messages.
It never exceeds the largest size that a message may have, so the fast path lets no message pass that is too large.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from millstream.client.delivery import Delivery, Line
from millstream.entries import AnyEntry, alone_runs, encode_entries, entry_bytes, is_delayed, routing_key
from millstream.errors import PartitionNotFound, PayloadTooLarge
from millstream.ids import SCHEDULES
from millstream.partitioning import key_partition

__all__ = ["Accumulator", "Pile"]

_CLOSED_LEFT: Final = 0


class Pile:
    """The unsealed messages of one partition."""

    __slots__ = (
        "_granted",
        "_known_bytes",
        "_known_count",
        "append",
        "entries",
        "left",
        "line",
        "surcharge",
        "tickets",
    )

    def __init__(self, line: Line | None, surcharge: int = 0) -> None:
        self.line = line
        self.surcharge = surcharge
        #: Never replaced: the fast path of another thread may be about to append to it.
        self.entries: list[AnyEntry] = []
        #: One per entry, if the owner asks for outcomes message by message.
        self.tickets: list[Any] = []
        self.left = _CLOSED_LEFT
        self._granted = 0
        self._known_bytes = 0
        self._known_count = 0

    def measure(self) -> int:
        """The bytes in the pile, without looking at each of them."""
        count = len(self.entries)
        used = self._granted - self.left - self.surcharge * (count - self._known_count)
        self._known_bytes += max(0, used)
        self._known_count = count
        self._granted = self.left
        return self._known_bytes

    def recount(self) -> None:
        """Look at each of them, and have a closer look at the next."""
        self._known_bytes = sum(map(entry_bytes, self.entries))
        self._known_count = len(self.entries)
        self.grant(_CLOSED_LEFT)

    def grant(self, left: int) -> None:
        self.left = self._granted = left

    def reset(self, left: int) -> None:
        self._known_bytes = self._known_count = 0
        self.grant(left)


class Accumulator:
    """The piles of one producer, and the choice of a partition for each message."""

    __slots__ = (
        "_always_closed",
        "_closed_pile",
        "_codec",
        "_delivery",
        "_next",
        "_open_piles",
        "_partition",
        "_producer",
        "_schedule_piles",
        "_surcharge",
        "batch_bytes",
        "batch_messages",
        "message_bytes_max",
        "piles",
        "special",
        "sticky",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        delivery: Delivery,
        *,
        partitions: int,
        producer: int,
        batch_bytes: int,
        batch_messages: int,
        buffer_bytes: int,
        message_bytes_max: int,
        codec: int = 0,
        partition: int | None = None,
        lingers: bool = True,
    ) -> None:
        self.topic = topic
        self._delivery = delivery
        self._producer = producer
        # All piles together stay within half of the buffer, however many partitions there are.
        self.batch_bytes = max(1, min(batch_bytes, buffer_bytes // (2 * partitions)))
        self.batch_messages = max(1, batch_messages)
        self.message_bytes_max = message_bytes_max
        self._surcharge = -(-self.batch_bytes // self.batch_messages)
        self._codec = codec
        self._always_closed = not lingers  # every message is looked at, and sent
        #: Set before the first entry that is not plain bytes; never taken back, one may still be on its way.
        self.special = False
        self._closed_pile = Pile(None)
        self._partition = partition
        self._open_piles: list[Pile] = []
        #: Delayed messages travel apart from the others, in batches for the log of schedules.
        self._schedule_piles: dict[int, Pile] = {}
        self.grow(partitions)
        self._next = random.randrange(partitions) if partition is None else partition
        #: What the fast path looks at; see the module's docstring.
        self.sticky = self._closed_pile
        self.piles = [self._closed_pile] * partitions

    def grow(self, partitions: int) -> None:
        """The topic has more partitions now."""
        for number in range(len(self._open_piles), partitions):
            self._open_piles.append(self._open_pile(number))

    def limit(self, message_bytes_max: int) -> None:
        """A message of the topic may have this many bytes now."""
        if message_bytes_max < self.message_bytes_max:
            for pile in self._all_piles():
                pile.measure()
                pile.grant(_CLOSED_LEFT)  # which was granted for larger ones: the next message is looked at
        self.message_bytes_max = message_bytes_max

    def _open_pile(self, number: int) -> Pile:
        pile = Pile(self._delivery.open_line(number, self._producer), self._surcharge)
        pile.reset(self._grant(self.batch_bytes))
        return pile

    def _grant(self, room: int) -> int:
        """How much of the room in a pile is filled without a closer look."""
        return min(room, self.message_bytes_max)

    # --- the gate ------------------------------------------------------------------------------------------------

    def open_gate(self) -> None:
        if not self._always_closed:
            self.sticky = self._open_piles[self._next]
            self.piles = self._open_piles if self._partition is None else [self.sticky] * len(self._open_piles)

    def close_gate(self) -> None:
        self.sticky = self._closed_pile
        self.piles = [self._closed_pile] * len(self._open_piles)

    @property
    def gate_open(self) -> bool:
        return self.sticky is not self._closed_pile

    # --- in ------------------------------------------------------------------------------------------------------

    def choose(self, entry: AnyEntry, partition: int | None) -> Pile:
        """The pile a message belongs to."""
        number = self._choose(entry, partition)
        if not is_delayed(entry):
            return self._open_piles[number]
        if number not in self._schedule_piles:
            self._schedule_piles[number] = self._open_pile(number | SCHEDULES)
        return self._schedule_piles[number]

    def _choose(self, entry: AnyEntry, partition: int | None) -> int:
        """The partition asked for, the key's, or the one that is being filled."""
        if partition is None:
            key = routing_key(entry)
            if key is None or self._partition is not None:
                return self._next
            return key_partition(key, len(self._open_piles))
        if not 0 <= partition < len(self._open_piles):
            raise PartitionNotFound(
                f"topic {self.topic!r} has partitions 0 to {len(self._open_piles) - 1}, not {partition}"
            )
        return partition

    def check_size(self, entry: AnyEntry) -> None:
        size = len(entry) if isinstance(entry, bytes) else sum(map(len, filter(None, entry[:3])))
        if size > self.message_bytes_max:
            raise PayloadTooLarge(f"the message has {size} bytes, topic {self.topic!r} allows {self.message_bytes_max}")

    def take(self, entry: AnyEntry, partition: int | None) -> bool:
        """As `put`, for the fast path of a producer: not while the gate is closed."""
        return self.gate_open and self.put(entry, partition)

    def put(self, entry: AnyEntry, partition: int | None, ticket: Any = None) -> bool:
        """Put a message on its pile, if there is nothing to look at more closely: then `add` is for it.

        Takes no lock, so it makes nothing that is not there.
        """
        if partition is not None and partition >= len(self._open_piles):
            return False
        number = self._choose(entry, partition)
        if type(entry) is bytes or not is_delayed(entry):
            pile = self._open_piles[number]
        elif number in self._schedule_piles:
            pile = self._schedule_piles[number]
        else:
            return False
        if type(entry) is not bytes:
            self.special = True
        left = pile.left - entry_bytes(entry) - self._surcharge
        if left <= 0:
            return False
        pile.left = left
        pile.entries.append(entry)
        if ticket is not None:
            pile.tickets.append(ticket)
        return True

    def add(
        self, entry: AnyEntry, partition: int | None = None, *, now_us: int, now_ms: int, ticket: Any = None
    ) -> None:
        """Put a message on its pile; seals what is full, before or after."""
        if type(entry) is not bytes:
            self.special = True
        pile = self.choose(entry, partition)
        size = entry_bytes(entry)
        while pile.entries and pile.measure() + size > self.batch_bytes:
            self._seal_full(pile, now_us, now_ms)
            pile = self.choose(entry, partition)
        pile.entries.append(entry)
        if ticket is not None:
            pile.tickets.append(ticket)
        pile.left -= size + self._surcharge
        room = self.batch_bytes - pile.measure()
        vacant = self.batch_messages - len(pile.entries)
        if room <= 0 or vacant <= 0:
            self._seal_full(pile, now_us, now_ms)
        else:
            pile.grant(self._grant(min(room, vacant * self._surcharge)))

    def _seal_full(self, pile: Pile, now_us: int, now_ms: int) -> None:
        self.seal(pile, now_us=now_us, now_ms=now_ms)
        if pile is self._open_piles[self._next] or pile is self._schedule_piles.get(self._next):
            self._move_on()

    def _move_on(self) -> None:
        """Messages without a key go to one partition until its batch is sealed, then to the next."""
        if self._partition is None:
            self._next = (self._next + 1) % len(self._open_piles)
            if self.gate_open:
                self.sticky = self._open_piles[self._next]

    # --- out -----------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return not any(pile.entries for pile in self._all_piles())

    def _all_piles(self) -> Iterator[Pile]:
        return chain(self._open_piles, self._schedule_piles.values())

    def seal(self, pile: Pile, *, now_us: int, now_ms: int) -> None:
        """Turn a pile into a batch, or several if some message must be alone.  Entries that arrive meanwhile stay."""
        count = len(pile.entries)
        if not count:
            return
        entries = pile.entries[:count]
        tickets = pile.tickets[:count]
        line = pile.line
        assert line is not None
        try:
            pile.reset(self._grant(self.batch_bytes))
            for start, end in alone_runs(entries) if self.special else ((0, count),):
                head, tail = encode_entries(
                    entries[start:end],
                    base_timestamp_us=now_us,
                    producer=line.producer,
                    first_sequence=line.next_sequence,
                    codec=self._codec,
                    plain=not self.special,
                )
                size = end - start
                self._delivery.put(line, head, tail, size, now_ms, tickets[start:end] or None)
                # At once, and not by a call: an exception of a signal's handler finds a message here or there.
                del pile.entries[:size], pile.tickets[:size]
        except BaseException:
            pile.recount()
            raise

    def seal_all(self, *, now_us: int, now_ms: int) -> int:
        """Seal every pile; returns how many batches that made."""
        sealed = 0
        for pile in self._all_piles():
            if pile.entries:
                self.seal(pile, now_us=now_us, now_ms=now_ms)
                sealed += 1
        if sealed:
            self._move_on()
        return sealed
