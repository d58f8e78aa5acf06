"""From a path to what serves it: a tree of segments, so that a hundred endpoints cost no more than one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar
from urllib.parse import unquote

from millstream.errors import MethodNotAllowed, PathNotFound

__all__ = ["Router"]

T = TypeVar("T")

#: Paths that are remembered, and how long each may be.
_KNOWN_MAX: Final = 1_000
_KNOWN_CHARACTERS_MAX: Final = 300


class _Node(Generic[T]):
    __slots__ = ("children", "methods", "variable", "wild")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        #: The child for any one segment.
        self.wild: _Node[T] | None = None
        self.variable = ""
        self.methods: dict[str, T] = {}


class Router(Generic[T]):
    """Paths such as `/topics/{topic}/messages`.  A literal segment goes before a variable one."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        #: What was found lately: clients ask for the same paths again and again.
        self._known: dict[tuple[str, str], tuple[T, Mapping[str, str]]] = {}

    def add(self, method: str, path: str, target: T) -> None:
        node = self._root
        for segment in path.strip("/").split("/"):
            if segment.startswith("{"):
                if node.wild is None:
                    node.wild, node.variable = _Node(), segment[1:-1]
                assert node.variable == segment[1:-1], f"{path}: the variable here is {node.variable!r} elsewhere"
                node = node.wild
            else:
                node = node.children.setdefault(segment, _Node())
        assert method not in node.methods, f"{method} {path} is declared twice"
        node.methods[method] = target

    def find(self, method: str, path: str) -> tuple[T, Mapping[str, str]]:
        """What serves a path, and the values of its variables.  `path` is as sent: still escaped.

        HEAD is served as GET is; uvicorn leaves the body out.
        """
        known = self._known.get((method, path))
        if known is None:
            known = self._look_up(method, path)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            if len(path) <= _KNOWN_CHARACTERS_MAX:
                self._known[method, path] = known
        return known

    def _look_up(self, method: str, path: str) -> tuple[T, Mapping[str, str]]:
        variables: dict[str, str] = {}
        node = self._walk(path.strip("/").split("/"), 0, self._root, variables)
        if node is None:
            raise PathNotFound(f"there is nothing at {path[:200]}")
        target = node.methods.get("GET" if method == "HEAD" else method)
        if target is None:
            allowed = tuple(sorted({*node.methods, *(("HEAD",) if "GET" in node.methods else ())}))
            error = MethodNotAllowed(f"{path[:200]} does not know {method[:20]}, only {', '.join(allowed)}")
            error.allowed = allowed
            raise error
        return target, MappingProxyType(variables)

    def _walk(self, segments: list[str], at: int, node: _Node[T], variables: dict[str, str]) -> _Node[T] | None:
        if at == len(segments):
            return node if node.methods else None
        segment = segments[at]
        child = node.children.get(segment)
        if child is not None and (found := self._walk(segments, at + 1, child, variables)) is not None:
            return found
        if node.wild is None or not segment:
            return None
        variables[node.variable] = unquote(segment)
        return self._walk(segments, at + 1, node.wild, variables)
