"""Publishing one batch at a time, so that a retry is recognised: numbers for `publish`, without a socket.

Publishes that run side by side (threads) must not share a sequence of numbers, or a lost connection could bring them
back in another order.  So each borrows an identity of its own for as long as it takes; one thread alone always gets the
same one back.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, cast

from millstream.client.arguments import as_list
from millstream.client.delivery import renumbered
from millstream.client.messages import Message, Outgoing, TopicPartition
from millstream.client.metadata import Topic
from millstream.client.spans import traced
from millstream.client.values import Value, encode_call, make_entry
from millstream.entries import AnyEntry, Entry, routing_key, split_entries
from millstream.errors import InvalidArgument, MillstreamError
from millstream.wire.calls import DescribeBroker
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import ACKS, FSYNC_POLICIES

__all__ = [
    "PLACES_MAX",
    "SEQUENCE_MASK",
    "Attempt",
    "Goodbye",
    "Identity",
    "acks_number",
    "as_entries",
    "encode_goodbye",
    "fsync_number",
    "plan_batches",
]

#: Numbers of messages start again at 0 after this one.
SEQUENCE_MASK: Final = 0xFFFF_FFFF
#: An identity that has counted in so many partitions is let go of: a program may publish to ever new topics.
PLACES_MAX: Final = 10_000
#: `publish_many` splits larger amounts; well below the limit of a frame.
_BATCH_BYTES: Final = 1024 * 1024
_BATCH_MESSAGES: Final = 10_000


class Identity:
    """A producer identity and how far it has counted in each partition."""

    __slots__ = ("producer", "sequences")

    def __init__(self, producer: int) -> None:
        self.producer = producer
        self.sequences: dict[TopicPartition, int] = {}


class Attempt:
    """A batch that was not stored at the first try."""

    __slots__ = ("doubtful", "fsync", "head", "identity", "partition", "refusal", "sequence", "tail", "topic")

    def __init__(
        self, topic: Topic, partition: int, fsync: int, head: bytes, tail: bytes, identity: Identity, sequence: int
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.fsync = fsync
        self.head = head
        self.tail = tail
        self.identity = identity
        self.sequence = sequence
        #: It may be stored although no answer said so.
        self.doubtful = False
        #: Why it was tried again, if the broker has said so.
        self.refusal: MillstreamError | None = None

    def renew(self, identity: Identity) -> None:
        """The broker does not remember what it confirmed: start counting again under another identity."""
        self.identity, self.sequence = identity, 0
        self.head, self.tail = renumbered(self.head, self.tail, producer=identity.producer, first_sequence=0)


def acks_number(acks: str) -> int:
    if acks not in ACKS:
        raise InvalidArgument(f"acks is one of {', '.join(ACKS)}, not {acks!r}")
    return ACKS.index(acks)


def fsync_number(fsync: str | None) -> int:
    if fsync is None:
        return 0
    if fsync not in FSYNC_POLICIES or not fsync:
        raise InvalidArgument(f"fsync is one of {', '.join(FSYNC_POLICIES[1:])}, not {fsync!r}")
    return FSYNC_POLICIES.index(fsync)


#: Everything about a message but its value, key and headers.
_OPTIONS: Final = tuple(name for name in Outgoing.__struct_fields__ if name not in ("value", "key", "headers"))
_options_of: Final = attrgetter(*_OPTIONS)


def as_entries(messages: Iterable[Value | Outgoing | Message]) -> list[tuple[AnyEntry, int | None]]:
    """What `publish_many` is given, each with the partition it asks for.  What is no message stops all of them."""
    if isinstance(messages, str | bytes | bytearray | memoryview | Outgoing | Message):
        raise InvalidArgument("publish_many takes a list of messages; publish is for a single one")
    return [_as_entry(item) for item in as_list("messages", messages)]


def _as_entry(item: Value | Outgoing | Message) -> tuple[AnyEntry, int | None]:
    if isinstance(item, Outgoing):
        options = dict(zip(_OPTIONS, _options_of(item), strict=True))
        return make_entry(item.value, item.key, traced(item.headers), **options), item.partition
    if isinstance(item, Message):
        headers = traced(dict(item.header_items()) or None)
        entry = make_entry(item.value, item.key, headers, timestamp=item.timestamp, priority=item.priority)
        return cast("Entry", entry)._replace(expiry_us=item.expiry_us), None
    return make_entry(item, None, traced(None)), None


def plan_batches(
    topic: Topic, entries: Iterable[tuple[AnyEntry, int | None]]
) -> Iterable[tuple[int, list[int], list[AnyEntry]]]:
    """Batches to publish: partition, positions in the input, entries.  Values without a key stay together, in order.

    Each entry comes with the partition it asks for.
    """
    piles: dict[int, tuple[list[int], list[AnyEntry]]] = {}
    keyless: int | None = None
    for index, (entry, partition) in enumerate(entries):
        topic.check_size(entry)
        if partition is None and routing_key(entry) is None:
            if keyless is None:
                keyless = topic.choose(b"", None)
            partition = keyless
        chosen = topic.choose(entry, partition)
        if chosen not in piles:
            piles[chosen] = [], []
        indexes, pile = piles[chosen]
        indexes.append(index)
        pile.append(entry)
    for partition, (indexes, pile) in piles.items():
        for first, last in split_entries(pile, bytes_max=_BATCH_BYTES, messages_max=_BATCH_MESSAGES):
            yield partition, indexes[first:last], pile[first:last]


def encode_goodbye(correlation: int) -> bytes:
    """A call whose answer, whatever it says, proves that the broker has taken everything that was sent before it."""
    return encode_frame(FrameType.CALL, encode_call(DescribeBroker()), correlation)


class Goodbye:
    """Of one connection without confirmations: whether the broker is to be asked if it has taken everything, was, and
    said so."""

    __slots__ = ("asked", "heard", "wanted")

    def __init__(self) -> None:
        self.wanted = self.asked = self.heard = False
