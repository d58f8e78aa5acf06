"""Who reads whom in a pipeline, and which of its sinks Spark serves together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from millstream.spark.pipelines.definition import Definition, Sink, Source
from millstream.spark.pipelines.sql import SqlBroken, tables_of

__all__ = ["Graph", "Query", "find_cycle", "inputs_of", "queries_of"]


def inputs_of(definition: Definition, number: int) -> list[str]:
    """What a step reads, by the names that its file uses; they may not exist."""
    step = definition.steps[number]
    if step.sql is not None:
        try:
            return tables_of(step.sql)
        except SqlBroken:
            return []
    names = list(step.inputs) if step.inputs is not None else [_before(definition, number)]
    if step.enrich is not None and step.enrich.lookup is not None:
        names.append(step.enrich.lookup.source)
    return names


def _before(definition: Definition, number: int) -> str:
    """The step before, or for the first one the first source."""
    return definition.step_name(number - 1) if number else next(iter(definition.sources))


class Graph:
    """The names of a pipeline, in whatever case, and what each of them reads."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.inputs: dict[str, list[str]] = {name.lower(): [] for name in definition.sources}
        for number in range(len(definition.steps)):
            read = inputs_of(definition, number)
            self.inputs[definition.step_name(number).lower()] = [name.lower() for name in read]
        self._sources = {name.lower(): source for name, source in definition.sources.items()}

    def upstream(self, name: str, known: Container[str] = ()) -> list[str]:
        """A name and everything that it is made of, in no order; not what is known, nor what only that is made of."""
        found: list[str] = []
        waiting = [name.lower()]
        while waiting:
            each = waiting.pop()
            if each not in found and each not in known:
                found.append(each)
                waiting += self.inputs.get(each, [])
        return found

    def is_source(self, name: str) -> bool:
        return name in self._sources

    def sources(self, name: str) -> dict[str, bool]:
        """The sources of something, and whether each is a stream."""
        return {each: self._sources[each].is_stream for each in self.upstream(name) if each in self._sources}

    def is_stream(self, name: str) -> bool:
        return any(self.sources(name).values())

    def has_letters_beside(self, source: Source) -> bool:
        """Whether what fails of a source goes to topics beside those it was read from."""
        steps = self.definition.steps
        letters = [
            number
            for number in self.definition.steps_with_letters()
            if (how := steps[number].dead_letter) is not None and how.topic is None
        ]
        above = {name for number in letters for name in self.upstream(self.definition.step_name(number))}
        return any(each is source and name in above for name, each in self._sources.items())

    def feeds(self, sink: Sink) -> str:
        """What a sink writes: the last step unless it says so."""
        if sink.source is not None:
            return sink.source.lower()
        return list(self.inputs)[-1] if self.definition.steps else next(iter(self.inputs))


def find_cycle(inputs: Mapping[str, Iterable[str]]) -> list[str]:
    """Names that read each other in a circle, the first one again at the end; empty if there are none."""
    done: set[str] = set()
    for start in inputs:
        way: list[str] = []
        branches: list[Iterator[str]] = [iter((start,))]
        while branches:
            name = next(branches[-1], None)
            if name is None:
                branches.pop()
                if way:
                    done.add(way.pop())
            elif name in way:
                return [*way[way.index(name) :], name]
            elif name not in done and name in inputs:
                way.append(name)
                branches.append(iter(inputs[name]))
    return []


@dataclass
class Query:
    """What Spark runs as one: a checkpoint, a sequence of batches, an end.

    All topics are written by one query: what a batch publishes becomes visible everywhere at once, what was read is
    read once, and a claimed message is settled when everything that was made of it is there.
    """

    name: str
    kind: Literal["topics", "parquet", "delta"]
    mode: str
    is_stream: bool
    sinks: list[Sink] = field(default_factory=list)
    #: Steps whose dead letters go this way.
    letters: list[int] = field(default_factory=list)

    def reads(self, graph: Graph) -> int:
        """How often the same rows are read: once for each sink, but a step with dead letters is done once for all."""
        definition = graph.definition
        letters = {name.lower() for name in map(definition.step_name, definition.steps_with_letters())}
        done: set[str] = set()
        read: Counter[str] = Counter()
        for feed in self.feeds(graph):
            found = graph.upstream(feed, done)
            read.update(name for name in found if graph.is_source(name) and graph.is_stream(name))
            done.update(letters.intersection(found))
        return max(read.values(), default=1)

    def feeds(self, graph: Graph) -> list[str]:
        names = [graph.feeds(sink) for sink in self.sinks]
        return names + [graph.definition.step_name(number).lower() for number in self.letters]


def queries_of(graph: Graph) -> list[Query]:
    """The queries of a pipeline, by names that stay the same as long as the file does: checkpoints have them."""
    definition = graph.definition
    queries: dict[str, Query] = {}

    def query(name: str, kind: Literal["topics", "parquet", "delta"], mode: str, is_stream: bool) -> Query:
        return queries.setdefault(name, Query(name, kind, mode, is_stream))

    for sink in definition.sinks:
        feed = graph.feeds(sink)
        is_stream = graph.is_stream(feed)
        if sink.writes_topics:
            query(_topics(sink.mode, is_stream), "topics", sink.mode, is_stream).sinks.append(sink)
        else:
            kind: Literal["parquet", "delta"] = "parquet" if sink.kind == "parquet" else "delta"
            query(sink.name or f"{kind}-{feed}", kind, sink.mode, is_stream).sinks.append(sink)
    for number in definition.steps_with_letters():
        is_stream = graph.is_stream(definition.step_name(number))
        query(_topics("append", is_stream), "topics", "append", is_stream).letters.append(number)
    return list(queries.values())


def _topics(mode: str, is_stream: bool) -> str:
    return "topics" + ("" if mode == "append" else f"-{mode}") + ("" if is_stream else "-once")
