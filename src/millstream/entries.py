"""Messages on their way into a batch, and the batch that is made of them: for the SDK and for doors that speak text.

A message on its way into a batch is an *entry*: plain bytes if it has nothing but a value, `(value, key)` if it has a
key, and the fields of `Entry` otherwise.  So the common message costs no object of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from millstream.errors import InvalidArgument
from millstream.options import DEDUP_ID, LEASE_MS, MAX_RETRIES
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.records import PRIORITY_DEFAULT, encode_parts
from millstream.retries import RETRIES_MAX
from millstream.single import encode_single

__all__ = [
    "PRIORITIES",
    "AnyEntry",
    "Entry",
    "Priority",
    "alike",
    "alone_runs",
    "broker_options",
    "encode_alike",
    "encode_entries",
    "entry_bytes",
    "is_delayed",
    "lane_of",
    "message_bytes",
    "routing_key",
    "split_entries",
]

Priority: TypeAlias = int | Literal["critical", "high", "normal", "low", "background"]

#: A priority is a name, or the place of its name here.
PRIORITIES: Final = ("critical", "high", "normal", "low", "background")
#: What a value costs besides its bytes: its entry in the column of ends, and a share of the header.
ENTRY_OVERHEAD_BYTES: Final = 6

_PLAIN: Final[set[type]] = {bytes}
_KEYED: Final[set[type]] = {tuple}


class Entry(NamedTuple):
    """A message with every column it may have."""

    value: bytes | None
    key: bytes | None
    headers: bytes
    priority: int
    deliver_at_us: int
    expiry_us: int
    timestamp_us: int
    #: Its headers speak to the broker.
    options: bool = False
    #: With one it must be a batch of its own, so that the broker can recognise it by itself.
    dedup_id: bytes = b""


#: What an entry has behind its key, if it has nothing to say there.
_NOTHING: Final = Entry(None, None, b"", PRIORITY_DEFAULT, 0, 0, 0)[2:]

AnyEntry: TypeAlias = bytes | tuple[bytes | None, bytes | None] | Entry


def lane_of(priority: Priority | str) -> int:
    if type(priority) is int and 0 <= priority < len(PRIORITIES):
        return priority
    if priority in PRIORITIES:
        return PRIORITIES.index(priority)
    names = ", ".join(PRIORITIES)
    raise InvalidArgument(f"priority is one of {names}, or its number from 0 to 4, not {priority!r}")


def broker_options(dedup_id: str | None, max_retries: int | None, lease_ms: int | None) -> dict[str, str]:
    """What a publisher asks of the broker for one message, as headers."""
    options: dict[str, str] = {}
    if dedup_id is not None:
        if not dedup_id or not isinstance(dedup_id, str):
            raise InvalidArgument(f"dedup_id is a text that is not empty, not {dedup_id!r}")
        options[DEDUP_ID] = dedup_id
    if max_retries is not None:
        if type(max_retries) is not int or not 0 <= max_retries <= RETRIES_MAX:
            raise InvalidArgument(f"max_retries is a number from 0 to {RETRIES_MAX}, not {max_retries!r}")
        options[MAX_RETRIES] = str(max_retries)
    if lease_ms is not None:
        if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise InvalidArgument(f"a lease lasts between {LEASE_MS_MIN} ms and 12 hours, not {lease_ms} ms")
        options[LEASE_MS] = str(lease_ms)
    return options


def routing_key(entry: AnyEntry) -> bytes | None:
    """What decides about the partition: the key, or the dedup id, so that a repetition finds the original."""
    if type(entry) is bytes:
        return None
    if entry[1] is None and type(entry) is Entry:
        return entry.dedup_id or None
    return entry[1]  # type: ignore[return-value]


def is_delayed(entry: AnyEntry) -> bool:
    """Whether a message belongs to the log of schedules."""
    return type(entry) is Entry and entry.deliver_at_us > 0


def entry_bytes(entry: AnyEntry) -> int:
    """How much of a batch an entry takes, near enough."""
    if type(entry) is bytes:
        return len(entry) + ENTRY_OVERHEAD_BYTES
    value, key = entry[0], entry[1]
    size = len(value or b"") + len(key or b"") + 2 * ENTRY_OVERHEAD_BYTES  # type: ignore[arg-type]
    return size if len(entry) == 2 else size + len(entry[2]) + 40  # type: ignore[arg-type]


def message_bytes(entry: AnyEntry) -> int:
    """What counts of a message for the limit of its topic: value, key and headers."""
    return len(entry) if type(entry) is bytes else sum(map(len, filter(None, entry[:3])))  # type: ignore[arg-type]


def has_dedup_id(entry: AnyEntry) -> bool:
    return type(entry) is Entry and bool(entry.dedup_id)


def alone_runs(entries: Sequence[AnyEntry]) -> list[tuple[int, int]]:
    """Where to cut so that messages that must be alone are: the beginning and end of each batch."""
    runs: list[tuple[int, int]] = []
    start = 0
    # Written out: with a call for each message this takes as long as encoding them.
    for at in [at for at, entry in enumerate(entries) if type(entry) is Entry and entry.dedup_id]:
        if at > start:
            runs.append((start, at))
        runs.append((at, at + 1))
        start = at + 1
    if start < len(entries):
        runs.append((start, len(entries)))
    return runs


def split_entries(entries: Sequence[AnyEntry], *, bytes_max: int, messages_max: int) -> Iterator[tuple[int, int]]:
    """Batches to make of the entries of one partition, each as the places where it begins and ends."""
    for first, last in alone_runs(entries):
        start, size = first, 0
        for at in range(first, last):
            more = entry_bytes(entries[at])
            if at > start and (size + more > bytes_max or at - start >= messages_max):
                yield start, at
                start, size = at, 0
            size += more
        yield start, last


def encode_entries(
    entries: Sequence[AnyEntry],
    *,
    base_timestamp_us: int,
    producer: int = 0,
    first_sequence: int = 0,
    codec: int = 0,
    plain: bool = False,
) -> tuple[bytes, bytes]:
    """A batch in two pieces.  Values alone, and values with keys, need no loop over the messages.

    `plain` says that all entries are known to be bytes.
    """
    if len(entries) == 1 and type(entries[0]) is bytes and not codec:
        return encode_single(
            entries[0], base_timestamp_us=base_timestamp_us, producer=producer, first_sequence=first_sequence
        )
    kinds = _PLAIN if plain else set(map(type, entries))
    if kinds == _PLAIN:
        return encode_parts(
            entries,  # type: ignore[arg-type]
            base_timestamp_us=base_timestamp_us,
            producer=producer,
            first_sequence=first_sequence,
            codec=codec,
        )
    if kinds == _KEYED:
        columns: dict[str, Any] = dict(zip(("values", "keys"), zip(*entries, strict=True), strict=True))
    else:
        columns = _columns(entries, base_timestamp_us)
    return encode_parts(
        **columns,
        base_timestamp_us=base_timestamp_us,
        producer=producer,
        first_sequence=first_sequence,
        codec=codec,
    )


def alike(entry: AnyEntry, values: Sequence[bytes]) -> Sequence[AnyEntry]:
    """The same message with other values."""
    if isinstance(entry, bytes):
        return values
    if not isinstance(entry, Entry):
        return [(value, entry[1]) for value in values]
    others = entry[1:]
    return [Entry(value, *others) for value in values]


def encode_alike(entry: AnyEntry, values: Sequence[bytes], *, base_timestamp_us: int) -> tuple[bytes, bytes]:
    """A batch of messages that differ in nothing but their values, as `encode_entries` makes it."""
    columns = _columns([entry], base_timestamp_us)
    options = columns.pop("options", False)
    columns = {name: column * len(values) for name, column in columns.items()}
    columns["values"] = values
    return encode_parts(**columns, options=options, base_timestamp_us=base_timestamp_us)


def _columns(entries: Sequence[AnyEntry], base_timestamp_us: int) -> dict[str, Any]:
    full = [
        entry if type(entry) is Entry else (entry, None, *_NOTHING) if type(entry) is bytes else (*entry, *_NOTHING)
        for entry in entries
    ]
    values, keys, headers, priorities, due, expiry, timestamps, options, _ = zip(*full, strict=True)
    columns: dict[str, Any] = {"values": values}
    if keys.count(None) < len(keys):
        columns["keys"] = keys
    if any(headers):
        columns["headers"] = headers
    if priorities.count(PRIORITY_DEFAULT) < len(priorities):
        columns["priorities"] = priorities
    if any(due):
        columns["deliver_at_us"] = due
    if any(expiry):
        columns["expiry_us"] = expiry
    if any(options):
        columns["options"] = True
    if any(timestamps):
        columns["timestamps_us"] = [own or base_timestamp_us for own in timestamps]
    return columns
