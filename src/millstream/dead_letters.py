"""Dead letters as values: what the broker, the protocol, the SDK and the command line tell each other about them.

A dead letter is a message that a queue group has given up on.  It lies on the dead letter topic with everything an
operator needs to know; how it is made and read back is in queues/letters.py.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from millstream.errors import InvalidArgument

__all__ = [
    "AGES",
    "DEAD_LETTER_GROUP",
    "DEAD_LETTER_SUFFIX",
    "REASONS",
    "DeadAttempt",
    "DeadLetter",
    "LetterEdit",
    "LetterFilter",
    "LetterStatistics",
    "ReplayFailure",
    "ReplayInfo",
    "ReplayPlan",
]

DEAD_LETTER_SUFFIX: Final = ".dlq"
#: The queue group of a dead letter topic in which a letter that was replayed or purged is settled.
DEAD_LETTER_GROUP: Final = "dlq"

REJECTED: Final = "REJECTED"
MAX_RETRIES_EXCEEDED: Final = "MAX_RETRIES_EXCEEDED"
#: Handed out again and again and never settled: its consumers go away with it.
MAX_DELIVERIES_EXCEEDED: Final = "MAX_DELIVERIES_EXCEEDED"
TOTAL_TIMEOUT_EXCEEDED: Final = "TOTAL_TIMEOUT_EXCEEDED"
TTL_EXPIRED: Final = "TTL_EXPIRED"
POISON: Final = "POISON"
REASONS: Final = (
    REJECTED,
    MAX_RETRIES_EXCEEDED,
    MAX_DELIVERIES_EXCEEDED,
    TOTAL_TIMEOUT_EXCEEDED,
    TTL_EXPIRED,
    POISON,
)

_HOUR_MS: Final = 3_600_000
#: How old letters are, in words and from the youngest on.
AGES: Final = (
    ("under 1 h", _HOUR_MS),
    ("1 h to 1 d", 24 * _HOUR_MS),
    ("1 d to 7 d", 7 * 24 * _HOUR_MS),
    ("over 7 d", None),
)
#: Different error texts that statistics tell apart; errors that carry a number each would have no end.
_ERRORS_MAX: Final = 200
_OTHER_ERRORS: Final = "(other errors)"


class DeadAttempt(msgspec.Struct, kw_only=True, frozen=True):
    """One delivery that did not succeed."""

    consumer: str
    delivered_ms: int
    ended_ms: int
    #: nack, reject, timeout or returned (its consumer went away).
    kind: str
    reason: str = ""


class DeadLetter(msgspec.Struct, kw_only=True):
    """A message that died: where it lies now, where it came from, and why."""

    id: str
    topic: str
    partition: int
    offset: int
    original_id: str
    original_topic: str
    original_partition: int
    original_offset: int
    #: When the message was made, by its producer's clock.
    timestamp_us: int
    key: bytes | None
    #: In lists only the beginning of the value; `value_bytes` says how long it is.
    value: bytes | None
    value_bytes: int
    #: The headers of the original message.
    headers: list[tuple[str, bytes]]
    priority: int
    group: str
    reason: str
    error: str
    #: How often the message was delivered.
    deliveries: int
    #: How often that failed.
    failures: int
    first_delivery_ms: int
    #: The last attempts.
    attempts: list[DeadAttempt]
    dead_ms: int
    #: Retention may remove it after this; 0 = never.
    kept_until_ms: int = 0

    @property
    def text(self) -> str:
        """The value as text.  Raises InvalidArgument if it is not UTF-8."""
        try:
            return (self.value or b"").decode()
        except UnicodeDecodeError as problem:
            raise InvalidArgument(f"the value of dead letter {self.id} is not UTF-8 text: {problem}") from None


# Not like other structs of the protocol, where unknown fields are ignored: a filter that is not understood would match
# everything, and somebody may be about to purge what it matches.
class LetterFilter(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which dead letters; all conditions that are set must hold."""

    #: The topic they came from, or a pattern such as `orders.#`.
    topic: str = ""
    group: str = ""
    reason: str = ""
    #: A part of the error's text; upper and lower case are the same.
    error: str = ""
    #: Headers of the original and their values; None = whatever its value.
    headers: dict[str, str | None] = {}
    key: str | None = None
    #: When they died: from `since_ms` on and before `until_ms`; 0 = no limit.
    since_ms: int = 0
    until_ms: int = 0

    @property
    def is_everything(self) -> bool:
        return self == LetterFilter()


class LetterEdit(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is different about a message when it is replayed."""

    #: None = as it was.
    value: bytes | None = None
    set_headers: dict[str, str] = {}
    remove_headers: list[str] = []


class LetterStatistics(msgspec.Struct, kw_only=True):
    """Counts of dead letters; partial counts can be added up."""

    total: int = 0
    #: Bytes of the values.
    bytes: int = 0
    by_reason: dict[str, int] = {}
    by_topic: dict[str, int] = {}
    by_group: dict[str, int] = {}
    by_error: dict[str, int] = {}
    by_age: dict[str, int] = {}
    #: When the first of them died; 0 if there are none.
    oldest_ms: int = 0
    #: When the last of them died; 0 if there are none.
    newest_ms: int = 0

    def count(self, letter: DeadLetter, *, now_ms: int) -> None:
        self.add(
            LetterStatistics(
                total=1,
                bytes=letter.value_bytes,
                by_reason={letter.reason: 1},
                by_topic={letter.original_topic: 1},
                by_group={letter.group: 1},
                by_error={letter.error: 1} if letter.error else {},
                by_age={_age(now_ms - letter.dead_ms): 1},
                oldest_ms=letter.dead_ms,
                newest_ms=letter.dead_ms,
            )
        )

    def add(self, other: LetterStatistics) -> None:
        self.total += other.total
        self.bytes += other.bytes
        for name in ("by_reason", "by_topic", "by_group", "by_error", "by_age"):
            counts = getattr(self, name)
            for what, number in getattr(other, name).items():
                known = name != "by_error" or what in counts or len(counts) < _ERRORS_MAX
                label = what if known else _OTHER_ERRORS
                counts[label] = counts.get(label, 0) + number
        if other.total:
            self.oldest_ms = min(self.oldest_ms or other.oldest_ms, other.oldest_ms)
            self.newest_ms = max(self.newest_ms, other.newest_ms)


def _age(age_ms: int) -> str:
    return next(label for label, limit_ms in AGES if limit_ms is None or age_ms < limit_ms)


class ReplayPlan(msgspec.Struct, kw_only=True):
    """What a replay would do."""

    total: int = 0
    bytes: int = 0
    #: How many messages go to which topic.
    targets: dict[str, int] = {}
    #: Letters that would stay where they are, because there is nowhere to send them.
    stuck: int = 0
    #: The first letters in the order in which they would go out.
    first: list[str] = []
    #: When the oldest of the messages was made.
    oldest_ms: int = 0
    #: When the newest of the messages was made.
    newest_ms: int = 0
    #: How long the replay will take at the rate that was asked for; 0 = as long as it takes.
    duration_ms: int = 0
    warnings: list[str] = []


class ReplayFailure(msgspec.Struct, kw_only=True):
    """A letter that could not be sent and stays where it is."""

    id: str
    reason: str
    retriable: bool


class ReplayInfo(msgspec.Struct, kw_only=True):
    """How far a replay is, or its report when it is over."""

    id: str
    status: Literal["running", "paused", "completed", "failed", "aborted"]
    #: Why the replay is paused, has failed or had nothing to send.
    reason: str = ""
    target: str = ""
    rate: float = 0
    total: int = 0
    replayed: int = 0
    failed: int = 0
    #: Replayed messages that have become dead letters again.
    relapsed: int = 0
    created_ms: int = 0
    finished_ms: int = 0
    #: The first hundred failures.
    failures: list[ReplayFailure] = []

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "aborted")
