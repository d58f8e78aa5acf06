"""`audit`: every message that was published is accounted for, in every queue group.

Two things are held against what the broker says of itself: how many messages can really be read from the log, and
whether what became of the messages of a group adds up to how many there were for it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, ClassVar, Final

from millstream.errors import GroupNotFound, MessageNotFound, MillstreamError, OffsetOutOfRange, TopicNotFound
from millstream.ids import message_id
from millstream.slicing import batches_of
from millstream.spark.offsets import Place
from millstream.spark.pipelines.definition import Names, Source
from millstream.spark.pipelines.ready.page import Figure, Html, Page, Tone, card, table
from millstream.spark.pipelines.ready.plots import bars, short
from millstream.spark.pipelines.ready.work import Reporting, Work
from millstream.wire import calls, queue_calls, schedule_calls
from millstream.wire.messages import FetchRequest

if TYPE_CHECKING:
    from millstream.spark.connection import BrokerConnection

__all__ = ["Audit"]

_WAYS: Final = ("acked", "dead", "expired", "evicted", "purged", "gone")
_STATES: Final = ("ready", "leased", "waiting")


@dataclass
class TopicAccount:
    """A topic: what was published, and what of it can be read."""

    topic: str
    #: Ever: the sum of the ends of its partitions.
    published: int
    #: By retention, and by compaction.
    removed: int
    stored: int
    #: Offsets that should be there and cannot be read.
    missing: int
    scheduled: int


@dataclass
class GroupAccount:
    """A queue group: what became of the messages that were there for it."""

    topic: str
    group: str
    published: int = 0
    acked: int = 0
    dead: int = 0
    expired: int = 0
    evicted: int = 0
    purged: int = 0
    gone: int = 0
    ready: int = 0
    leased: int = 0
    waiting: int = 0
    lost: int = 0
    #: Dead letters that are still there.
    letters: int = 0
    #: False: retention or compaction has removed messages from before, so it is not known how many were the group's.
    exact: bool = True

    @property
    def accounted(self) -> int:
        return sum(getattr(self, name) for name in (*_WAYS, *_STATES))


class Audit(Reporting):
    ABOUT: ClassVar = "accounts for every published message in every queue group, and fails if one is lost"

    #: Topics by name. Without it, all topics of the namespace.
    topics: Names | None = None
    #: Whether the pipeline fails when something is lost, so that whoever runs it every night hears of it.
    fail: bool = True

    def sources(self) -> dict[str, Source]:
        return {"letters": Source(table="dead_letters")}

    def work(self, work: Work) -> int:
        topics, groups = self._look(work)
        lost = sum(each.missing for each in topics) + sum(each.lost for each in groups)
        facts = {
            "topics": [asdict(each) for each in topics],
            "groups": [asdict(each) for each in groups],
            "lost": lost,
        }
        self.publish(work, _page(work, topics, groups, lost), facts)
        if lost and self.fail:
            places = [each.topic for each in topics if each.missing] + [each.topic for each in groups if each.lost]
            raise MessageNotFound(f"{lost} messages are not accounted for, see topic {places[0]!r} in {self.report}")
        return sum(each.published for each in topics)

    def _look(self, work: Work) -> tuple[list[TopicAccount], list[GroupAccount]]:
        connection = work.connection
        infos = self.describe(connection, self.topics or _topic_names(connection))
        listed = connection.call(queue_calls.ListQueues(), list[queue_calls.QueueSummary])
        groups = self.account(connection, infos, listed)
        letters = self._letters(work)
        for group in groups:
            group.letters = letters.get((group.topic, group.group), 0)
        scheduled = {
            each.topic: each.pending
            for each in connection.call(schedule_calls.ScheduleStats(), list[schedule_calls.TopicSchedules])
        }
        readable = _readable(work, infos)
        topics = []
        for name, info in infos.items():
            removed = _removed_since(connection, info)
            topics.append(_topic(info, readable.get(name, 0), removed, scheduled.get(name, 0)))
        return sorted(topics, key=lambda each: each.topic), sorted(groups, key=lambda each: (each.topic, each.group))

    @property
    def _vanishing(self) -> tuple[type[MillstreamError], ...]:
        """What may be deleted while we look: everything that nobody asked for by its name."""
        return (GroupNotFound,) if self.topics else (GroupNotFound, TopicNotFound)

    def describe(self, connection: BrokerConnection, names: Iterable[str]) -> dict[str, calls.TopicInfo]:
        infos: dict[str, calls.TopicInfo] = {}
        for name in names:
            with suppress(*self._vanishing):
                infos[name] = connection.call(calls.DescribeTopic(name=name), calls.TopicInfo)
        return infos

    def account(
        self, connection: BrokerConnection, topics: Container[str], listed: Iterable[queue_calls.QueueSummary]
    ) -> list[GroupAccount]:
        groups: list[GroupAccount] = []
        for each in listed:
            if each.topic in topics:
                with suppress(*self._vanishing):
                    groups.append(_group(connection, each.topic, each.group))
        return groups

    def _letters(self, work: Work) -> dict[tuple[str, str], int]:
        counted = work.read("letters").groupBy("topic", "group").count().collect()
        return {(row["topic"], row["group"]): row["count"] for row in counted}


def _topic_names(connection: BrokerConnection) -> list[str]:
    names: list[str] = []
    while page := connection.call(calls.ListTopics(after=names[-1] if names else ""), list[calls.TopicInfo]):
        names += [each.name for each in page]
    return names


def _readable(work: Work, infos: dict[str, calls.TopicInfo]) -> dict[str, int]:
    """Messages that Spark really reads, between the ends that the broker has told."""
    filled = {name: info for name, info in infos.items() if any(part.high_watermark for part in info.partitions)}
    if not filled:
        return {}

    def offsets(which: str) -> str:
        return json.dumps(
            {
                name: {str(part.partition): getattr(part, which) for part in info.partitions}
                for name, info in filled.items()
            }
        )

    options = {
        **work.checked.sink_options(None),
        "subscribe": ",".join(filled),
        "startingOffsets": offsets("start_offset"),
        "endingOffsets": offsets("high_watermark"),
        # What was removed since then was not lost.
        "failOnDataLoss": "false",
    }
    rows = work.spark.read.format("millstream").schema("topic string not null, offset bigint not null")
    counted = rows.options(**options).load().groupBy("topic").count().collect()
    return {row["topic"]: row["count"] for row in counted}


def _removed_since(connection: BrokerConnection, info: calls.TopicInfo) -> int:
    """How many messages retention has taken since a topic was described, before they were read or after."""
    before = {part.partition: part for part in info.partitions}
    try:
        now: calls.TopicInfo = connection.call(calls.DescribeTopic(name=info.name), calls.TopicInfo)
    except TopicNotFound:
        return sum(part.high_watermark - part.start_offset for part in info.partitions)
    return sum(
        max(min(part.start_offset, before[part.partition].high_watermark) - before[part.partition].start_offset, 0)
        for part in now.partitions
        if part.partition in before
    )


def _topic(info: calls.TopicInfo, readable: int, removed: int, scheduled: int) -> TopicAccount:
    ends = sum(part.high_watermark for part in info.partitions)
    starts = sum(part.start_offset for part in info.partitions)
    # A compacted topic has gaps on purpose: only what is known to be damaged is missing there.
    damaged = sum(until - first for part in info.partitions for first, until in part.damaged_ranges)
    compacted = "compact" in str(info.config.get("cleanup", ""))
    missing = damaged if compacted else max(ends - starts - readable - removed, 0)
    return TopicAccount(info.name, ends, ends - readable - missing, readable, missing, scheduled)


def _group(connection: BrokerConnection, topic: str, group: str) -> GroupAccount:
    info: queue_calls.QueueInfo = connection.call(
        queue_calls.DescribeQueue(topic=topic, group=group), queue_calls.QueueInfo
    )
    (metadata,) = connection.call(calls.Metadata(topics=[topic]), list[calls.TopicMetadata])
    described: calls.TopicInfo = connection.call(calls.DescribeTopic(name=topic), calls.TopicInfo)
    starts = {part.partition: part.start_offset for part in described.partitions}
    account = GroupAccount(topic, group)
    for way in _WAYS:
        setattr(account, way, info.settled.get(way, 0))
    at_least = at_most = 0
    for part in info.partitions:
        for state in _STATES:
            setattr(account, state, getattr(account, state) + getattr(part, state))
        start = starts.get(part.partition, 0)
        place = Place(topic, part.partition)
        low, high = _began(connection, place, metadata.partition_uids[part.partition], group, start, part.end)
        at_least += part.end - high
        at_most += part.end - low
        if low == start > 0:
            account.exact = False
    account.lost = max(at_least - account.accounted, 0)
    account.exact &= at_least == at_most or at_most <= account.accounted
    account.published = account.accounted + account.lost
    return account


def _began(connection: BrokerConnection, place: Place, uid: int, group: str, start: int, end: int) -> tuple[int, int]:
    """Between which offsets the first message of a partition is that was there for a group.

    What is before it is gone, as far as the group knows.  Only messages that are still there can be asked for, so where
    compaction has taken some out it is one of those between the last that is gone and the first that is not.
    """
    low, high, first = start, end, end
    while low < high:
        middle = (low + high) // 2
        found = _next_message(connection, place, middle, high)
        if found is None:
            high = middle
        elif _is_gone(connection, message_id(0, uid, found), group):
            low = found + 1
        else:
            first, high = found, middle
    return low, first


def _next_message(connection: BrokerConnection, place: Place, offset: int, end: int) -> int | None:
    """The offset of the first message from here on that is in the log."""
    while offset < end:
        try:
            result = connection.fetch(FetchRequest(*place, offset, 1, 0))
        except (OffsetOutOfRange, TopicNotFound):
            return None
        for batch in batches_of([result.batches]):
            found = next((each for each in batch.offsets() if each >= offset), None)
            if found is not None:
                return found if found < end else None
        if result.next_offset <= offset:
            return None
        offset = result.next_offset
    return None


def _is_gone(connection: BrokerConnection, message: str, group: str) -> bool:
    try:
        (found,) = connection.call(
            queue_calls.DescribeMessage(id=message, group=group), list[queue_calls.QueuedMessage]
        )
        return bool(found.state == "gone")
    except (MessageNotFound, TopicNotFound):
        return False  # removed just now


def _page(work: Work, topics: list[TopicAccount], groups: list[GroupAccount], lost: int) -> Page:
    published = sum(each.published for each in topics)
    page = Page(
        "Audit",
        "Every message that was published, and what became of it in each queue group.",
        work.now,
    )
    page.figures(
        [
            Figure("Lost", short(lost), "must be 0", "bad" if lost else "good"),
            Figure("Published", short(published), f"in {len(topics)} topics"),
            Figure("Settled", short(sum(each.acked for each in groups)), "acknowledged, over all groups"),
            Figure("On its way", short(sum(each.ready + each.leased + each.waiting for each in groups)), "not settled"),
            Figure("Dead", short(sum(each.dead for each in groups)), "given up on"),
        ]
    )
    page.findings(_findings(topics, groups))
    for each in groups[:12]:
        shown = [(name, getattr(each, name)) for name in (*_WAYS, *_STATES, "lost")]
        rows = [(name, count, f"{count / max(each.published, 1):.1%}") for name, count in shown if count]
        what = f"{each.topic} → {each.group}: {short(each.published)} messages"
        page.section(what, card(bars(rows, what=what)) if rows else card("No message yet."))
    page.section(
        "Queue groups",
        table(
            ("topic", "group", "published", *_WAYS, *_STATES, "lost", "letters there", ""),
            [
                (
                    *(each.topic, each.group, each.published),
                    *(getattr(each, name) for name in (*_WAYS, *_STATES)),
                    *(each.lost, each.letters),
                    "" if each.exact else "retention or compaction has removed what came first",
                )
                for each in groups
            ],
            empty="There are no queue groups.",
        ),
        note="published = acked + dead + expired + evicted + purged + gone (removed by retention before it was done) "
        "+ ready + leased + waiting + lost.",
    )
    page.section(
        "Topics",
        table(
            ("topic", "published", "removed", "read", "missing", "scheduled"),
            [(each.topic, each.published, each.removed, each.stored, each.missing, each.scheduled) for each in topics],
        ),
        note="published = removed by retention or compaction + read from the log by this run + missing. Scheduled "
        "messages are not published yet.",
    )
    return page


def _findings(topics: list[TopicAccount], groups: list[GroupAccount]) -> list[tuple[Tone, str]]:
    found: list[tuple[Tone, str]] = []
    for topic in topics:
        if topic.missing:
            said = f"<b>{escape(topic.topic)}</b>: {short(topic.missing)} messages cannot be read from the log."
            found.append(("bad", Html(said)))
    for group in groups:
        if group.lost:
            said = f"<b>{escape(group.topic)} → {escape(group.group)}</b>: {short(group.lost)} messages are nowhere."
            found.append(("bad", Html(said)))
        if group.gone:
            said = (
                f"<b>{escape(group.topic)} → {escape(group.group)}</b>: retention removed {short(group.gone)} messages"
            )
            found.append(("warn", Html(f"{said} before anybody had done them.")))
    return found or [("good", "Every message is accounted for.")]
