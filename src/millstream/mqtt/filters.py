"""Which subscriptions a topic name has: a trie over raw MQTT levels, so that a lookup costs the same for any number of
filters.

The rules are those of `topics.filter_matches`; levels may be empty and may have any letters, unlike in
`traffic/patterns.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sized
from typing import Any, Final, Generic, TypeAlias, TypeVar

__all__ = ["FilterTrie", "remembered_size"]

T = TypeVar("T", bound=Hashable)

#: A subscriber, and what it said with each of its filters that match.
Found: TypeAlias = tuple[T, tuple[Any, ...]]

#: How much is remembered of topics and their subscribers; beyond it they are looked up again.
_REMEMBERED_MAX: Final = 200_000
#: Letters of a name that count as much as a subscriber: a pointer to one, and what it takes to find it.
_LETTERS: Final = 64


def remembered_size(topic: str, found: Sized) -> int:
    """What it costs to remember who was found for a topic: one for it and each of them, and more for a long name."""
    return 1 + len(found) + len(topic) // _LETTERS


class _Level(Generic[T]):
    """What filters look like from here on.  Most levels have one of the three only, so none is made before its time."""

    __slots__ = ("children", "deep", "here")

    def __init__(self) -> None:
        #: By the name of the next level; `+` among them.
        self.children: dict[str, _Level[T]] | None = None
        #: Those whose filter ends here, as they are found: the same pair for every topic.
        self.here: dict[T, Found[T]] | None = None
        #: Those whose filter ends here with `#`.
        self.deep: dict[T, Found[T]] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.children or self.here or self.deep)


class FilterTrie(Generic[T]):
    """Subscribers by filter.  A subscriber may have any number of filters, each with one value."""

    def __init__(self) -> None:
        self._root: _Level[T] = _Level()
        self._remembered: dict[str, tuple[Found[T], ...]] = {}
        self._remembered_size = 0
        #: Changes with every insert and remove: what was found under another version may be outdated.
        self.version = 0

    def insert(self, topic_filter: str, subscriber: T, value: Any) -> None:
        """Takes the place of what the subscriber said with the same filter before.  The filter must be a valid one."""
        levels, deep = _split(topic_filter)
        level = self._root
        for name in levels:
            if level.children is None:
                level.children = {}
            below = level.children.get(name)
            if below is None:
                below = level.children[name] = _Level()
            level = below
        found = (subscriber, (value,))
        if deep:
            if level.deep is None:
                level.deep = {}
            level.deep[subscriber] = found
        else:
            if level.here is None:
                level.here = {}
            level.here[subscriber] = found
        self._changed()

    def remove(self, topic_filter: str, subscriber: T) -> None:
        """Does nothing when there is no such filter of this subscriber."""
        levels, deep = _split(topic_filter)
        path = [self._root]
        for name in levels:
            below = (path[-1].children or {}).get(name)
            if below is None:
                return
            path.append(below)
        last = path[-1]
        found = last.deep if deep else last.here
        if found is None or found.pop(subscriber, None) is None:
            return
        if not found:
            if deep:
                last.deep = None
            else:
                last.here = None
        for name in reversed(levels):
            if not path.pop().is_empty:
                break
            children = path[-1].children
            assert children is not None
            del children[name]
            if not children:
                path[-1].children = None
        self._changed()

    def match(self, topic: str) -> tuple[Found[T], ...]:
        """Everybody who has a filter that matches, once, with the values of all that do."""
        found = self._remembered.get(topic)
        if found is None:
            found = self._match(topic)
            self._remember(topic, found)
        return found

    def _match(self, topic: str) -> tuple[Found[T], ...]:
        # Wildcards at the first level leave out what begins with `$`: those are asked for by name.
        reserved = topic.startswith("$")
        ends = [] if reserved or self._root.deep is None else [self._root.deep]
        reached = [self._root]
        for depth, name in enumerate(topic.split("/")):
            # At most two ways on from each level, and never more levels than there are in the filters.
            steps = (name,) if reserved and not depth else (name, "+")
            ways = [level.children for level in reached if level.children is not None]
            reached = [children[step] for children in ways for step in steps if step in children]
            if not reached:
                break
            ends += [level.deep for level in reached if level.deep is not None]
        ends += [level.here for level in reached if level.here is not None]
        if len(ends) == 1:
            return tuple(ends[0].values())
        merged: dict[T, Found[T]] = {}
        for end in ends:
            for subscriber, found in end.items():
                before = merged.get(subscriber)
                merged[subscriber] = found if before is None else (subscriber, before[1] + found[1])
        return tuple(merged.values())

    def _remember(self, topic: str, found: tuple[Found[T], ...]) -> None:
        size = remembered_size(topic, found)
        self._remembered_size += size
        if self._remembered_size > _REMEMBERED_MAX:
            self._remembered = {}
            self._remembered_size = size
        self._remembered[topic] = found

    def _changed(self) -> None:
        self.version += 1
        if self._remembered:
            self._remembered = {}
            self._remembered_size = 0

    @property
    def is_empty(self) -> bool:
        return self._root.is_empty


def _split(topic_filter: str) -> tuple[list[str], bool]:
    levels = topic_filter.split("/")
    deep = levels[-1] == "#"
    return levels[:-1] if deep else levels, deep
