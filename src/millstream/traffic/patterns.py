"""Which subscribers a topic has: a trie over the levels of names, so that a lookup costs the same for any number of
patterns.

`*` stands for one level, a final `#` for any number of levels, none included: `orders.#` also matches `orders`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from millstream.names import check_pattern

__all__ = ["PatternTrie"]

T = TypeVar("T", bound=Hashable)

#: Topics whose subscribers are remembered; beyond it they are simply looked up again.
_REMEMBERED_MAX: Final = 10_000


class _Level(Generic[T]):
    """What patterns look like from here on."""

    __slots__ = ("children", "deep", "here")

    def __init__(self) -> None:
        #: By the name of the next level; `*` among them.
        self.children: dict[str, _Level[T]] = {}
        #: Those whose pattern ends here.
        self.here: set[T] = set()
        #: Those whose pattern ends here with `#`.
        self.deep: set[T] = set()

    @property
    def is_empty(self) -> bool:
        return not (self.children or self.here or self.deep)


class PatternTrie(Generic[T]):
    """Subscribers by pattern.  A subscriber may have any number of patterns and is found once."""

    def __init__(self) -> None:
        self._root: _Level[T] = _Level()
        self._remembered: dict[str, frozenset[T]] = {}
        #: Changes with every insert and remove: what was found under another version may be outdated.
        self.version = 0

    def insert(self, pattern: str, subscriber: T) -> None:
        """Raises InvalidName when the pattern is not one."""
        levels, deep = _split(check_pattern(pattern))
        level = self._root
        for name in levels:
            level = level.children.setdefault(name, _Level())
        (level.deep if deep else level.here).add(subscriber)
        self._changed()

    def remove(self, pattern: str, subscriber: T) -> None:
        """Does nothing when there is no such pattern of this subscriber."""
        levels, deep = _split(pattern)
        path = [self._root]
        for name in levels:
            below = path[-1].children.get(name)
            if below is None:
                return
            path.append(below)
        (path[-1].deep if deep else path[-1].here).discard(subscriber)
        for name in reversed(levels):
            if not path.pop().is_empty:
                break
            del path[-1].children[name]
        self._changed()

    def match(self, topic: str) -> frozenset[T]:
        """Everybody who has a pattern that matches."""
        found = self._remembered.get(topic)
        if found is None:
            found = self._match(topic)
            if len(self._remembered) >= _REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[topic] = found
        return found

    def _match(self, topic: str) -> frozenset[T]:
        # The broker's own topics are found by name only.
        system = topic.startswith("_")
        found: set[T] = set() if system else set(self._root.deep)
        reached = [self._root]
        for depth, name in enumerate(topic.split(".")):
            # At most two ways on from each level, and never more levels than there are in the patterns.
            steps = (name,) if system and not depth else (name, "*")
            ways = [level.children for level in reached]
            reached = [children[step] for children in ways for step in steps if step in children]
            for level in reached:
                found |= level.deep
        for level in reached:
            found |= level.here
        return frozenset(found)

    def _changed(self) -> None:
        self.version += 1
        if self._remembered:
            self._remembered = {}

    @property
    def is_empty(self) -> bool:
        return self._root.is_empty


def _split(pattern: str) -> tuple[list[str], bool]:
    levels = pattern.split(".")
    deep = levels[-1] == "#"
    return levels[:-1] if deep else levels, deep
