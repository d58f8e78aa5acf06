"""Retained messages by topic name, found by filter: the other way round than subscriptions are found."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, Generic, TypeAlias, TypeVar

__all__ = ["RetainedTrie"]

R = TypeVar("R")

#: Levels that are looked at before others have their turn: less than a millisecond.
_LOOKED_AT_A_TIME: Final = 500
#: The first name, in the order of names, behind all that begin with `$`.
_BEHIND_DOLLAR: Final = chr(ord("$") + 1)


class _Level(Generic[R]):
    __slots__ = ("_names", "children", "ref")

    def __init__(self) -> None:
        self.children: dict[str, _Level[R]] | None = None
        self.ref: R | None = None
        #: Those of the children in their order, from the first time on that somebody asks for them.
        self._names: list[str] | None = None

    def add(self, name: str) -> _Level[R]:
        if self.children is None:
            self.children = {}
        below = self.children[name] = _Level()
        if self._names is not None:
            insort(self._names, name)
        return below

    def drop(self, name: str) -> None:
        children, names = self.children, self._names
        assert children is not None
        del children[name]
        if names is not None:
            del names[bisect_left(names, name)]
        if not children:
            self.children = self._names = None

    def sorted_names(self) -> list[str]:
        """The names of the children in order, kept because to sort a hundred thousand takes long.  Read only."""
        if self._names is None:
            self._names = sorted(self.children or ())
        return self._names


_Place: TypeAlias = "tuple[_Level[R], int, int]"


class RetainedTrie(Generic[R]):
    """At most one ref for each topic name.  A ref is whatever finds the message again, never None."""

    def __init__(self) -> None:
        self._root: _Level[R] = _Level()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[R]:
        """All of them, also those under `$` that no wildcard finds; in no order."""
        ahead = [self._root]
        while ahead:
            level = ahead.pop()
            if level.ref is not None:
                yield level.ref
            ahead += (level.children or {}).values()

    def put(self, topic: str, ref: R) -> R | None:
        """What was there before."""
        level = self._root
        for name in topic.split("/"):
            level = (level.children or {}).get(name) or level.add(name)
        before, level.ref = level.ref, ref
        self._count += before is None
        return before

    def get(self, topic: str) -> R | None:
        path = self._path(topic)
        return path[-1].ref if path else None

    def remove(self, topic: str) -> R | None:
        """What was there."""
        path = self._path(topic)
        if not path or path[-1].ref is None:
            return None
        before, path[-1].ref = path[-1].ref, None
        self._count -= 1
        for name in reversed(topic.split("/")):
            level = path.pop()
            if level.children or level.ref is not None:
                break
            path[-1].drop(name)
        return before

    def match(self, topic_filter: str, after: str = "") -> Iterator[R | None]:
        """The refs of every topic that a filter matches, in the order of topics, level by level.

        With `after` only of those that come after this topic, without looking at the others.  Whatever is put or
        removed before the end may be seen or not; everything else is seen once.  A filter may find little among very
        many topics: there is a None whenever it is time to let others have their turn.
        """
        wanted = topic_filter.split("/")
        last = after.split("/") if after else []
        # Ways on, the deepest last.  A place is a level, how many levels of the filter led to it, and how many of
        # `after`, or -1 if it comes behind that.
        ahead: list[Iterator[_Place[R]]] = [iter([(self._root, 0, 0 if last else -1)])]
        looked_at = 0
        while ahead:
            place = next(ahead[-1], None)
            if place is None:
                ahead.pop()
                continue
            looked_at += 1
            if looked_at % _LOOKED_AT_A_TIME == 0:
                yield None
            level, depth, same = place
            want = wanted[depth] if depth < len(wanted) else None
            if level.ref is not None and same < 0 and want in (None, "#"):
                yield level.ref
            if same == len(last):
                same = -1  # all that is below comes behind it
            if want is not None and level.children:
                ahead.append(self._below(level, depth, want, last[same] if same >= 0 else None, same))

    def _below(self, level: _Level[R], depth: int, want: str, first: str | None, same: int) -> Iterator[_Place[R]]:
        """Where a filter goes on from a level; with `first` not to names before that."""
        names = [want] if want not in ("+", "#") else level.sorted_names()
        # `#` goes on for ever; neither goes from the root into what begins with `$`.
        below_depth = depth if want == "#" else depth + 1
        keeps_out = level is self._root and want in ("+", "#")
        at = 0 if first is None else bisect_left(names, first)
        while at < len(names):
            name = names[at]
            if keeps_out and name.startswith("$"):
                at = bisect_left(names, _BEHIND_DOLLAR)
                continue
            below = (level.children or {}).get(name)
            if below is not None:
                yield below, below_depth, same + 1 if name == first else -1
            # Others may have come or gone meanwhile.
            at = at + 1 if at < len(names) and names[at] is name else bisect_right(names, name)

    def _path(self, topic: str) -> list[_Level[R]]:
        """All levels to a topic, the root first; nothing if they do not exist."""
        path = [self._root]
        for name in topic.split("/"):
            below = (path[-1].children or {}).get(name)
            if below is None:
                return []
            path.append(below)
        return path
