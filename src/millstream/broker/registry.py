"""Namespaces and topics: what exists, as documents of the state log.

The registry only knows; it opens no files.  Changes are decided here as facts, recorded by the broker, and then applied
with `replay`, which is also how a restart fills the registry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from millstream.dead_letters import DEAD_LETTER_SUFFIX
from millstream.errors import (
    ConfigInvalid,
    InvalidArgument,
    InvalidName,
    NamespaceNotEmpty,
    NamespaceNotFound,
    QuotaExceeded,
    TopicExists,
    TopicNotFound,
)
from millstream.ids import schedule_uid
from millstream.names import (
    DEFAULT_NAMESPACE,
    INBOX_PREFIX,
    STAGE_PREFIX,
    check_namespace,
    check_topic,
    compile_pattern,
    is_pattern,
)
from millstream.queues.letters import dead_letter_topic
from millstream.topics import PARTITIONS_MAX, TopicConfig

__all__ = ["Facts", "PartitionCounts", "Registry", "Topic"]

Facts = dict[str, Any]
#: Producer ids are handed out from blocks: one fact for many producers, and a crash wastes at most a block.
PRODUCER_BLOCK: Final = 1_000


@dataclass(slots=True)
class Topic:
    """One topic as it is known; its partitions are opened when first used."""

    namespace: str
    name: str
    config: TopicConfig
    partition_uids: list[int]
    created_ms: int
    deleting: bool = False
    #: Filled by the broker: what runs each partition, or None while it was not needed.
    partitions: list[Any] = field(default_factory=list)
    #: What stands beside the partitions, by the name of its directory, once it was needed.
    beside: dict[str, Any] = field(default_factory=dict)
    #: What queue groups had done with its messages when they were deleted: the totals of the topic do not go back.
    departed: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> str:
        return f"topic/{self.namespace}/{self.name}"

    def document(self) -> dict[str, Any]:
        return {
            "config": msgspec.to_builtins(self.config),
            "partition_uids": self.partition_uids,
            "created_ms": self.created_ms,
            "deleting": self.deleting,
        }


class PartitionCounts(Mapping[str, int]):
    """How many partitions each topic of a namespace has, as it is when somebody looks.

    Groups mostly ask for one topic; putting down ten thousand of them for each commit would cost more than the commit.
    """

    __slots__ = ("_topics",)

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self._topics = topics

    def __getitem__(self, name: str) -> int:
        topic = self._topics[name]
        if topic.deleting:
            raise KeyError(name)
        return len(topic.partition_uids)

    def __iter__(self) -> Iterator[str]:
        return (name for name, topic in self._topics.items() if not topic.deleting)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Registry:
    """Every namespace and topic of the broker."""

    def __init__(self, *, topics_max: int, partitions_max: int, namespaces_max: int) -> None:
        self._topics_max = topics_max
        self._partitions_max = partitions_max
        self._namespaces_max = namespaces_max
        self.namespaces: dict[str, dict[str, Topic]] = {DEFAULT_NAMESPACE: {}}
        self.producer_ids_until = 1
        self._topic_of: dict[int, Topic] = {}  # by the uid of a partition
        #: How many topics of a namespace name a topic as that of their dead letters.
        self._named: Counter[tuple[str, str]] = Counter()

    # --- looking -------------------------------------------------------------------------------------------------

    def find(self, namespace: str, name: str) -> Topic | None:
        try:
            topic = self.namespaces[namespace][name]
        except KeyError:
            return None
        return None if topic.deleting else topic

    def get(self, namespace: str, name: str) -> Topic:
        """The topic, or the error that says which of namespace, name or topic is the problem."""
        topic = self.find(namespace, name)
        if topic is None:
            self.topics(namespace)
            check_topic(name)
            raise TopicNotFound(f"topic {name!r} does not exist in namespace {namespace!r}")
        return topic

    def topics(self, namespace: str) -> dict[str, Topic]:
        topics = self.namespaces.get(namespace)
        if topics is None:
            raise NamespaceNotFound(f"namespace {check_namespace(namespace)!r} does not exist")
        return topics

    def matching(self, namespace: str, pattern: str | None) -> list[Topic]:
        """Topics by name, those that match the pattern if there is one."""
        topics = (topic for _, topic in sorted(self.topics(namespace).items()) if not topic.deleting)
        if pattern is None:
            return list(topics)
        if not is_pattern(pattern):
            return [topic for topic in topics if topic.name == check_topic(pattern)]
        matches = compile_pattern(pattern).fullmatch
        return [topic for topic in topics if matches(topic.name)]

    def partition_counts(self, namespace: str) -> PartitionCounts:
        return PartitionCounts(self.namespaces.get(namespace, {}))

    def all_topics(self) -> Iterable[Topic]:
        for topics in self.namespaces.values():
            yield from topics.values()

    def place_of(self, uid: int) -> tuple[Topic, int] | None:
        """The topic and partition that have a uid."""
        topic = self._topic_of.get(uid)
        return None if topic is None or topic.deleting else (topic, topic.partition_uids.index(uid))

    def holds_letters(self, topic: Topic) -> bool:
        """Whether dead letters of other topics go there."""
        return topic.name.endswith(DEAD_LETTER_SUFFIX) or self._named[topic.namespace, topic.name] > 0

    def keeps_dead(self, topic: Topic) -> bool:
        """Whether a message that a queue group gives up on stays in this topic, because it is a dead letter already.

        It does not where the topic itself names a dead letter topic.
        """
        return topic.config.dead_letter_topic in ("", topic.name) and self.holds_letters(topic)

    # --- deciding ------------------------------------------------------------------------------------------------

    def decide_create_namespace(self, name: str, *, now_ms: int) -> Facts:
        if check_namespace(name) in self.namespaces:
            raise InvalidArgument(f"namespace {name!r} exists already")
        if len(self.namespaces) >= self._namespaces_max:
            raise QuotaExceeded(f"the broker holds {self._namespaces_max} namespaces already (topics.max_namespaces)")
        return {f"namespace/{name}": {"created_ms": now_ms}}

    def decide_delete_namespace(self, name: str, *, force: bool) -> Facts:
        topics = self.topics(name)
        if name == DEFAULT_NAMESPACE:
            raise InvalidArgument(f"namespace {DEFAULT_NAMESPACE!r} cannot be deleted")
        if topics and not force:
            raise NamespaceNotEmpty(f"namespace {name!r} holds {len(topics)} topics; delete them first or use force")
        return {f"namespace/{name}": None}

    def decide_create_topic(
        self,
        namespace: str,
        name: str,
        *,
        partitions: int,
        config: TopicConfig,
        now_ms: int,
        draw_uid: Callable[[], int],
        in_new: bool = False,
    ) -> Facts:
        """`in_new`: its namespace is made with it, if there is none."""
        facts: Facts = {}
        if in_new and namespace not in self.namespaces:
            facts = self.decide_create_namespace(namespace, now_ms=now_ms)
        topics = {} if facts else self.topics(namespace)
        if check_topic(name) in topics:
            raise TopicExists(f"topic {name!r} exists already in namespace {namespace!r}")
        if name.startswith(INBOX_PREFIX):
            raise InvalidName(f"topic {name!r} cannot be made: names that begin with {INBOX_PREFIX!r} are inboxes")
        if name.startswith(STAGE_PREFIX):
            raise InvalidName(f"topic {name!r} cannot be made: names that begin with {STAGE_PREFIX!r} are stages")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidArgument(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
        if sum(map(len, self.namespaces.values())) >= self._topics_max:
            raise QuotaExceeded(f"the broker holds {self._topics_max} topics already (topics.max_topics)")
        self._check_partitions(partitions)
        self._check_letters(namespace, name, config.dead_letter_topic)
        topic = Topic(namespace, name, config, self._draw_uids(partitions, draw_uid), now_ms)
        return {**facts, topic.key: topic.document()}

    def decide_alter_topic(
        self,
        topic: Topic,
        changes: Mapping[str, Any],
        *,
        partitions: int | None,
        draw_uid: Callable[[], int],
    ) -> Facts:
        config = TopicConfig.from_mapping(changes, topic.config)
        if config.mode != topic.config.mode:
            raise InvalidArgument(f"the mode of topic {topic.name!r} cannot change: its messages live elsewhere")
        if "dead_letter_topic" in changes:
            self._check_letters(topic.namespace, topic.name, config.dead_letter_topic)
        uids = topic.partition_uids
        if partitions is not None:
            if not len(uids) <= partitions <= PARTITIONS_MAX:
                raise InvalidArgument(
                    f"topic {topic.name!r} has {len(uids)} partitions; it can get up to {PARTITIONS_MAX}, never fewer"
                )
            self._check_partitions(partitions - len(uids))
            uids = uids + self._draw_uids(partitions - len(uids), draw_uid)
        changed = Topic(topic.namespace, topic.name, config, uids, topic.created_ms)
        return {topic.key: changed.document()}

    def _check_partitions(self, more: int) -> None:
        held = len(self._topic_of)
        if more and held + more > self._partitions_max:
            raise QuotaExceeded(
                f"the broker holds {held} partitions, and with {more} more they would be more than "
                f"{self._partitions_max} (topics.max_partitions)"
            )

    def _check_letters(self, namespace: str, name: str, letters: str) -> None:
        """Refuse a chain of dead letter topics that leads back to where it began."""
        way = [letters] if letters else []
        while way and way[-1] != name:
            topic = self.find(namespace, way[-1])
            following = dead_letter_topic(way[-1], topic.config.dead_letter_topic if topic is not None else "")
            if following in way or (topic is None and following != name):
                return
            way.append(following)
        if way:
            through = f" by way of {', '.join(map(repr, way[:-1]))}" if way[1:] else ""
            raise ConfigInvalid(
                f"dead_letter_topic of {name!r} cannot be {letters!r}: "
                f"what died there would come back to it{through}; name another topic, or leave it empty"
            )

    def decide_producer_block(self) -> Facts:
        return {"producer-ids": {"until": self.producer_ids_until + PRODUCER_BLOCK}}

    def _draw_uids(self, count: int, draw_uid: Callable[[], int]) -> list[int]:
        uids: dict[int, None] = {}
        while len(uids) < count:
            uid = draw_uid()
            if not any(taken in self._topic_of or taken in uids for taken in (uid, schedule_uid(uid))):
                uids[uid] = None
        return list(uids)

    # --- replaying -----------------------------------------------------------------------------------------------

    def replay(self, facts: Mapping[str, Any]) -> None:
        """Take facts as true."""
        for key, document in facts.items():
            kind, _, rest = key.partition("/")
            if kind == "namespace":
                if document is None:
                    for topic in self.namespaces.pop(rest, {}).values():
                        self._forget(topic)
                else:
                    self.namespaces.setdefault(rest, {})
            elif kind == "topic":
                namespace, _, name = rest.partition("/")
                self._replay_topic(namespace, name, document)
            elif kind == "producer-ids":
                self.producer_ids_until = document["until"]

    def begin_anew(self, draw_uid: Callable[[], int]) -> None:
        """After a start: give the partitions of topics in memory new uids, because their messages are gone.

        Whoever remembers a position by the old uid sees that it is void.  Nothing of this is recorded.
        """
        for topic in self.all_topics():
            if topic.config.mode == "ephemeral":
                uids = self._draw_uids(len(topic.partition_uids), draw_uid)
                for uid in topic.partition_uids:
                    self._topic_of.pop(uid, None)
                topic.partition_uids = uids
                self._topic_of.update(dict.fromkeys(uids, topic))

    def _replay_topic(self, namespace: str, name: str, document: Mapping[str, Any] | None) -> None:
        topics = self.namespaces.setdefault(namespace, {})
        if document is None:
            topic = topics.pop(name, None)
            if topic is not None:
                self._forget(topic)
            return
        config = TopicConfig.stored(document["config"])
        uids = document["partition_uids"]
        topic = topics.get(name)
        if topic is not None:
            self._unname(topic)
        self._named[namespace, config.dead_letter_topic] += 1
        if topic is None:
            topics[name] = topic = Topic(namespace, name, config, uids, document["created_ms"])
        topic.config, topic.partition_uids = config, uids
        self._topic_of.update(dict.fromkeys(uids, topic))
        topic.deleting = document.get("deleting", False)
        topic.partitions += [None] * (len(uids) - len(topic.partitions))

    def _unname(self, topic: Topic) -> None:
        key = topic.namespace, topic.config.dead_letter_topic
        self._named[key] -= 1
        if not self._named[key]:
            del self._named[key]

    def _forget(self, topic: Topic) -> None:
        self._unname(topic)
        for uid in topic.partition_uids:
            self._topic_of.pop(uid, None)
