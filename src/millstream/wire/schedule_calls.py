"""The control calls of schedules and their answers.

What is scheduled is named by the id its publisher got, or by topic and key.  Byte strings are base64 in JSON.
"""

from __future__ import annotations

from typing import Literal

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "CancelSchedules",
    "Cancelled",
    "CatchUp",
    "DeleteRepeating",
    "DescribeRepeating",
    "DescribeSchedule",
    "ListRepeating",
    "ListSchedules",
    "MoveSchedule",
    "PauseRepeating",
    "RefusedCancel",
    "Repeat",
    "Repeating",
    "ScheduleInfo",
    "ScheduleStats",
    "ScheduleSummary",
    "TopicSchedules",
    "place_of",
]

#: What becomes of occurrences that were missed, because the broker was down or the schedule was paused.
CatchUp = Literal["none", "latest", "all"]


# --- messages ----------------------------------------------------------------------------------------------------


class ListSchedules(CallForm, tag="schedule.list"):
    """Answers with a list of ScheduleSummary: what is pending for a topic, soonest first.

    With a key every pending message of the topic is looked at, which takes a while if there are millions.
    """

    topic: str
    #: Due at or after, and before, these times; 0 = no bound.
    after_ms: int = 0
    before_ms: int = 0
    key: bytes | None = None
    #: Only what comes behind this place in the list: the `due_ms`, partition and offset of the last one known.
    behind: tuple[int, int, int] | None = None
    limit: int = 100


class ScheduleSummary(AnswerForm):
    id: str
    topic: str
    partition: int
    offset: int
    due_ms: int
    published_ms: int
    #: 0 = none.
    expiry_ms: int
    priority: int
    key: bytes | None
    size_bytes: int


def place_of(summary: ScheduleSummary) -> tuple[int, int, int]:
    """Where it is in the list of its topic: what `behind` goes on from."""
    return summary.due_ms, summary.partition, summary.offset


class DescribeSchedule(CallForm, tag="schedule.show"):
    """Answers with ScheduleInfo."""

    id: str


class ScheduleInfo(AnswerForm):
    """A message that is, or was, scheduled.

    The state `gone` means that it fired, was cancelled or expired some time ago, and its record has been removed.
    """

    id: str
    state: Literal["pending", "firing", "fired", "cancelled", "expired", "lost", "gone"]
    topic: str
    partition: int
    offset: int
    due_ms: int = 0
    #: When the message was due before it was moved; 0 = it was not moved.
    moved_from_ms: int = 0
    published_ms: int = 0
    timestamp_ms: int = 0
    expiry_ms: int = 0
    priority: int = 0
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes]] = []


class CancelSchedules(CallForm, tag="schedule.cancel"):
    """Cancels by ids, or everything that is pending for a topic and key.  Durable when answered, with Cancelled."""

    ids: list[str] = []
    topic: str = ""
    key: bytes | None = None


class RefusedCancel(AnswerForm):
    id: str
    code: str
    number: int
    reason: str


class Cancelled(AnswerForm):
    #: How many are cancelled now, including those that were already.
    cancelled: int
    refused: list[RefusedCancel] = []


class MoveSchedule(CallForm, tag="schedule.move"):
    """Gives a pending message another time.  Durable when answered, with ScheduleSummary."""

    id: str
    deliver_at_ms: int


class ScheduleStats(CallForm, tag="schedule.stats"):
    """Answers with a list of TopicSchedules: of one topic, or of all that have any."""

    topic: str | None = None


class TopicSchedules(AnswerForm):
    topic: str
    pending: int
    #: When the next message is due; 0 = nothing is pending.
    next_due_ms: int
    #: Counted since the broker started, as are `expired`, `cancelled` and `moved`.
    fired: int
    expired: int
    cancelled: int
    moved: int
    #: How many of the pending messages are held in memory because their time is near.
    in_memory: int
    #: Disk space that the log of schedules takes.
    size_bytes: int


# --- recurring ---------------------------------------------------------------------------------------------------


class Repeat(CallForm, tag="schedule.repeat"):
    """Publishes a message again and again, by a cron expression.  Replaces the schedule of that name.

    Answers with Repeating.
    """

    name: str
    topic: str
    cron: str
    timezone: str = "UTC"
    key: bytes | None = None
    value: bytes | None = b""
    headers: list[tuple[str, bytes]] = []
    priority: int = 2
    paused: bool = False
    catch_up: CatchUp = "latest"


class Repeating(AnswerForm):
    name: str
    topic: str
    cron: str
    timezone: str
    paused: bool
    catch_up: CatchUp
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    priority: int
    created_ms: int
    #: The next occurrence; 0 = never again, or paused.
    next_ms: int
    #: The occurrence that was published last; 0 = none yet.
    last_ms: int
    published: int


class ListRepeating(CallForm, tag="schedule.repeating"):
    """Answers with a list of Repeating, sorted by name."""


class DescribeRepeating(CallForm, tag="schedule.repeating.show"):
    """Answers with Repeating."""

    name: str


class PauseRepeating(CallForm, tag="schedule.repeating.pause"):
    """Stops a schedule for a while, or lets it go on.  Answers with Repeating."""

    name: str
    paused: bool = True


class DeleteRepeating(CallForm, tag="schedule.repeating.delete"):
    name: str
