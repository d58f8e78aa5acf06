"""Which dead letters a replay sends, in which order, and what an operator should know before it does.

Letters go out in the order in which their originals had come in, whatever order they died in, so messages of one key
keep theirs.  An id begins with the append time and ends with the offset, and the append times of a partition never go
back: the order of original ids is the order of arrival, exact within a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final, Literal, NamedTuple, TypeAlias

from millstream.dead_letters import DeadLetter, LetterEdit, ReplayPlan
from millstream.durations import format_ms
from millstream.errors import InvalidArgument
from millstream.ids import parse_message_id

__all__ = ["CANDIDATES_MAX", "Candidate", "ReplayPlanner", "target_of"]

#: Remembered in about 80 bytes each while the replay runs.
CANDIDATES_MAX: Final = 1_000_000
_FIRST_SHOWN: Final = 10
_GROUPS_SHOWN: Final = 5
_DAY_MS: Final = 86_400_000
#: More than this without a rate limit is worth a word.
_BURST: Final = 1_000
#: Why no letter is left of those that were asked for, by how they were asked for.
_NOTHING: Final = {
    "ids": "these dead letters are not there any more; they were replayed, purged or acked, or retention removed them",
    "filter": "no dead letter matches; those that were replayed, purged or acked do not count",
    "everything": "there are no dead letters; those that were replayed, purged or acked do not count",
}

Asked: TypeAlias = Literal["ids", "filter", "everything"]

# Sorted as bytes: append time and uid and offset of the original, number of the source, offset of the letter.
_ENTRY: Final = Struct(">16sIQ")


class Candidate(NamedTuple):
    """Where a letter to be replayed lies."""

    topic: str
    partition: int
    offset: int


def target_of(letter: DeadLetter, target: str) -> str:
    return target or letter.original_topic


class ReplayPlanner:
    """Takes letters in any order and says what becomes of them."""

    def __init__(
        self,
        *,
        target: str,
        edit: LetterEdit,
        rate: float,
        topic_exists: Callable[[str], bool],
        groups_of: Callable[[str], Sequence[str]],
        asked: Asked = "filter",
    ) -> None:
        self._target = target
        self._asked: Asked = asked
        self._edit = edit
        self._rate = rate
        self._topic_exists = topic_exists
        self._groups_of = groups_of
        self._sources: list[tuple[str, int]] = []
        self._entries: list[bytes] = []
        self._targets: dict[str, int] = {}
        self._missing: dict[str, int] = {}
        #: Which groups have given up on what goes back to the topic it came from.
        self._gave_up: dict[str, set[str]] = {}
        self._bytes = 0
        self._oldest_us = self._newest_us = 0
        self._ids: dict[bytes, str] = {}
        self.more = False

    @property
    def total(self) -> int:
        return len(self._entries)

    def add(self, letter: DeadLetter) -> None:
        """Consider a letter; without an existing topic to send it to, it stays where it is."""
        topic = target_of(letter, self._target)
        if not (topic in self._targets or self._topic_exists(topic)):
            self._missing[topic] = self._missing.get(topic, 0) + 1
            return
        if len(self._entries) >= CANDIDATES_MAX:
            self.more = True
            return
        self._targets[topic] = self._targets.get(topic, 0) + 1
        if topic == letter.original_topic:
            self._gave_up.setdefault(topic, set()).add(letter.group)
        source = (letter.topic, letter.partition)
        # Letters come partition by partition, so the one looked for is nearly always the last one.
        if not self._sources or self._sources[-1] != source:
            self._sources.append(source)
        self._entries.append(_ENTRY.pack(_order_of(letter), len(self._sources) - 1, letter.offset))
        self._note_first(letter)
        self._bytes += letter.value_bytes if self._edit.value is None else len(self._edit.value)
        self._oldest_us = min(self._oldest_us or letter.timestamp_us, letter.timestamp_us)
        self._newest_us = max(self._newest_us, letter.timestamp_us)

    def _note_first(self, letter: DeadLetter) -> None:
        """Keep the ids of those that go first."""
        self._ids[self._entries[-1]] = letter.id
        if len(self._ids) > _FIRST_SHOWN:
            del self._ids[max(self._ids)]

    def candidates(self) -> Iterator[Candidate]:
        """The letters in the order in which they go out."""
        self._entries.sort()
        for entry in self._entries:
            _, source, offset = _ENTRY.unpack(entry)
            topic, partition = self._sources[source]
            yield Candidate(topic, partition, offset)

    def plan(self, *, now_ms: int) -> ReplayPlan:
        return ReplayPlan(
            total=self.total,
            bytes=self._bytes,
            targets=self._targets,
            stuck=sum(self._missing.values()),
            first=[self._ids[entry] for entry in sorted(self._ids)],
            oldest_ms=self._oldest_us // 1000,
            newest_ms=self._newest_us // 1000,
            duration_ms=round(self.total / self._rate * 1000) if self._rate else 0,
            warnings=list(self._warnings(now_ms)),
        )

    def _warnings(self, now_ms: int) -> Iterator[str]:
        for topic, letters in self._missing.items():
            yield f"topic {topic!r} does not exist: {letters} of its messages stay; create it or name another target"
        if self.more:
            yield f"a replay takes {CANDIDATES_MAX} messages at most; replay the rest afterwards"
        if not self._entries:
            if not self._missing:
                yield f"there is nothing to replay: {_NOTHING[self._asked]}"
            return
        for topic, gave_up in self._gave_up.items():
            groups = self._groups_of(topic)
            again = sorted({name for group in gave_up for name in groups if name != group})
            if again:
                yield (
                    f"all readers of topic {topic!r} get these messages again, whether they had acked them or not, "
                    f"queue {_names(again)} too: replay to a topic of their own if repetitions do harm there"
                )
        age_ms = now_ms - self._oldest_us // 1000
        if age_ms > _DAY_MS:
            days = format_ms(age_ms // _DAY_MS * _DAY_MS)
            yield f"the oldest message was made {days} ago: can its consumers still make sense of it?"
        if not self._rate and self.total > _BURST:
            yield f"{self.total} messages go out as fast as the broker can store them: set a rate to spare consumers"
        if self._edit.value is not None and self.total > 1:
            yield f"all {self.total} messages get the same value"


def _names(groups: Sequence[str]) -> str:
    """Groups, or some of many, in a sentence."""
    shown = [repr(name) for name in groups[:_GROUPS_SHOWN]]
    left = len(groups) - len(shown)
    if left:
        shown.append(f"{left} more")
    return f"groups {', '.join(shown[:-1])} and {shown[-1]}" if shown[1:] else f"group {shown[0]}"


def _order_of(letter: DeadLetter) -> bytes:
    try:
        place = parse_message_id(letter.original_id)
    except InvalidArgument:  # headers are anybody's to write
        place = parse_message_id(letter.id)
    return (place.append_time_ms << 80 | place.partition_uid << 48 | place.offset).to_bytes(16)
