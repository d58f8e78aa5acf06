"""`why`: what stands between a message, or a queue, and its delivery, in one sentence with the facts behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from millstream.broker.letters.letters import Letters
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.part import QueuePart
from millstream.broker.queues.queues import Queues
from millstream.broker.queues.views import place_of
from millstream.broker.schedules.schedules import Schedules
from millstream.dead_letters import DeadLetter
from millstream.errors import InvalidArgument, MessageNotFound
from millstream.queues.records import Reason, Situation
from millstream.wire.queue_calls import Explain, Explanation

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Why"]


class _Host(Protocol):
    queues: Queues
    schedules: Schedules
    letters: Letters


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
        if group_name:
            group = queues.registry.get(namespace, topic.name, group_name)
            return _told(group, await self._reason(group.part(number), offset))
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
        return told

    async def _explain_group(self, group: QueueGroup) -> Explanation:
        """The oldest message that is not settled speaks for the queue."""
        depth = 0
        oldest: tuple[int, QueuePart, int] | None = None
        for number in range(len(group.topic.partitions)):
            if self._host.queues.topics.is_untouched(group.topic, number):
                continue
            part = group.part(number)
            depth += part.depth()
            if part.depth():
                offset = part.ledger.committed
                await part.keeper.partition.warm(max(offset, part.keeper.source.start))
                run = part.keeper.source.batch_at(offset)
                if run is not None and (oldest is None or run.append_time_us < oldest[0]):
                    oldest = run.append_time_us, part, max(offset, run.base_offset)
        if group.policy.paused:
            sentence = f"The group is paused; {_messages(depth)} not settled."
            told = Explanation(
                sentence=sentence, state="paused", facts={"topic": group.topic.name, "group": group.name}
            )
        elif oldest is None:
            sentence = f"Everything is settled; {_consumers(group)}."
            told = Explanation(sentence=sentence, state="empty", facts={"topic": group.topic.name, "group": group.name})
        else:
            reason = await self._reason(oldest[1], oldest[2])
            sentence = f"{_messages(depth).capitalize()} not settled. The oldest, offset {oldest[2]}: {reason.sentence}"
            told = _told(group, reason._replace(sentence=sentence))
        told.facts |= {"depth": depth, "consumers": len(group.consumers), "requests": len(group.waiting)}
        return told

    async def _reason(self, part: QueuePart, offset: int) -> Reason:
        group, source = part.group, part.keeper.source
        await part.keeper.partition.warm(max(offset, source.start))
        situation = Situation(
            consumers=len(group.consumers), requests=len(group.waiting), paused=group.policy.paused, quota=""
        )
        return part.ledger.explain(offset, source, situation, self._host.queues.now_us())


def _told(group: QueueGroup, reason: Reason) -> Explanation:
    facts: dict[str, Any] = {"topic": group.topic.name, "group": group.name, **reason.facts}
    return Explanation(sentence=reason.sentence, state=reason.state, facts=facts)


def _letter_told(letter: DeadLetter) -> Explanation:
    error = f" ({letter.error})" if letter.error else ""
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


def _consumers(group: QueueGroup) -> str:
    count = len(group.consumers)
    return (
        "no consumer is connected" if not count else "1 consumer is waiting" if count == 1 else f"{count} are waiting"
    )
