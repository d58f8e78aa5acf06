"""Retained messages by topic name, found by filter: the other way round than subscriptions are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["RetainedTrie"]

R = TypeVar("R")


class _Level(Generic[R]):
    __slots__ = ("children", "ref")

    def __init__(self) -> None:
        self.children: dict[str, _Level[R]] | None = None
        self.ref: R | None = None


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
            if level.children is None:
                level.children = {}
            below = level.children.get(name)
            if below is None:
                below = level.children[name] = _Level()
            level = below
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
            children = path[-1].children
            assert children is not None
            del children[name]
            if not children:
                path[-1].children = None
        return before

    def match(self, topic_filter: str, after: str = "") -> Iterator[R]:
        """The refs of every topic that a filter matches, in the order of topics, level by level.

        With `after` only of those that come after this topic, without looking at the others.  Whatever is put or
        removed before the end may be seen or not; everything else is seen once.
        """
        wanted = topic_filter.split("/")
        last = after.split("/") if after else []
        # What is still to be looked at, the next one last: a level, how many levels of the filter led to it, and how
        # many of `after`, or -1 if it comes behind that.
        ahead: list[tuple[_Level[R], int, int]] = [(self._root, 0, 0 if last else -1)]
        while ahead:
            level, depth, same = ahead.pop()
            want = wanted[depth] if depth < len(wanted) else None
            if level.ref is not None and same < 0 and want in (None, "#"):
                yield level.ref
            if same == len(last):
                same = -1  # all that is below comes behind it
            children = level.children
            if want is None or not children:
                continue
            if want not in ("+", "#"):
                below = children.get(want)
                if below is not None and (same < 0 or want >= last[same]):
                    ahead.append((below, depth + 1, same + 1 if same >= 0 and want == last[same] else -1))
                continue
            # `#` goes on for ever; neither goes from the root into what begins with `$`.
            below_depth = depth if want == "#" else depth + 1
            names = sorted(children, reverse=True)
            if level is self._root:
                names = [name for name in names if not name.startswith("$")]
            if same >= 0:
                names = [name for name in names if name >= last[same]]
            ahead += [
                (children[name], below_depth, same + 1 if same >= 0 and name == last[same] else -1) for name in names
            ]

    def _path(self, topic: str) -> list[_Level[R]]:
        """All levels to a topic, the root first; nothing if they do not exist."""
        path = [self._root]
        for name in topic.split("/"):
            below = (path[-1].children or {}).get(name)
            if below is None:
                return []
            path.append(below)
        return path
