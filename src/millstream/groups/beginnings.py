"""Where a group begins: once for each name or pattern that its members subscribe to.

`start="latest"` means what comes from then on, also in partitions and topics that are made later, and whether or not a
member reads meanwhile.  So the ends of what there is are written down as the group's positions when it begins, and
whatever has no position afterwards came later and is read from its first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from millstream.groups.records import GroupState, TopicPartition
from millstream.names import compile_pattern, is_pattern

__all__ = ["BEGUN_MAX", "begun_with", "matching_topics", "newly_covered"]

#: Names that a group remembers to have begun with, the latest ones; its document stays below a megabyte or so.
BEGUN_MAX: Final = 4_000


def matching_topics(name: str, topics: Mapping[str, int]) -> list[str]:
    """The existing topics that a name or pattern stands for."""
    if not is_pattern(name):
        return [name] if name in topics else []
    matches = compile_pattern(name).fullmatch
    return [topic for topic in topics if matches(topic)]


def newly_covered(state: GroupState, names: Iterable[str], topics: Mapping[str, int]) -> list[TopicPartition]:
    """The partitions of what the group has not begun with yet; all of them exist now."""
    added = {topic for name in {*names}.difference(state.begun) for topic in matching_topics(name, topics)}
    if added:
        mine = {topic: topics[topic] for topic in added}
        added.difference_update(*(matching_topics(name, mine) for name in state.begun))
    return [TopicPartition(topic, number) for topic in sorted(added) for number in range(topics[topic])]


def begun_with(begun: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    """What the group remembers after a member with these subscriptions has joined."""
    return tuple(dict.fromkeys((*begun, *names)))[-BEGUN_MAX:]
