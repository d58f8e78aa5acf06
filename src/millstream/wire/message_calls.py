"""The control calls that look at messages without consuming them, and their answers.

A call that looks through a topic works for about a second and then answers with what it has and with `after`: where the
next call goes on.  Byte strings (keys, values, header values) are base64 in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.errors import InvalidArgument
from millstream.wire.forms import AnswerForm, CallForm
from millstream.wire.letter_calls import SHOWN_BYTES, WHOLE_VALUES

__all__ = [
    "SHOWN_BYTES",
    "WHOLE_VALUES",
    "BrowseMessages",
    "FindMessage",
    "MessageInfo",
    "MessagePage",
    "SummarizeTopics",
    "TopicSummaries",
    "TopicSummary",
    "cursor_text",
    "parse_cursor",
]

#: As long as a number in a cursor gets: offsets have 48 bits.
_DIGITS_MAX = 15


# --- messages ----------------------------------------------------------------------------------------------------


class BrowseMessages(CallForm, tag="message.browse"):
    """Answers with MessagePage: messages of a topic in the order they were stored, or the other way round.

    All conditions that are set must hold.
    """

    topic: str
    #: None = all of them, merged by the time they were stored.
    partition: int | None = None
    #: Only from this offset on, in every partition looked at.
    offset: int | None = None
    #: When they were stored: from `from_ms` on and before `until_ms`; 0 = no limit.
    from_ms: int = 0
    until_ms: int = 0
    key: bytes | None = None
    #: `name`, or `name=value`.
    header: str = ""
    #: Contained in the value.
    text: str = ""
    newest_first: bool = False
    limit: int = 100
    after: str = ""
    #: How much of each value to send.
    value_bytes: int = SHOWN_BYTES
    #: When there is nothing to show, wait this long for something to come; not with `newest_first`.
    wait_ms: int = 0


class MessageInfo(AnswerForm):
    """One message, wherever it is."""

    id: str
    topic: str
    partition: int
    #: If the message is not due yet, its offset among the scheduled messages.
    offset: int
    key: bytes | None
    #: At most as much of the value as was asked for; `size` says how long it is.
    value: bytes | None
    size: int
    headers: list[tuple[str, bytes]]
    #: When the message was made, by its producer's clock.
    timestamp_ms: int
    #: When the message was stored.
    append_time_ms: int
    priority: int
    #: 0 = none.
    expiry_ms: int = 0
    #: When a scheduled message will be delivered; 0 = it is there already.
    deliver_at_ms: int = 0


class MessagePage(AnswerForm):
    messages: list[MessageInfo]
    #: Where to go on; empty = everything was looked at.
    after: str = ""
    #: As `after`, for a call that is made later to see what came meanwhile; empty with `newest_first`.
    tail: str = ""


class FindMessage(CallForm, tag="message.find"):
    """Answers with MessageInfo, its value whole.  Also finds what is scheduled and not due yet."""

    id: str


def cursor_text(offsets: Mapping[int, int]) -> str:
    """Where to go on in each partition, as `partition:offset` pairs."""
    return ",".join(f"{number}:{offset}" for number, offset in sorted(offsets.items()))


def parse_cursor(text: str) -> dict[int, int]:
    offsets: dict[int, int] = {}
    for part in text.split(",") if text else ():
        number, _, offset = part.partition(":")
        if not (_is_number(number) and _is_number(offset)):
            raise InvalidArgument(f"after={text[:80]!r} is not what a call of this family has answered")
        offsets[int(number)] = int(offset)
    return offsets


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX


# --- topics ------------------------------------------------------------------------------------------------------


class SummarizeTopics(CallForm, tag="topic.summaries"):
    """Answers with TopicSummaries: what somebody who looks after the broker wants to see of many topics at once."""

    pattern: str | None = None
    offset: int = 0
    limit: int = 100
    include_dead_letters: bool = False


class TopicSummary(AnswerForm):
    name: str
    partition_count: int
    messages: int
    size_bytes: int
    #: Unsettled messages in the queue group that has the most: ready + leased + waiting there.
    depth: int
    #: In all of its queue groups.
    leased: int
    waiting: int
    #: How many groups read it, as a stream or as a queue.
    groups: int
    #: Messages that died and were neither replayed nor purged.
    dead_letters: int
    created_ms: int
    #: Why a part of the topic cannot be opened now; that part is not counted then.
    failed: str | None = None


class TopicSummaries(AnswerForm):
    topics: list[TopicSummary]
    #: How many match.
    total: int
