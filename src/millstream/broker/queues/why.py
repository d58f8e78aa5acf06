"""`why`: what stands between a message, or a queue, and its delivery, in one sentence with the facts behind it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.letters.letters import Letters
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.part import QueuePart
from millstream.broker.queues.queues import Queues
from millstream.broker.queues.views import place_of
from millstream.broker.registry import Topic
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.traffic.flow import Flow
from millstream.broker.traffic.modes import ModeKeeper
from millstream.dead_letters import DeadLetter
from millstream.errors import InvalidArgument, MessageNotFound
from millstream.foreign import in_a_sentence
from millstream.ids import parse_message_id
from millstream.queues.letters import dead_letter_topic
from millstream.queues.records import Reason, Situation
from millstream.wire.queue_calls import Explain, Explanation

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Why"]


#: How long to look for the letter of a dead message.
_SEARCH_S: Final = 1.0


class _Host(Protocol):
    queues: Queues
    schedules: Schedules
    letters: Letters
    flow: Flow
    modes: ModeKeeper


class Why:
    """Asks everybody who may hold a message back."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    async def explain(self, session: Session, call: Explain) -> Explanation:
        if call.id:
            return await self._explain_message(session.namespace, call.id, call.group)
        if not call.topic:
            raise InvalidArgument("name a message id, or a topic and a group")
        group = self._host.queues.registry.get(session.namespace, call.topic, call.group or "default")
        return await self._explain_group(group)

    async def _explain_message(self, namespace: str, text: str, group_name: str) -> Explanation:
        scheduled = await self._host.schedules.explain(namespace, text)
        if scheduled is not None:
            return scheduled
        queues = self._host.queues
        topic, number, offset = place_of(queues, namespace, text)
        topics = queues.topics
        if topics.is_untouched(topic, number) or offset >= topics.partition_of(topic, number).high_watermark:
            raise MessageNotFound(f"no message has the id {text}")
        if group_name:
            group = queues.registry.get(namespace, topic.name, group_name)
            return await self._with_letter(_told(group, await self._reason(group.part(number), offset)), group, text)
        groups = queues.registry.on_topic(topic)
        if not groups:
            try:
                return _letter_told(await self._host.letters.show(namespace, text))
            except MessageNotFound:
                sentence = f"Topic {topic.name} has no queue group: nobody has asked for its messages yet."
                return Explanation(sentence=sentence, state="no-group", facts={"topic": topic.name, "offset": offset})
        # The group that still has to do with it says most; the others are mentioned.
        reasons = [(group, await self._reason(group.part(number), offset)) for group in groups]
        group, reason = min(reasons, key=lambda found: found[1].state in ("settled", "gone"))
        told = _told(group, reason)
        told.facts["groups"] = {other.name: its.state for other, its in reasons}
        return await self._with_letter(told, group, text)

    async def _with_letter(self, told: Explanation, group: QueueGroup, text: str) -> Explanation:
        """If a settled message became a dead letter, what that says: the ledger may have forgotten it."""
        if told.state != "settled" or told.facts.get("settled_as", "dead") != "dead":
            return told
        name = dead_letter_topic(group.topic.name, group.topic.config.dead_letter_topic)
        topics = self._host.queues.topics
        topic = topics.registry.find(group.topic.namespace, name)
        number = self._number_of(group, text) % len(topic.partitions) if topic is not None else 0
        if topic is None or topics.is_untouched(topic, number):
            return told
        letter, searched_all = await self._letter_of(topic, number, group, text)
        if letter is not None:
            error = f" ({in_a_sentence(letter.error)})" if letter.error else ""
            told.sentence = (
                f"Offset {letter.original_offset} is settled: this group gave up on it, {letter.reason}{error}; "
                f"it is dead letter {letter.id} on {name}."
            )
            told.facts |= {"settled_as": "dead", "reason": letter.reason, "error": letter.error}
            told.facts |= {"dead_letter": letter.id, "dead_ms": letter.dead_ms, "dead_letter_topic": name}
        elif told.facts.get("settled_as") == "dead":
            where = f"its letter on {name} was replayed or purged since" if searched_all else f"its letter is on {name}"
            told.sentence = f"{told.sentence.removesuffix('.')}; {where}."
            told.facts["dead_letter_topic"] = name
        return told

    def _number_of(self, group: QueueGroup, text: str) -> int:
        return group.topic.partition_uids.index(parse_message_id(text).partition_uid)

    async def _letter_of(
        self, topic: Topic, number: int, group: QueueGroup, text: str
    ) -> tuple[DeadLetter | None, bool]:
        """The letter of a message, unless it is gone; and whether all of them were looked at."""
        loop = self._host.queues.loop
        until_s = loop.time() + _SEARCH_S
        since_us = parse_message_id(text).append_time_ms * 1000
        async for letters, _ in self._host.letters.box(topic, number).scan(0, since_us=since_us):
            for letter in letters:
                if letter.original_id == text.upper() and letter.group == group.name:
                    return letter, False
            if loop.time() > until_s:
                return None, False
            await asyncio.sleep(0)
        return None, True

    async def _explain_group(self, group: QueueGroup) -> Explanation:
        """The oldest message that is not settled speaks for the queue."""
        depth = gone = 0
        oldest: tuple[int, QueuePart, int] | None = None
        for number in range(len(group.topic.partitions)):
            await asyncio.sleep(0)  # opening takes a moment; others go first
            if self._host.queues.topics.is_untouched(group.topic, number):
                continue
            part = group.part(number)
            depth += part.depth()
            gone += part.counts().totals.get("gone", 0)
            found = await self._oldest(part) if part.depth() else None
            if found is not None and (oldest is None or found[0] < oldest[0]):
                oldest = found[0], part, found[1]
        facts: dict[str, Any] = {"topic": group.topic.name, "group": group.name}
        if group.policy.paused:
            nobody = "" if group.consumers else f"; {_consumers(group)}"
            sentence = f"The group is paused; {_messages(depth)} not settled{nobody}."
            told = Explanation(sentence=sentence, state="paused", facts=facts)
        elif oldest is None:
            sentence = f"{'Nothing is left to settle' if gone else 'Everything is settled'}; {_consumers(group)}."
            told = Explanation(sentence=sentence, state="empty", facts=facts)
        elif not group.consumers:
            leased = sum(part.counts().leased for part in group.open_parts())
            held = f" ({leased} on lease)" if leased else ""
            sentence = f"Nobody consumes the group: no consumer is connected, and {_messages(depth)} not settled{held}."
            told = Explanation(sentence=sentence, state="no-consumer", facts=facts | {"oldest_offset": oldest[2]})
        else:
            reason = await self._reason(oldest[1], oldest[2])
            sentence = f"{_messages(depth).capitalize()} not settled. The oldest, offset {oldest[2]}: {reason.sentence}"
            told = _told(group, reason._replace(sentence=sentence))
        told.facts |= {"depth": depth, "consumers": len(group.consumers), "requests": len(group.waiting)}
        if gone:
            told.sentence += _gone(gone, group.topic)
            told.facts["gone"] = gone
        await self._add_limits(told, group.topic)
        return told

    async def _oldest(self, part: QueuePart) -> tuple[int, int] | None:
        """When the first message that is not settled was stored, and its offset; compaction may have left gaps."""
        offset, settled = part.ledger.committed, part.ledger.settled
        while True:
            run = await part.keeper.run_at(offset)
            if run is None:
                return None
            for at in run.offsets():
                if at >= offset and at not in settled:
                    return run.append_time_us, at
            offset = run.next_offset
            await asyncio.sleep(0)

    async def _add_limits(self, told: Explanation, topic: Topic) -> None:
        """What keeps new messages from coming."""
        refusal = self._host.modes.publish_refusal
        if refusal is not None:
            told.sentence += f" Nothing can be published: {refusal}."
            told.facts["mode"] = str(refusal)
        limit = topic.config.max_depth
        if limit:
            await self._host.queues.open(topic)
        if limit and self._host.queues.depth(topic) >= limit:
            then = "gives up its oldest messages" if topic.config.overflow == "evict" else "refuses new messages"
            told.sentence += f" The topic is full, {limit} messages, and {then}."
            told.facts["max_depth"] = limit
        level, delay_ms = self._host.flow.level_of(topic)
        if level != "normal":
            slowed = f"publishers are slowed down by {delay_ms} ms" if delay_ms else "publishers are told"
            told.sentence += f" Its consumers are behind ({level}), and {slowed}."
            told.facts |= {"flow": level, "flow_delay_ms": delay_ms}

    async def _reason(self, part: QueuePart, offset: int) -> Reason:
        group, source = part.group, part.keeper.source
        await part.keeper.partition.warm(max(offset, source.start))
        situation = Situation(
            consumers=len(group.consumers),
            requests=len(group.waiting),
            paused=group.policy.paused,
            quota=str(self._host.modes.serve_refusal or ""),
        )
        return part.ledger.explain(offset, source, situation, self._host.queues.now_us())


def _told(group: QueueGroup, reason: Reason) -> Explanation:
    facts: dict[str, Any] = {"topic": group.topic.name, "group": group.name, **reason.facts}
    return Explanation(sentence=reason.sentence, state=reason.state, facts=facts)


def _letter_told(letter: DeadLetter) -> Explanation:
    error = f" ({in_a_sentence(letter.error)})" if letter.error else ""
    sentence = (
        f"It is a dead letter: group {letter.group} of topic {letter.original_topic} gave up on it, "
        f"{letter.reason}{error}; replay or purge it."
    )
    facts = {
        "topic": letter.topic,
        "group": letter.group,
        "original_id": letter.original_id,
        "original_topic": letter.original_topic,
        "reason": letter.reason,
        "error": letter.error,
        "dead_ms": letter.dead_ms,
    }
    return Explanation(sentence=sentence, state="dead-letter", facts=facts)


def _messages(count: int) -> str:
    return "1 message is" if count == 1 else f"{count} messages are"


def _gone(count: int, topic: Topic) -> str:
    """What is said of messages that were in the log no more when it was their turn."""
    were = "1 message was" if count == 1 else f"{count} messages were"
    before = "before the group had settled them"
    if topic.config.cleanup == "settled":
        return f" {were} gone from the log {before}."
    by = "retention or compaction" if topic.config.compacts else "retention"
    return f" {were} removed by {by} {before}; with cleanup=settled on the topic, retention waits."


def _consumers(group: QueueGroup) -> str:
    count = len(group.consumers)
    if not count:
        return "no consumer is connected"
    return "1 consumer is waiting" if count == 1 else f"{count} consumers are waiting"
