"""The control calls about dead letters and their replays.

Dead letters are looked through one after the other, and there may be millions.  So a call that looks through them works
for about a second and then answers with what it has and with `after`: where the next call goes on.  Empty = done.
"""

from __future__ import annotations

from typing import Final

from millstream.dead_letters import DeadLetter, LetterEdit, LetterFilter, LetterStatistics, ReplayInfo, ReplayPlan
from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "SHOWN_BYTES",
    "WHOLE_VALUES",
    "AbortReplay",
    "CountLetters",
    "LetterCount",
    "LetterPage",
    "ListLetters",
    "ListReplays",
    "PurgeLetters",
    "ReplayLetters",
    "ReplayStarted",
    "ShowLetter",
    "ShowReplay",
]

#: For `value_bytes`: enough to recognise a message by, and as much as there is.
SHOWN_BYTES: Final = 256
WHOLE_VALUES: Final = 1 << 31


class ListLetters(CallForm, tag="dlq.list"):
    """Answers with LetterPage: at most `limit` letters, ordered by dead letter topic, partition and offset."""

    filter: LetterFilter = LetterFilter()
    after: str = ""
    limit: int = 100
    #: How much of each value to send.
    value_bytes: int = SHOWN_BYTES


class LetterPage(AnswerForm):
    letters: list[DeadLetter]
    after: str = ""


class ShowLetter(CallForm, tag="dlq.show"):
    """Answers with a DeadLetter, its value whole.  Also one that was replayed or purged, while it is stored."""

    id: str


class CountLetters(CallForm, tag="dlq.stats"):
    """Answers with LetterCount; the statistics of all answers up to the last add up."""

    filter: LetterFilter = LetterFilter()
    after: str = ""


class LetterCount(AnswerForm):
    statistics: LetterStatistics
    after: str = ""


class PurgeLetters(CallForm, tag="dlq.purge"):
    """Removes the letters with these ids, those that a filter matches, or everything.  Answers with LetterCount."""

    ids: list[str] = []
    filter: LetterFilter = LetterFilter()
    everything: bool = False
    dry_run: bool = False
    #: At most so many; 0 = all.
    limit: int = 0
    after: str = ""


class ReplayLetters(CallForm, tag="dlq.replay"):
    """Sends the letters with these ids, those that a filter matches, or everything.  Answers with ReplayStarted."""

    ids: list[str] = []
    filter: LetterFilter = LetterFilter()
    everything: bool = False
    #: Empty = each to the topic it came from.
    target: str = ""
    edit: LetterEdit = LetterEdit()
    #: Messages per second; 0 = as fast as they can be stored.
    rate: float = 0
    dry_run: bool = False


class ReplayStarted(AnswerForm):
    plan: ReplayPlan
    #: None after a dry run.
    replay: ReplayInfo | None = None


class ListReplays(CallForm, tag="dlq.replays"):
    """Answers with a list of ReplayInfo, the newest first and without failures."""


class ShowReplay(CallForm, tag="dlq.replay_status"):
    """Answers with ReplayInfo."""

    id: str


class AbortReplay(CallForm, tag="dlq.replay_abort"):
    """Ends a replay; what it has sent stays sent.  Answers with ReplayInfo."""

    id: str
