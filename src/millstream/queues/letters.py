"""Making dead letters out of messages, reading them back, and making messages out of them again.

A dead letter is the message as it was (key, value, headers, priority, time) with headers beside its own that say where
it came from and how it died.  So it can be read by anything that reads messages, and nothing has to be looked up
elsewhere to show or replay it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from millstream.dead_letters import DEAD_LETTER_SUFFIX, DeadAttempt, DeadLetter, LetterEdit
from millstream.headers import encode_headers, readable_headers
from millstream.ids import message_id
from millstream.names import NAME_BYTES_MAX
from millstream.options import BROKER_OPTIONS, DEDUP_ID
from millstream.queues.ranges import offsets_of
from millstream.queues.records import Dead
from millstream.records import PRIORITY_DEFAULT, Batch, encode_batch

__all__ = [
    "REPLAYED_FROM",
    "REPLAYED_REASON",
    "REPLAY_ID",
    "Place",
    "StoredMessage",
    "dead_letter_batch",
    "dead_letter_topic",
    "died_in",
    "read_letter",
    "replay_batch",
    "replay_bytes",
    "replay_id_of",
    "stored_messages",
]

_PREFIX: Final = "millstream-dead-"
_REASON: Final = "millstream-dead-reason"
_ERROR: Final = "millstream-dead-error"
_GROUP: Final = "millstream-dead-group"
_TOPIC: Final = "millstream-dead-topic"
_PARTITION: Final = "millstream-dead-partition"
_OFFSET: Final = "millstream-dead-offset"
_ID: Final = "millstream-dead-id"
_TIME_MS: Final = "millstream-dead-time-ms"
_DELIVERIES: Final = "millstream-dead-deliveries"
_FAILURES: Final = "millstream-dead-failures"
_FIRST_MS: Final = "millstream-dead-first-delivery-ms"
_ATTEMPTS: Final = "millstream-dead-attempts"

#: What a replayed message says about itself: in which replay, from which dead letter, and of what that had died.
REPLAY_ID: Final = "millstream-replay-id"
REPLAYED_FROM: Final = "millstream-replayed-from"
REPLAYED_REASON: Final = "millstream-replayed-reason"
_REPLAY_HEADERS: Final = frozenset((REPLAY_ID, REPLAYED_FROM, REPLAYED_REASON))

_ERROR_BYTES_MAX: Final = 1024

_attempts_decoder: Final = msgspec.json.Decoder(list[DeadAttempt])


class Place(NamedTuple):
    """A partition, as ids need it."""

    topic: str
    partition: int
    uid: int


def dead_letter_topic(topic: str, configured: str = "") -> str:
    """Where the dead letters of a topic go.  A name that leaves no room for the suffix is cut, and marked as cut."""
    room = NAME_BYTES_MAX - len(DEAD_LETTER_SUFFIX)
    if configured or len(topic) <= room:
        return configured or topic + DEAD_LETTER_SUFFIX
    mark = f"-{crc32(topic.encode()):08x}"
    return topic[: room - len(mark)] + mark + DEAD_LETTER_SUFFIX


# --- dying -------------------------------------------------------------------------------------------------------


def dead_letter_batch(
    batches: Iterable[Batch], all_dead: Iterable[Dead], place: Place, *, group: str, now_ms: int
) -> bytearray | None:
    """The dead letters of messages, ready to be appended; `batches` are those that hold them.

    None when the log has none of them any more.  Expiry is left out: a dead letter lives as long as its topic keeps it.
    """
    shared: dict[int, bytes] = {}
    for dead in all_dead:
        shared |= dict.fromkeys(offsets_of(dead.base, dead.bits), _obituary(dead, place, group, now_ms))
    messages = [message for batch in batches for message in stored_messages(batch) if message.offset in shared]
    if not messages:
        return None
    headers = []
    for message in messages:
        own = [item for item in readable_headers(message.raw_headers) if not item[0].startswith(_PREFIX)]
        named = [(_OFFSET, str(message.offset)), (_ID, message_id(message.append_us, place.uid, message.offset))]
        headers.append(encode_headers(own) + shared[message.offset] + encode_headers(named))
    return _encode(messages, headers)


def died_in(batch: Batch, topic: str) -> bool:
    """Whether these are dead letters of a topic, as `dead_letter_batch` makes them."""
    first = next(stored_messages(batch))
    return (_TOPIC, topic.encode()) in readable_headers(first.raw_headers)


def _obituary(dead: Dead, place: Place, group: str, now_ms: int) -> bytes:
    """What is said of all that died together, as headers."""
    history = dead.history
    attempts = [
        DeadAttempt(
            consumer=attempt.consumer,
            delivered_ms=attempt.delivered_us // 1000,
            ended_ms=attempt.ended_us // 1000,
            kind=attempt.kind,
            reason=attempt.reason,
        )
        for attempt in history.attempts
    ]
    return encode_headers(
        [
            (_REASON, dead.reason),
            (_ERROR, _cut(dead.error)),
            (_GROUP, group),
            (_TOPIC, place.topic),
            (_PARTITION, str(place.partition)),
            (_TIME_MS, str(now_ms)),
            (_DELIVERIES, str(history.deliveries)),
            (_FAILURES, str(history.failures)),
            (_FIRST_MS, str(history.first_us // 1000)),
            (_ATTEMPTS, msgspec.json.encode(attempts)),
        ]
    )


class StoredMessage(NamedTuple):
    """One message with what a letter keeps of it."""

    offset: int
    append_us: int
    value: bytes | None
    key: bytes | None
    raw_headers: bytes | None
    priority: int
    timestamp_us: int


def stored_messages(batch: Batch) -> Iterator[StoredMessage]:
    """The messages of a stored batch, one after the other."""
    header = batch.header
    return map(
        StoredMessage,
        batch.offsets(),
        repeat(header.append_time_us),
        batch.values(),
        batch.keys() or repeat(None),
        batch.raw_headers() or repeat(None),
        batch.priorities() or repeat(PRIORITY_DEFAULT),
        batch.timestamps_us() or repeat(header.base_timestamp_us),
    )


def _encode(messages: Sequence[StoredMessage], headers: Sequence[bytes], *, options: bool = False) -> bytearray:
    keyed = any(message.key is not None for message in messages)
    ranked = any(message.priority != PRIORITY_DEFAULT for message in messages)
    return encode_batch(
        [message.value for message in messages],
        keys=[message.key for message in messages] if keyed else None,
        headers=headers,
        priorities=[message.priority for message in messages] if ranked else None,
        timestamps_us=[message.timestamp_us for message in messages],
        base_timestamp_us=messages[0].timestamp_us,
        options=options,
    )


def _cut(error: str) -> str:
    return error.encode()[:_ERROR_BYTES_MAX].decode(errors="ignore")


# --- looking -----------------------------------------------------------------------------------------------------


def read_letter(message: StoredMessage, place: Place) -> DeadLetter:
    """A message of a dead letter topic as the letter it is, with its whole value.

    One that somebody published there by hand is a letter, too; it says nothing of its death.
    """
    own: list[tuple[str, bytes]] = []
    dead: dict[str, str] = {}
    for name, content in readable_headers(message.raw_headers):
        if name.startswith(_PREFIX):
            dead[name] = content.decode("utf-8", "replace")
        else:
            own.append((name, content))
    letter_id = message_id(message.append_us, place.uid, message.offset)
    return DeadLetter(
        id=letter_id,
        topic=place.topic,
        partition=place.partition,
        offset=message.offset,
        original_id=dead.get(_ID) or letter_id,
        original_topic=dead.get(_TOPIC) or place.topic.removesuffix(DEAD_LETTER_SUFFIX),
        original_partition=_number(dead, _PARTITION, place.partition),
        original_offset=_number(dead, _OFFSET, message.offset),
        timestamp_us=message.timestamp_us,
        key=message.key,
        value=message.value,
        value_bytes=len(message.value or b""),
        headers=own,
        priority=message.priority,
        group=dead.get(_GROUP, ""),
        reason=dead.get(_REASON, ""),
        error=dead.get(_ERROR, ""),
        deliveries=_number(dead, _DELIVERIES, 0),
        failures=_number(dead, _FAILURES, 0),
        first_delivery_ms=_number(dead, _FIRST_MS, 0),
        attempts=_read_attempts(dead.get(_ATTEMPTS, "[]")),
        dead_ms=_number(dead, _TIME_MS, message.append_us // 1000),
    )


def _number(headers: Mapping[str, str], name: str, fallback: int) -> int:
    # Headers are anybody's to write: what is not as we wrote it must not hide the message.
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else fallback


def _read_attempts(text: str) -> list[DeadAttempt]:
    try:
        return _attempts_decoder.decode(text)
    except msgspec.DecodeError:
        return []


# --- returning ---------------------------------------------------------------------------------------------------


def replay_batch(letters: Sequence[DeadLetter], *, replay_id: str, edit: LetterEdit) -> bytearray:
    """New messages out of dead letters, ready to be appended.

    Key, value, headers, priority and time of making are the original's, unless edited; nothing of its failures is left.
    An option in the headers (its own lease time or number of retries) counts again.
    """
    messages = [
        StoredMessage(
            letter.offset,
            0,
            letter.value if edit.value is None else edit.value,
            letter.key,
            None,
            letter.priority,
            letter.timestamp_us,
        )
        for letter in letters
    ]
    headers = [_replay_headers(letter, replay_id, edit) for letter in letters]
    options = any(name in BROKER_OPTIONS for items in headers for name, _ in items)
    return _encode(messages, [encode_headers(items) for items in headers], options=options)


def replay_bytes(letter: DeadLetter, edit: LetterEdit) -> int:
    """The size of the message that `replay_batch` makes of a letter, without what a replay adds to its headers."""
    value = letter.value if edit.value is None else edit.value
    size = len(value or b"") + len(letter.key or b"")
    gone = {*edit.remove_headers, *edit.set_headers}
    size += sum(len(name.encode()) + len(content) for name, content in letter.headers if name not in gone)
    return size + sum(len(name.encode()) + len(content.encode()) for name, content in edit.set_headers.items())


def _replay_headers(letter: DeadLetter, replay_id: str, edit: LetterEdit) -> list[tuple[str, str | bytes]]:
    # Not the dedup id: a replay is a repetition that somebody wants.
    gone = {*_REPLAY_HEADERS, DEDUP_ID, *edit.remove_headers, *edit.set_headers}
    items: list[tuple[str, str | bytes]] = [(name, value) for name, value in letter.headers if name not in gone]
    items += edit.set_headers.items()
    items += [(REPLAY_ID, replay_id), (REPLAYED_FROM, letter.id)]
    if letter.reason:
        items.append((REPLAYED_REASON, letter.reason))
    return items


def replay_id_of(letter: DeadLetter) -> str:
    """The replay that had brought this message back before it died again; empty when there was none."""
    return next((value.decode("utf-8", "replace") for name, value in letter.headers if name == REPLAY_ID), "")
