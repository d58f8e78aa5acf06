"""Which queue groups exist, with which policy: facts of a state log, and the control calls that change them.

A pattern is a group on every topic that matches, also on those that appear later; these need no facts of their own,
because they follow from the pattern.  Dead letter topics belong to a pattern only if it names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import structlog

from millstream.broker.queues.consumers import Consumer
from millstream.broker.queues.group import QueueGroup
from millstream.broker.registry import Topic
from millstream.broker.state import StateLog
from millstream.clock import Clock
from millstream.dead_letters import DEAD_LETTER_GROUP
from millstream.errors import (
    ConfigInvalid,
    GroupNotEmpty,
    GroupNotFound,
    InvalidArgument,
    MillstreamError,
    QuotaExceeded,
    StorageFailed,
    TopicNotFound,
)
from millstream.names import check_group, check_pattern, compile_pattern, is_pattern
from millstream.policies import QueuePolicy
from millstream.wire import queue_calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["QueueRegistry"]

_log = structlog.get_logger("millstream.queues")

_GROUPS_MAX: Final = 1_000  # of a topic: each is woken by every message
_PATTERNS_MAX: Final = 1_000  # of a namespace: every new topic is compared with each
_JOINED_AT_A_TIME: Final = 50
#: When a topic is tried again that could not be opened.
_AGAIN_S: Final = 1.0
_AGAIN_S_MAX: Final = 60.0

_TopicKey: TypeAlias = tuple[str, str]
_GroupKey: TypeAlias = tuple[str, str, str]


@dataclass(eq=False, slots=True)
class _Pattern:
    namespace: str
    pattern: str
    group: str
    policy: QueuePolicy
    #: As of a group; that of the groups which follow from it.
    made_us: int
    consumers: list[Consumer] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"pattern/{self.namespace}/{self.pattern}/{self.group}"

    def covers(self, topic: Topic, *, holds_letters: bool) -> bool:
        if (
            topic.deleting
            or topic.namespace != self.namespace
            or not compile_pattern(self.pattern).fullmatch(topic.name)
        ):
            return False
        # What a group has given up on is not handed to it again: letters are for who asks for them by name.
        return not holds_letters or self.pattern.rpartition(".")[2] == topic.name.rpartition(".")[2]


class QueueRegistry:
    """The groups by topic and name."""

    def __init__(self, host: Queues, log: StateLog, clock: Clock) -> None:
        self._host = host
        self._log = log
        self._clock = clock
        self._groups: dict[_TopicKey, dict[str, QueueGroup]] = {}
        self._patterns: dict[_GroupKey, _Pattern] = {}
        self._changing = asyncio.Lock()
        #: Keys of what is written down; a group that is not among them follows from a pattern.
        self._written: set[str] = set()
        #: Groups of topics that are gone, or half so, of which that is not on disk yet.
        self._stale: dict[str, None] = {}

    def replay(self, documents: Mapping[str, Any]) -> None:
        self._written = set(documents)
        for key, document in documents.items():
            kind, namespace, place, name = key.split("/")
            policy, made_us = QueuePolicy.stored(document["policy"]), document.get("made_us", 0)
            if kind == "pattern":
                self._patterns[namespace, place, name] = _Pattern(namespace, place, name, policy, made_us)
            else:
                topic = self._host.topics.registry.find(namespace, place)
                if topic is not None:
                    self._add(topic, name, policy).made_us = made_us
                else:
                    self._stale[key] = None
        for topic in self._host.topics.registry.all_topics():
            self._follow(topic)

    async def forget_stale(self) -> None:
        """Groups whose topic is gone must not come back with the next topic of its name."""
        stale = dict(self._stale)
        if stale:
            await self._record(stale)
            self._stale = {key: None for key in self._stale if key not in stale}

    # --- looking -------------------------------------------------------------------------------------------------

    def on_topic(self, topic: Topic) -> list[QueueGroup]:
        """The groups that somebody opened on a topic."""
        return [group for group in self._groups.get((topic.namespace, topic.name), {}).values() if group.opened]

    def all_groups(self, namespace: str) -> Iterator[QueueGroup]:
        for (where, _), groups in sorted(self._groups.items()):
            if where == namespace:
                yield from (group for _, group in sorted(groups.items()) if group.opened)

    def known(self, topic: Topic, name: str) -> QueueGroup | None:
        """A group, also one that only the broker itself uses."""
        return self._groups.get((topic.namespace, topic.name), {}).get(name)

    def is_awaited(self, namespace: str, name: str) -> bool:
        """Whether a pattern is waiting for a topic of this name to appear."""
        return any(
            pattern.namespace == namespace and compile_pattern(pattern.pattern).fullmatch(name)
            for pattern in self._patterns.values()
        )

    def get(self, namespace: str, topic_name: str, name: str) -> QueueGroup:
        topic = self._host.topics.registry.get(namespace, topic_name)
        group = self._groups.get((topic.namespace, topic.name), {}).get(name)
        if group is None or not group.opened:
            raise GroupNotFound(f"topic {topic_name!r} has no queue group {name!r}")
        return group

    def implicit(self, topic: Topic, name: str) -> QueueGroup:
        """The group, or one that only the broker itself uses until somebody opens it.

        Raises TopicNotFound for a topic that was deleted while somebody held it: another one may have its name.
        """
        if topic.deleting:
            raise TopicNotFound(f"topic {topic.name!r} was deleted")
        group = self._groups.get((topic.namespace, topic.name), {}).get(name)
        return group or self._add(topic, name, QueuePolicy(), opened=False)

    def _add(self, topic: Topic, name: str, policy: QueuePolicy, *, opened: bool = True) -> QueueGroup:
        group = QueueGroup(self._host, topic, name, policy, opened=opened)
        self._groups.setdefault((topic.namespace, topic.name), {})[name] = group
        return group

    # --- topics come and go --------------------------------------------------------------------------------------

    async def topic_changed(self, topic: Topic) -> None:
        """A topic was made, got partitions, or has other settings."""
        self._follow(topic)
        self._leave_letters(topic)
        groups = self._groups.get((topic.namespace, topic.name), {})
        for group in list(groups.values()):
            group.configure(group.policy)
        for group in list(groups.values()):
            patterns = [
                pattern
                for pattern in self._patterns.values()
                if pattern.group == group.name and self._covers(pattern, topic) and pattern.consumers
            ]
            if group.consumers or patterns:
                with suppress(TopicNotFound, GroupNotFound):  # what goes away meanwhile needs nothing of this
                    await group.open()
                    for pattern in patterns:
                        for consumer in pattern.consumers:
                            self._host.join(consumer, group)
                    for part in group.parts():
                        part.wake()

    def _follow(self, topic: Topic) -> None:
        """Have the groups that patterns want on this topic."""
        for pattern in self._patterns.values():
            if self._covers(pattern, topic) and not (group := self.implicit(topic, pattern.group)).opened:
                group.opened, group.made_us = True, pattern.made_us
                group.configure(pattern.policy)

    async def forget_topic(self, topic: Topic) -> None:
        """A topic is gone, and its partitions are closed already."""
        groups = self._groups.pop((topic.namespace, topic.name), {})
        gone = TopicNotFound(f"topic {topic.name!r} was deleted")
        for group in groups.values():
            group.gone = gone
            for consumer in list(group.consumers.values()):
                self._host.leave(consumer, group)
                if not consumer.groups and not any(
                    consumer in pattern.consumers for pattern in self._patterns.values()
                ):
                    _orphan(consumer, gone)
            for part in group.open_parts():
                self._host.forget_part(part)
            self._stale[group.key] = None  # also of one that is just being made
        self._host.forget_topic(topic)  # also where its groups were deleted before
        await self.forget_stale()  # also what was refused when this was tried before

    async def forget_namespace(self, namespace: str) -> None:
        """A namespace is gone, and its topics with it."""
        gone = [pattern for pattern in self._patterns.values() if pattern.namespace == namespace]
        if gone:
            await self._record({pattern.key: None for pattern in gone})
        for pattern in gone:
            self._patterns.pop((namespace, pattern.pattern, pattern.group), None)

    def forget_consumer(self, consumer: Consumer) -> None:
        for pattern in self._patterns.values():
            if consumer in pattern.consumers:
                pattern.consumers.remove(consumer)

    # --- opening -------------------------------------------------------------------------------------------------

    async def open(self, session: Session, call: queue_calls.OpenQueue) -> queue_calls.QueueOpened:
        """Make the session a consumer, and the group if there is none."""
        values = dict(call.policy or {})
        if call.start:
            values["start"] = call.start
        if is_pattern(call.topic):
            pattern = await self._open_pattern(session.namespace, call.topic, call.group, values)
            groups = self._groups_of(pattern)
        else:
            pattern = None
            groups = [await self.ensure(session.namespace, call.topic, call.group, values)]
        consumer = self._host.add_consumer(session, name=call.consumer, lease_ms=call.lease_ms, detached=call.detached)
        consumer.by_receipt = call.detached or call.by_receipt
        consumer.auto_ack = call.auto_ack
        if pattern is not None:
            pattern.consumers.append(consumer)  # before anything is waited for: topics may come meanwhile
        topics: list[str] = []
        try:
            for place, group in enumerate(groups, 1):
                if place % _JOINED_AT_A_TIME == 0:
                    await asyncio.sleep(0)  # a pattern may cover thousands
                try:
                    await group.open()
                    self._host.join(consumer, group)
                except TopicNotFound:  # one of many that a pattern covers was deleted meanwhile
                    if pattern is None:
                        raise
                except StorageFailed as error:  # that one can say so itself; the others are not to wait for it
                    if pattern is None:
                        raise
                    _log.warning(
                        "a topic cannot be opened", topic=group.topic.name, group=group.name, reason=str(error)
                    )
                    self._host.own(self._join_later(pattern, consumer, group))
                else:
                    topics.append(group.topic.name)
        except BaseException:
            self._host.remove_consumer(consumer)
            raise
        return queue_calls.QueueOpened(consumer=consumer.number, topics=topics)

    async def ensure(self, namespace: str, topic_name: str, name: str, values: Mapping[str, Any]) -> QueueGroup:
        """The group with all its parts, made if need be; raises ConfigInvalid when it exists with other settings."""
        group = self._existing(namespace, topic_name, name, values)
        if group is None:
            async with self._changing:  # which may take a while: what is there already does not wait for it
                group = self._existing(namespace, topic_name, name, values)
                if group is None:
                    topic = self._host.topics.registry.get(namespace, topic_name)
                    group = await self._create(topic, name, QueuePolicy.from_mapping(values))
        await group.open()
        return group

    def _existing(self, namespace: str, topic_name: str, name: str, values: Mapping[str, Any]) -> QueueGroup | None:
        self._host.topics.registry.get(namespace, topic_name)
        group = self._groups.get((namespace, topic_name), {}).get(check_group(name))
        if group is None or not group.opened or group.gone is not None:
            return None
        _check_same(group.policy, values, f"queue group {name!r} of topic {topic_name!r}")
        return group

    async def _create(self, topic: Topic, name: str, policy: QueuePolicy) -> QueueGroup:
        if len(self.on_topic(topic)) >= _GROUPS_MAX:
            raise QuotaExceeded(f"a topic has {_GROUPS_MAX} queue groups at most")
        await self._forget_facts(topic, name)
        group = self.implicit(topic, name)
        group.is_new = name != DEAD_LETTER_GROUP  # that one has facts, and nothing may begin anew above them
        if policy.start == "latest" and not self._has_letters(topic, name):
            for number in range(len(topic.partitions)):
                if not self._host.topics.is_untouched(topic, number):
                    part = group.part(number)
                    part.ledger.start_at(part.end)
                    await part.record_durably()
        if group.gone is not None:
            raise group.gone  # with its topic
        made_us = self._clock.now_us()
        await self._record({group.key: _document(policy, made_us)})
        if group.gone is not None:
            raise group.gone  # that was recorded after it
        group.opened, group.made_us = True, made_us
        group.configure(policy)
        _log.info("queue group created", namespace=topic.namespace, topic=topic.name, group=name)
        return group

    def _has_letters(self, topic: Topic, name: str) -> bool:
        """Whether this is the group in which the broker settles dead letters: it is there before anybody opens it."""
        return name == DEAD_LETTER_GROUP and self._host.topics.registry.holds_letters(topic)

    async def _forget_facts(self, topic: Topic, name: str) -> None:
        """A group of this name that was only half made or deleted may have left facts, which are not the next one's."""
        if name == DEAD_LETTER_GROUP:
            return  # the broker settles letters there whether or not anybody consumes them
        left = self._groups.get((topic.namespace, topic.name), {}).pop(name, None)
        if left is not None:
            left.gone = GroupNotFound(f"queue group {name!r} of topic {topic.name!r} was not made")
            for part in left.open_parts():
                self._host.forget_part(part)
        topics = self._host.topics
        for number in range(len(topic.partitions)):
            if not topics.is_untouched(topic, number):
                await asyncio.sleep(0)
                journal = topics.journal(topic, number)
                stale = [entity for entity in (f"queue/{name}", f"burials/{name}") if entity in journal.entities]
                for entity in stale:
                    journal.forget(entity)
                if stale:
                    await journal.record_durably(*((entity, None) for entity in stale))

    async def _open_pattern(self, namespace: str, text: str, name: str, values: Mapping[str, Any]) -> _Pattern:
        check_pattern(text)
        async with self._changing:
            self._host.topics.registry.topics(namespace)
            pattern = self._patterns.get((namespace, text, check_group(name)))
            if pattern is not None:
                _check_same(pattern.policy, values, f"queue group {name!r} of pattern {text!r}")
                return pattern
            if sum(key[0] == namespace for key in self._patterns) >= _PATTERNS_MAX:
                raise QuotaExceeded(f"a namespace has {_PATTERNS_MAX} queue groups on patterns at most; delete one")
            policy = QueuePolicy.from_mapping(values)
            pattern = _Pattern(namespace, text, name, policy, self._clock.now_us())
            for topic in self._covered(pattern):
                group = self._groups.get((namespace, topic.name), {}).get(name)
                if group is None or not group.opened:
                    with suppress(TopicNotFound):  # it was deleted meanwhile
                        await self._create(topic, name, policy)
            await self._record({pattern.key: _document(policy, pattern.made_us)})
            self._patterns[namespace, text, name] = pattern
            for topic in self._covered(pattern):
                self._follow(topic)  # it may have come while the others were made
            return pattern

    def _covered(self, pattern: _Pattern) -> list[Topic]:
        topics = self._host.topics.registry.topics(pattern.namespace)
        return [topic for _, topic in sorted(topics.items()) if self._covers(pattern, topic)]

    def _covers(self, pattern: _Pattern, topic: Topic) -> bool:
        return pattern.covers(topic, holds_letters=self._host.topics.registry.holds_letters(topic))

    def _groups_of(self, pattern: _Pattern) -> list[QueueGroup]:
        """The groups that follow from it; that one does may be new, because no letters go to its topic any more."""
        covered = self._covered(pattern)
        for topic in covered:
            self._follow(topic)
        return [self.get(pattern.namespace, topic.name, pattern.group) for topic in covered]

    def _left_by(self, pattern: _Pattern) -> list[QueueGroup]:
        """Groups that only a pattern has made, on topics to which letters have gone since."""
        topics = self._host.topics.registry.topics(pattern.namespace).values()
        groups = (self.known(it, pattern.group) for it in topics if pattern.covers(it, holds_letters=False))
        return [it for it in groups if it and it.opened and it.key not in self._written and not self._pattern_of(it)]

    def _leave_letters(self, topic: Topic) -> None:
        """Consumers of patterns leave the place where letters of this topic go from now on."""
        for group in list(self._groups.get((topic.namespace, topic.config.dead_letter_topic), {}).values()):
            for pattern in self._patterns.values():
                for consumer in [it for it in pattern.consumers if it.number in group.consumers]:
                    if not self._covers(pattern, group.topic):
                        self._host.withdraw(consumer, group)

    async def _join_later(self, pattern: _Pattern, consumer: Consumer, group: QueueGroup) -> None:
        """As soon as a topic can be opened that could not be; the others of the pattern did not wait for it."""
        pause_s = _AGAIN_S
        while consumer in pattern.consumers and group.gone is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_S_MAX)
            with suppress(StorageFailed, TopicNotFound, GroupNotFound):
                await group.open()
                self._host.join(consumer, group)
                return

    # --- changing ------------------------------------------------------------------------------------------------

    async def configure(self, namespace: str, call: queue_calls.ConfigureQueue) -> None:
        async with self._changing:
            if is_pattern(call.topic):
                pattern = self._pattern(namespace, call.topic, call.group)
                pattern_policy = QueuePolicy.from_mapping(call.policy, pattern.policy)
                groups = self._groups_of(pattern)
            else:
                pattern = None
                groups = [self.get(namespace, call.topic, call.group)]
            policies = {group: QueuePolicy.from_mapping(call.policy, group.policy) for group in groups}
            facts: dict[str, Any] = {group.key: _document(policy, group.made_us) for group, policy in policies.items()}
            if pattern is not None:
                facts[pattern.key] = _document(pattern_policy, pattern.made_us)
            await self._record(facts)
            if pattern is not None:
                pattern.policy = pattern_policy
                for group in self._groups_of(pattern):  # there may be more of them by now
                    policies.setdefault(group, pattern_policy)
            for group, policy in policies.items():
                group.configure(policy)

    async def delete(self, namespace: str, call: queue_calls.DeleteQueue) -> None:
        async with self._changing:
            if is_pattern(call.topic):
                pattern = self._pattern(namespace, call.topic, call.group)
                groups = self._groups_of(pattern)
            else:
                pattern = None
                groups = [self.get(namespace, call.topic, call.group)]
                if (owner := self._pattern_of(groups[0])) is not None:
                    raise InvalidArgument(f"queue group {call.group!r} belongs to pattern {owner.pattern!r}")
            consumers = pattern.consumers if pattern is not None else []
            if (consumers or any(group.consumers for group in groups)) and not call.force:
                raise GroupNotEmpty(f"queue group {call.group!r} has consumers; stop them first or use force")
            if pattern is not None:
                await self._record({pattern.key: None})
                groups = [*self._groups_of(pattern), *self._left_by(pattern)]  # there may be more of them by now
                del self._patterns[namespace, call.topic, call.group]
                await self._pass_on(groups)
            for group in groups:
                if self._pattern_of(group) is None:
                    await self._delete(group)
                else:
                    for consumer in list(consumers):
                        self._host.withdraw(consumer, group)
            gone = GroupNotFound(f"queue group {call.group!r} of pattern {call.topic!r} was deleted")
            for consumer in list(consumers):  # also of a pattern that no topic has matched
                if not consumer.groups:
                    _orphan(consumer, gone)

    async def _pass_on(self, groups: list[QueueGroup]) -> None:
        """Give groups whose pattern is gone the policy of another pattern that covers them.

        That is written down: they are no other groups, which they would be if they followed from it.
        """
        owned = ((group, self._pattern_of(group)) for group in groups if group.key not in self._written)
        heirs = {group: owner.policy for group, owner in owned if owner is not None}
        if heirs:
            await self._record({group.key: _document(policy, group.made_us) for group, policy in heirs.items()})
            for group, policy in heirs.items():
                group.configure(policy)

    async def _delete(self, group: QueueGroup) -> None:
        topic, name = group.topic, group.name
        await self._record({group.key: None})
        group.gone = GroupNotFound(f"queue group {name!r} of topic {topic.name!r} was deleted")
        for consumer in list(group.consumers.values()):  # also those that came while it was recorded
            self._host.leave(consumer, group)
            if not consumer.groups:
                _orphan(consumer, group.gone)
        topic.departed.update(group.tally())
        self._groups.get((topic.namespace, topic.name), {}).pop(name, None)
        if self._has_letters(topic, name) and not topic.deleting:
            # Which letters are done with is written nowhere else, and somebody may look for them at any moment.
            self.implicit(topic, name).take_over(group)
        for part in group.open_parts():
            self._host.forget_part(part)
            entities = (part.entity, part.burials.entity)
            for entity in entities:
                part.keeper.journal.forget(entity)
            await part.keeper.journal.record_durably(*((entity, None) for entity in entities))
        _log.info("queue group deleted", namespace=topic.namespace, topic=topic.name, group=name)

    def _pattern_of(self, group: QueueGroup) -> _Pattern | None:
        """A pattern that wants the group, if any does."""
        wanted = (it for it in self._patterns.values() if it.group == group.name and self._covers(it, group.topic))
        return next(wanted, None)

    def _pattern(self, namespace: str, text: str, name: str) -> _Pattern:
        pattern = self._patterns.get((namespace, text, name))
        if pattern is None:
            raise GroupNotFound(f"there is no queue group {name!r} on pattern {text!r}")
        return pattern

    async def _record(self, facts: Mapping[str, Any]) -> None:
        await self._log.record(facts, now_us=self._clock.now_us())
        for key, document in facts.items():
            (self._written.discard if document is None else self._written.add)(key)


def _orphan(consumer: Consumer, gone: MillstreamError) -> None:
    """There will never be anything for it again."""
    consumer.orphaned = gone
    for handle in list(consumer.waiting):
        handle.answer(gone)


def _document(policy: QueuePolicy, made_us: int) -> dict[str, Any]:
    return {"policy": msgspec.to_builtins(policy), "made_us": made_us}


def _check_same(policy: QueuePolicy, values: Mapping[str, Any], what: str) -> None:
    asked = QueuePolicy.from_mapping(values, policy)
    for name in values:
        if name != "start" and getattr(asked, name) != getattr(policy, name):
            raise ConfigInvalid(
                f"{what} has {name}={getattr(policy, name)!r}, not {getattr(asked, name)!r}; "
                "change it with queue.configure or leave it out"
            )
