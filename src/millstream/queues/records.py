"""The values of queues: what a ledger is told, what it answers, and what it asks of the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from millstream.policies import QueuePolicy
from millstream.queues.lane_map import LaneMap
from millstream.queues.ranges import offsets_of
from millstream.records import PRIORITY_DEFAULT
from millstream.retries import RetryPolicy, parse_retry
from millstream.topics import TopicConfig, parse_lanes

__all__ = [
    "ATTEMPTS_KEPT",
    "DONE",
    "FRESH",
    "INVALID",
    "NEVER",
    "PLAIN",
    "RETRIED",
    "Attempt",
    "BatchView",
    "Counts",
    "Dead",
    "Delivery",
    "Fact",
    "History",
    "LaneMap",
    "LaneStatistics",
    "Lease",
    "LogSource",
    "Outcome",
    "Parcel",
    "Reason",
    "Result",
    "Rules",
    "Situation",
    "Terms",
    "Whereabouts",
]

#: The last attempts tell how a message fails; a thousand of them would only be carried around.
ATTEMPTS_KEPT: Final = 20

#: When messages are due that are not delivered any more, although they are not settled.
NEVER: Final = 1 << 60

#: A durable change: its kind and its details, made of what msgpack can carry (see facts.py).
Fact = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for a group on a topic: the group's policy, with the topic's settings where it has none."""

    ordering: str = "none"
    fair_by: str = ""
    lease_ms: int = 30_000
    processing_ms: int = 300_000
    retry: RetryPolicy = RetryPolicy()  # noqa: RUF009 - frozen
    max_deliveries: int = 100
    poison: bool = False
    message_ttl_ms: int = 0
    #: What expires becomes a dead letter; otherwise it is dropped.
    expired_are_dead: bool = False
    #: The share of each lane; none of them = strict.
    lanes: tuple[int, ...] = (50, 25, 15, 7, 3)
    starvation_ms: int = 30_000

    @classmethod
    def of(cls, policy: QueuePolicy, topic: TopicConfig) -> Rules:
        return cls(
            ordering=policy.ordering,
            fair_by=policy.fair_by,
            lease_ms=policy.lease_ms or topic.lease_ms,
            processing_ms=policy.processing_ms,
            retry=parse_retry(policy.retry or topic.retry),
            max_deliveries=policy.max_deliveries,
            poison=policy.poison,
            message_ttl_ms=topic.message_ttl_ms,
            expired_are_dead=topic.on_expiry == "dead_letter",
            lanes=parse_lanes(topic.lanes),
            starvation_ms=topic.starvation_ms,
        )


# --- what a ledger asks of the log -------------------------------------------------------------------------------


class BatchView(Protocol):
    """A stored batch, looked at only as far as necessary.  The columns are as `millstream.records.Batch` has them."""

    @property
    def base_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def length(self) -> int:
        """Bytes of the whole batch as stored."""

    @property
    def flags(self) -> int:
        """The `Columns` of the batch; nothing below is asked for without a flag that calls for it."""

    @property
    def append_time_us(self) -> int: ...

    def offsets(self) -> Sequence[int]: ...
    def expiry_us(self) -> Sequence[int] | None:
        """When each message expires (0 = never)."""

    def keys(self) -> Sequence[bytes | None] | None: ...
    def raw_headers(self) -> Sequence[bytes | None] | None: ...
    def values(self) -> Sequence[bytes | None]: ...


class LogSource(Protocol):
    """One partition's log, as far as it may be delivered."""

    @property
    def start(self) -> int:
        """The first offset that is still there."""

    @property
    def end(self) -> int:
        """The high watermark: nothing at or beyond it exists for a queue."""

    @property
    def lanes(self) -> LaneMap: ...

    def batch_at(self, offset: int) -> BatchView | None:
        """The batch that holds the offset, or the first one after it.

        None when there is none below `end`, or when it cannot be read just now: then nothing is concluded from it, and
        `lease` is to be called again.  Asked for the same or the next batch again and again.
        """


# --- messages that share a history -------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """One delivery that came to nothing."""

    consumer: str
    delivered_us: int
    ended_us: int
    #: nack, timeout, reject, returned (its consumer went away).
    kind: str
    reason: str = ""


class History(NamedTuple):
    """What has happened to some messages so far.  Shared by all of them: never changed, only followed by another."""

    deliveries: int = 0
    #: Only these count as retries; a consumer that went away is nobody's failure.
    failures: int = 0
    first_us: int = 0
    attempts: tuple[Attempt, ...] = ()

    def after(self, attempt: Attempt, *, failed: bool) -> History:
        first_us = self.first_us if self.deliveries else attempt.delivered_us
        attempts = (*self.attempts, attempt)[-ATTEMPTS_KEPT:]
        return History(self.deliveries + 1, self.failures + failed, first_us, attempts)

    @property
    def last_consumer(self) -> str:
        return self.attempts[-1].consumer if self.attempts else ""

    @property
    def last_error(self) -> str:
        return next((attempt.reason for attempt in reversed(self.attempts) if attempt.reason), "")


class Terms(NamedTuple):
    """What some messages have in common beside their history; few distinct ones exist."""

    #: When the oldest of them was appended.
    born_us: int = 0
    lane: int = PRIORITY_DEFAULT
    #: From their headers; 0 and -1 = what the rules say.
    lease_ms: int = 0
    max_retries: int = -1
    #: So large that poison rules suspect their size.
    large: bool = False


FRESH: Final = History()
PLAIN: Final = Terms()


class Parcel:
    """Offsets that share history and terms: bit i of `bits` stands for `base` + i."""

    __slots__ = ("base", "bits", "due_us", "history", "terms")

    def __init__(self, base: int, bits: int, history: History, terms: Terms | None, due_us: int = 0) -> None:
        self.base = base
        self.bits = bits
        self.history = history
        #: None as long as nobody could read the batch to find out.
        self.terms = terms
        #: Not to be handed out before; 0 = at once.
        self.due_us = due_us


class Lease:
    """Messages in the hands of one consumer: one object, however many.  For callers it is read-only.

    `granted` are the messages it began with, `bits` those that are not settled yet; bit i stands for `base` + i, and
    bit 0 is always one of the granted.
    """

    __slots__ = (
        "base",
        "bits",
        "consumer",
        "deadline_us",
        "granted",
        "granted_us",
        "history",
        "length_us",
        "nonce",
        "terms",
    )

    def __init__(
        self, nonce: int, base: int, bits: int, consumer: str, history: History, terms: Terms, now_us: int, due_us: int
    ) -> None:
        self.nonce = nonce
        self.base = base
        self.granted = self.bits = bits
        self.consumer = consumer
        #: What was before this delivery.
        self.history = history
        self.terms = terms
        self.granted_us = now_us
        self.deadline_us = due_us
        self.length_us = due_us - now_us

    @property
    def span(self) -> int:
        """How many offsets the lease covers, its own and those between them."""
        return self.granted.bit_length()

    @property
    def delivery(self) -> int:
        """1 for messages that are delivered for the first time."""
        return self.history.deliveries + 1

    @property
    def failures(self) -> int:
        return self.history.failures


# --- answers -----------------------------------------------------------------------------------------------------


class Result(IntEnum):
    """What came of a settle; the numbers travel on the wire."""

    DONE = 0
    RETRIED = 1
    DEAD = 2
    #: The lease ended, is somebody else's or never was; nothing was changed.
    INVALID = 40
    #: Refused as INVALID is, and the message is not in the log any more: it is not delivered again.
    GONE = 57


class Dead(NamedTuple):
    """Messages that the queue has given up on: already settled here, to be written to the dead letter topic now.

    `fact` must become durable together with the intent to write the letter: it is *not* among those of `drain`.  (Drain
    first: a settle that was decided earlier belongs into the journal earlier.)
    """

    base: int
    bits: int
    #: One of millstream.dead_letters.REASONS.
    reason: str
    error: str
    history: History
    fact: Fact

    def offsets(self) -> Iterable[int]:
        return offsets_of(self.base, self.bits)


class Outcome(NamedTuple):
    """The answer to a settle; `dead` only when the result says so."""

    result: Result
    dead: tuple[Dead, ...] = ()
    #: How long a lease that was extended lasts from now on.
    lasting_ms: int = 0


DONE: Final = Outcome(Result.DONE)
RETRIED: Final = Outcome(Result.RETRIED)
INVALID: Final = Outcome(Result.INVALID)
GONE: Final = Outcome(Result.GONE)
#: Nothing was changed.
REFUSED: Final = frozenset((Result.INVALID, Result.GONE))


class Delivery:
    """What a consumer gets, and what was found to be dead (expired) on the way."""

    __slots__ = ("dead", "leases")

    def __init__(self, leases: list[Lease], dead: Sequence[Dead] = ()) -> None:
        self.leases = leases
        self.dead = dead


class Counts(NamedTuple):
    """Where the messages of a partition are; `ready` + `leased` + `waiting` + `settled` is all of them.

    Offsets that compaction or damage took away count as ready until somebody comes across them.
    """

    ready: int
    leased: int
    waiting: int
    #: Done with, for whatever reason, and still in the log.
    settled: int
    #: How messages came to be settled, since the group exists: acked, dead, expired, evicted, purged, gone.
    totals: dict[str, int]


class LaneStatistics(NamedTuple):
    lane: int
    ready: int
    leased: int
    served: int
    last_served_us: int


# --- why ---------------------------------------------------------------------------------------------------------


class Whereabouts(NamedTuple):
    """Where one message is.  `state` is ready, leased, waiting, settled or gone (not in the log)."""

    state: str
    history: History = FRESH
    lease: Lease | None = None
    #: NEVER = the group gave up on it, and it stays where it is because it is a dead letter already.
    due_us: int = 0
    #: Of what is settled: acked, dead, expired, evicted or purged, and for which reason; empty = not known any more.
    ending: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What only the broker knows and `explain` needs."""

    consumers: int = 0
    #: LEASE requests that wait for messages.
    requests: int = 0
    paused: bool = False
    #: A limit that holds deliveries back, in words; empty = none.
    quota: str = ""


class Reason(NamedTuple):
    """Why a message is not being delivered right now: one sentence, and the facts behind it."""

    state: str
    sentence: str
    facts: dict[str, Any]
