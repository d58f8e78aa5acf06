"""A YAML text as plain values, with the line of everything in it, so that every mistake can be found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import yaml

__all__ = ["Document", "Mistake", "Path", "read_document"]

#: How to get to a value: keys and numbers, from the top.
Path: TypeAlias = tuple[str | int, ...]
#: What one entry of these lists is called.
_ENTRIES: Final = {"steps": "step", "sinks": "sink"}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong, in one sentence."""

    path: Path
    line: int
    sentence: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (f"line {self.line}" if self.line else "", _words(self.path))))
        return f"{where}: {self.sentence}" if where else self.sentence


@dataclass
class Document:
    """What a text says."""

    values: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def mistake(self, path: Sequence[str | int], sentence: str) -> None:
        self.mistakes.append(Mistake(tuple(path), self.line_of(path), sentence))

    def line_of(self, path: Sequence[str | int]) -> int:
        """The line of a value, or of the nearest thing around it that has one."""
        for length in range(len(path), -1, -1):
            line = self.lines.get(tuple(path[:length]))
            if line is not None:
                return line
        return 0


def read_document(text: str) -> Document:
    """The values of a text.  A key that is given twice is a mistake: YAML would take the last one."""
    document = Document()
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            document.mistake((), "the file is empty")
            return document
        for path, line, twice in _walk(node, (), set()):
            if twice:
                document.mistakes.append(Mistake(path, line, "this key is given twice"))
            document.lines.setdefault(path, line)
        document.values = loader.construct_document(node)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        said = (problem.problem or "it cannot be read").removeprefix("but ")
        document.mistakes = [Mistake((), mark.line + 1 if mark else 0, f"this is not valid YAML: {said}")]
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: a date that is none
        document.mistakes = [Mistake((), 0, f"this is not valid YAML: {' '.join(str(problem).split())}")]
    except RecursionError:
        document.mistakes = [Mistake((), 0, "too many lists and mappings are inside each other")]
    finally:
        if loader is not None:
            loader.dispose()
    if not document.mistakes and not isinstance(document.values, dict):
        document.mistake((), "a pipeline is a mapping with keys such as `name:` and `sources:`")
    return document


def _walk(node: yaml.Node, path: Path, walked: set[int]) -> Iterator[tuple[Path, int, bool]]:
    """Everything in a node with its line, and whether its key was there before.  Aliases are walked once."""
    yield path, node.start_mark.line + 1, False
    if id(node) in walked:
        return
    walked.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*path, key)
            yield here, key_node.start_mark.line + 1, key in seen
            seen.add(key)
            yield from _walk(value_node, here, walked)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _walk(item, (*path, number), walked)


def _words(path: Path) -> str:
    """`step 2, redact.fields`: lists are counted from one."""
    if len(path) > 1 and path[0] in _ENTRIES and isinstance(path[1], int):
        first, rest = f"{_ENTRIES[str(path[0])]} {path[1] + 1}", path[2:]
        return ", ".join(filter(None, (first, _dotted(rest))))
    return _dotted(path)


def _dotted(path: Path) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in path)
