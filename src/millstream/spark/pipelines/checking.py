"""Whether a pipeline makes sense: everything that can be found out before Spark starts, one sentence per mistake."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from millstream.errors import MillstreamError
from millstream.names import check_group, check_namespace, check_topic
from millstream.spark.columns import suggestion
from millstream.spark.options import SinkOptions, SourceOptions
from millstream.spark.pipelines.avro import AvroBroken, read_schema
from millstream.spark.pipelines.connecting import sink_options, source_options
from millstream.spark.pipelines.definition import STEP_KINDS, Aggregate, Definition, Sink, Source, Step
from millstream.spark.pipelines.document import Document
from millstream.spark.pipelines.functions import find_function
from millstream.spark.pipelines.graph import Graph, Query, find_cycle, queries_of
from millstream.spark.pipelines.sql import SqlBroken, check_sql
from millstream.spark.pipelines.values import PathBroken, parse_path

__all__ = ["Checker"]

#: Names are tables in SQL.
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PACKAGES: Final = {"deltalake": "delta", "fastavro": "avro"}
#: Steps in which single rows can fail, so that they can become dead letters.
_ROW_BY_ROW: Final = frozenset(("sql", "python", "enrich", "redact", "convert", "split", "route", "dead_letter"))
#: Steps that pass on only some rows, or make others of them: when a row has been around often enough, they can end it.
_TAKING_OUT: Final = frozenset(("sql", "python", "filter", "split", "aggregate"))


class Checker:
    """Looks at a definition whose shape is right."""

    def __init__(self, document: Document, definition: Definition, directory: Path) -> None:
        self._document = document
        self._definition = definition
        self._directory = directory
        self._say = document.mistake

    def check(self) -> Graph | None:
        definition = self._definition
        self._try(("name",), lambda: check_group(definition.name, "pipeline"))
        if definition.namespace is not None:
            namespace = definition.namespace
            self._try(("namespace",), lambda: check_namespace(namespace))
        for name, source in definition.sources.items():
            self._name(("sources", name), name)
            self._source(("sources", name), source)
        for number, step in enumerate(definition.steps):
            self._step(number, step)
        self._names_differ()
        for number, sink in enumerate(definition.sinks):
            self._sink(("sinks", number), sink)
        if self._document.mistakes:
            return None
        graph = Graph(definition)
        self._resolve(graph)
        if not self._document.mistakes:
            self._look_at_queries(graph)
        return graph

    def _try(self, path: Sequence[str | int], look: Callable[[], object]) -> bool:
        try:
            look()
        except (MillstreamError, SqlBroken, PathBroken, AvroBroken) as problem:
            self._say(path, str(problem))
            return False
        return True

    def _sql(self, path: Sequence[str | int], text: str) -> None:
        if not text.strip():
            self._say(path, "there is no SQL here")
        else:
            self._try(path, lambda: check_sql(text))

    # --- names -------------------------------------------------------------------------------------------------------

    def _name(self, path: Sequence[str | int], name: str) -> None:
        if not _NAME.fullmatch(name):
            self._say(path, f"{name!r} cannot be a table in SQL: use letters, digits and '_', beginning with a letter")

    def _names_differ(self) -> None:
        definition = self._definition
        seen: dict[str, str] = {name.lower(): f"source {name!r}" for name in definition.sources}
        if len(seen) < len(definition.sources):
            self._say(("sources",), "two sources differ only in upper and lower case, which SQL does not tell apart")
        for number in range(len(definition.steps)):
            name = definition.step_name(number)
            if name.lower() in seen:
                path = ("steps", number, "name")
                self._say(
                    path, f"{name!r} is the name of {seen[name.lower()]} already; SQL ignores upper and lower case"
                )
            seen.setdefault(name.lower(), f"step {number + 1}")

    def _resolve(self, graph: Graph) -> None:
        definition = self._definition
        known = list(definition.names())
        order = {name.lower(): at for at, name in enumerate(known)}
        later: list[tuple[int, str]] = []
        for number in range(len(definition.steps)):
            own = definition.step_name(number).lower()
            path = ("steps", number, "sql" if definition.steps[number].sql is not None else "from")
            for name in graph.inputs[own]:
                if name not in order:
                    self._say(path, f"there is no source or step {name!r}{suggestion(name, known)}")
                elif order[name] >= order[own]:
                    later.append((number, name))
        circle = find_cycle(graph.inputs)
        if circle:
            number = order[circle[0]] - len(definition.sources)
            self._say(("steps", number), f"steps read each other in a circle: {' reads '.join(map(repr, circle))}")
        else:
            for number, name in later:
                self._say(("steps", number), f"it reads {name!r}, which comes later: put {name!r} before it")
        for number, sink in enumerate(definition.sinks):
            if sink.source is not None and sink.source.lower() not in order:
                text = f"there is no source or step {sink.source!r}{suggestion(sink.source, known)}"
                self._say(("sinks", number, "from"), text)

    # --- sources -----------------------------------------------------------------------------------------------------

    def _source(self, path: tuple[str | int, ...], source: Source) -> None:
        given = [kind for kind in Source.KINDS if getattr(source, kind) is not None]
        if len(given) != 1:
            self._say(path, _one_of("a source says what it reads by", Source.KINDS, given))
            return
        for topic in source.topic_names:
            if not self._try((*path, given[0]), lambda topic=topic: check_topic(topic)):  # type: ignore[misc]
                return
        if source.kind == "table" and source.stream:
            self._say((*path, "stream"), "a table is read once: leave `stream` out")
        if source.kind != "parquet" and source.columns is not None:
            self._say((*path, "columns"), "only Parquet has columns to be declared; topics always have the same")
        if source.kind == "parquet":
            if source.is_stream and source.columns is None and not _has_parquet(self._directory, source.parquet or ""):
                text = "a stream of Parquet needs to know its columns while there is no file: `columns: id bigint, ...`"
                self._say((*path, "columns"), text)
            return
        taken = [name for name in source.options if name.lower() in ("subscribe", "subscribepattern", "table")]
        if taken:
            self._say((*path, "options", taken[0]), f"leave this option out: `{source.kind}:` says it")
            return
        options = source_options(self._definition, source)
        self._try((*path, "options"), lambda: SourceOptions.of(options, streaming=source.is_stream))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step(self, number: int, step: Step) -> None:
        path = ("steps", number)
        if step.name is not None:
            self._name((*path, "name"), step.name)
        if len(step.kinds) > 1 or (not step.kinds and step.dead_letter is None):
            kinds = (*STEP_KINDS, "dead_letter")
            self._say(path, _one_of("a step says what it does by", kinds, step.kinds))
            return
        kind = step.kind
        if step.arguments is not None and kind != "python":
            self._say((*path, "arguments"), "only a Python function takes arguments")
        if step.inputs is not None and kind == "sql":
            self._say((*path, "from"), "leave this out: the SQL text says what it reads")
        elif step.inputs is not None and (not step.inputs or (len(step.inputs) > 1 and kind != "python")):
            self._say((*path, "from"), "a step reads exactly one other; only SQL and Python functions read several")
        if step.dead_letter is not None:
            self._dead_letter(path, step)
        check = getattr(self, f"_{kind}_step", None)
        if check is not None:
            check(path, step)

    def _dead_letter(self, path: tuple[str | int, ...], step: Step) -> None:
        letters = step.dead_letter
        assert letters is not None
        here = (*path, "dead_letter")
        if step.kind not in _ROW_BY_ROW:
            self._say(here, f"in a step `{step.kind}` no single row fails, so there is nothing to send")
        if letters.topic is not None:
            topic = letters.topic
            self._try(here, lambda: check_topic(topic))
        if letters.when is not None:
            self._sql((*here, "when"), letters.when)
            if step.kinds:
                self._say((*here, "when"), "a condition needs a step of its own")
        elif letters.error is not None:
            self._say((*here, "error"), "this goes with a condition: `when: total < 0`")

    def _sql_step(self, path: tuple[str | int, ...], step: Step) -> None:
        self._sql((*path, "sql"), step.sql or "")

    def _filter_step(self, path: tuple[str | int, ...], step: Step) -> None:
        self._sql((*path, "filter"), step.filter or "")

    def _python_step(self, path: tuple[str | int, ...], step: Step) -> None:
        count = 1 if step.inputs is None else len(step.inputs)
        self._try((*path, "python"), lambda: find_function(step.python or "", self._directory, count, step.arguments))

    def _enrich_step(self, path: tuple[str | int, ...], step: Step) -> None:
        enrich = step.enrich
        assert enrich is not None
        if not (enrich.columns or enrich.headers or enrich.lookup):
            self._say((*path, "enrich"), "there is nothing to add: give `columns`, `headers` or `lookup`")
        if enrich.lookup is not None:
            by_name = {name.lower(): source for name, source in self._definition.sources.items()}
            source = by_name.get(enrich.lookup.source.lower())
            if source is not None and source.is_stream:
                text = "a lookup reads a source that is no stream; for a topic, say `stream: false` there"
                self._say((*path, "enrich", "lookup", "from"), text)

    def _redact_step(self, path: tuple[str | int, ...], step: Step) -> None:
        redact = step.redact
        assert redact is not None
        for each in redact.fields:
            self._try((*path, "redact", "fields", each), lambda each=each: parse_path(each))  # type: ignore[misc]
        variable = redact.salt_variable
        if variable is not None and not os.environ.get(variable):
            self._say((*path, "redact", "salt_variable"), f"the variable {variable} is not set")

    def _convert_step(self, path: tuple[str | int, ...], step: Step) -> None:
        convert = step.convert
        assert convert is not None
        here = (*path, "convert")
        if convert.source == convert.to:
            self._say(here, f"there is nothing to convert: both sides are {convert.to}")
        if convert.columns is not None:
            self._sql((*here, "schema"), convert.columns)
        if "avro" in (convert.source, convert.to):
            schema = convert.avro_schema
            self._needs((*here,), "fastavro", "Avro")
            if schema is None:
                self._say(here, "Avro needs its schema: `avro_schema:`, as a mapping or the path of a file")
            else:
                self._try((*here, "avro_schema"), lambda: read_schema(schema, self._directory))
        elif convert.avro_schema is not None:
            self._say((*here, "avro_schema"), "nothing here is Avro")
        elif convert.columns is None and convert.source != "columns":
            self._say(here, "say what is in a value: `schema: id bigint, total double`")

    def _split_step(self, path: tuple[str | int, ...], step: Step) -> None:
        assert step.split is not None
        text = step.split.path
        if text:
            self._try((*path, "split", "path"), lambda: parse_path(text, lists=False))

    def _aggregate_step(self, path: tuple[str | int, ...], step: Step) -> None:
        aggregate = step.aggregate
        assert aggregate is not None
        here = (*path, "aggregate")
        for name, measure in aggregate.measures.items():
            self._sql((*here, "measures", name), measure)
        window = aggregate.window
        if window is not None and window.slide is not None and window.slide > window.size:
            self._say((*here, "window", "slide"), "windows would leave gaps: `slide` is at most `size`")
        if aggregate.watermark is not None and window is None:
            self._say((*here, "watermark"), "a watermark goes with a window of time")

    def _route_step(self, path: tuple[str | int, ...], step: Step) -> None:
        route = step.route
        assert route is not None
        for topic, condition in route.topics.items():
            here = (*path, "route", "topics", topic)
            self._try(here, lambda topic=topic: check_topic(topic))  # type: ignore[misc]
            self._sql(here, condition)
        if route.otherwise is not None and route.otherwise != "drop":
            otherwise = route.otherwise
            self._try((*path, "route", "otherwise"), lambda: check_topic(otherwise))

    def _needs(self, path: Sequence[str | int], package: str, what: str) -> None:
        if importlib.util.find_spec(package) is None:
            extra = _PACKAGES[package]
            self._say(path, f"{what} needs the package {package}: `pip install 'millstream[{extra}]'`")

    # --- sinks -------------------------------------------------------------------------------------------------------

    def _sink(self, path: tuple[str | int, ...], sink: Sink) -> None:
        given = [kind for kind in Sink.KINDS if getattr(sink, kind) is not None]
        if len(given) != 1:
            self._say(path, _one_of("a sink says where rows go by", Sink.KINDS, given))
            return
        if sink.name is not None:
            self._try((*path, "name"), lambda: check_group(sink.name or "", "sink"))
        if sink.topic is not None:
            topic = sink.topic
            self._try((*path, "topic"), lambda: check_topic(topic))
        if sink.writes_topics:
            if sink.partition_by:
                self._say((*path, "partition_by"), "keys decide about the partitions of a topic: `key: COLUMN`")
            options = sink_options(self._definition, sink)
            self._try((*path, "options"), lambda: SinkOptions.of(options))
            return
        if sink.key is not None:
            self._say((*path, "key"), "only messages have keys")
        if sink.mode != "append":
            self._say((*path, "mode"), f"{sink.kind} is only ever added to: leave `mode` out")
        if sink.kind == "delta":
            self._needs((*path, "delta"), "deltalake", "Delta")
            if sink.options:
                self._say((*path, "options"), "a sink `delta` takes no options")

    # --- all together ------------------------------------------------------------------------------------------------

    def _look_at_queries(self, graph: Graph) -> None:
        definition = self._definition
        queries = queries_of(graph)
        for query in queries:
            others = [sink for sink in query.sinks if sink.options != query.sinks[0].options]
            if query.kind == "topics" and others:
                path = ("sinks", definition.sinks.index(others[0]), "options")
                self._say(path, "all sinks that are topics are written together: give them the same options")
            if query.kind != "topics" and len(query.sinks) > 1:
                number = definition.sinks.index(query.sinks[1])
                self._say(("sinks", number), f"there is another sink {query.name!r}: give this one a `name` of its own")
            self._windows_wait(query, graph)
        streams = [query.is_stream for query in queries]
        if any(streams):
            if not all(streams):
                self._say(("sinks",), "some of this is read on and on, some only once: make two pipelines of it")
            if definition.checkpoint is None:
                self._say((), "say where to keep how far it is: `checkpoint: DIRECTORY`")
        elif definition.trigger is not None:
            self._say(("trigger",), "nothing here is a stream, so it runs once: leave `trigger` out")
        for number, sink in enumerate(definition.sinks):
            self._sink_in_graph(("sinks", number), sink, graph)
        for number, step in enumerate(definition.steps):
            # What meets a condition need not meet it the next time.
            if step.dead_letter is not None and step.dead_letter.topic is not None and step.dead_letter.when is None:
                path, feed = ("steps", number, "dead_letter"), definition.step_name(number)
                self._reads_itself(path, step.dead_letter.topic, feed, graph)
        for name, source in definition.sources.items():
            claim = next((option for option in source.options if option.lower() == "claim"), None)
            readers = [
                query for query in queries if any(name.lower() in graph.upstream(feed) for feed in query.feeds(graph))
            ]
            if claim is not None and len(readers) > 1:
                text = f"claimed messages go to one query, but {_and([query.name for query in readers])} read them"
                self._say(("sources", name, "options", claim), f"{text}: write to topics only, or read without a claim")

    def _windows_wait(self, query: Query, graph: Graph) -> None:
        """Spark has one watermark for a query, that of the slowest: a window of one sink would wait for another's."""
        if not query.is_stream or query.mode != "append":
            return
        definition = self._definition
        marked = {
            definition.step_name(number).lower(): step.aggregate
            for number, step in enumerate(definition.steps)
            if step.aggregate is not None and step.aggregate.watermark is not None
        }
        first: list[str] = []
        for sink in query.sinks:
            above = graph.upstream(graph.feeds(sink))
            windows = [name for name in marked if name in above]
            # What reads the same rows by the same clock is never ahead of each other.
            marks, others = ({_mark(marked[name], graph.inputs[name]) for name in names} for names in (windows, first))
            if first and windows and marks != others:
                text = f"windows of {_and(windows)} and of {_and(first)} would wait for each other"
                self._say(("sinks", definition.sinks.index(sink)), f"{text}: make two pipelines of it")
                return
            first = first or windows

    def _reads_itself(self, path: tuple[str | int, ...], topic: str, feed: str, graph: Graph) -> None:
        """Whether what is written to a topic would be read, and written, again."""
        for name in self._readers(topic, feed, graph):
            text = f"it writes to {topic!r}, which source {name!r} reads: it would read its own messages for ever"
            self._say(path, text)

    def _readers(self, topic: str, feed: str, graph: Graph) -> list[str]:
        """The streams of which something is made that also read a topic."""
        sources = {name.lower(): source for name, source in self._definition.sources.items()}
        return [
            name
            for name, is_stream in graph.sources(feed).items()
            if is_stream and (topic in sources[name].topic_names or _matches(sources[name].pattern, topic))
        ]

    def _routes_in_circles(self, feed: str, graph: Graph) -> None:
        """Rows may be sent again under a condition; but each row must have a way out, to a topic or in a step."""
        definition = self._definition
        above = graph.upstream(feed)
        steps = [(at, step) for at, step in enumerate(definition.steps) if definition.step_name(at).lower() in above]
        if any(_may_take_out(step) for _, step in steps):
            return
        for number, route in [(number, step.route) for number, step in steps if step.route is not None][-1:]:
            targets = route.ways
            if targets and all(self._readers(topic, feed, graph) for topic in targets):
                self._reads_itself(("steps", number, "route"), targets[0], feed, graph)

    def _sink_in_graph(self, path: tuple[str | int, ...], sink: Sink, graph: Graph) -> None:
        definition = self._definition
        feed = graph.feeds(sink)
        if sink.topic is not None:
            self._reads_itself((*path, "topic"), sink.topic, feed, graph)
        if sink.topic_column == "route":
            self._routes_in_circles(feed, graph)
        if sink.topic_column is not None and not graph.definition.steps:
            self._say((*path, "topic_column"), "no step says to which topics rows go: add one, such as `route`")
        aggregates = [
            step.aggregate
            for number, step in enumerate(definition.steps)
            if step.aggregate is not None and definition.step_name(number).lower() in graph.upstream(feed)
        ]
        if not graph.is_stream(feed):
            if sink.mode != "append":
                self._say((*path, "mode"), "what is read once is written once: leave `mode` out")
        elif sink.mode == "append" and any(each.window is None or each.watermark is None for each in aggregates):
            other = "" if not sink.writes_topics else ", or set `mode: update` here"
            text = f"when is a sum final? Give the aggregate of this stream a `window` and a `watermark`{other}"
            self._say((*path, "mode"), text)


def _has_parquet(directory: Path, path: str) -> bool:
    if "://" in path:
        return True  # Spark will see
    return next((directory / Path(path.removeprefix("file:"))).glob("**/*.parquet"), None) is not None


def _may_take_out(step: Step) -> bool:
    """Whether there may be rows that go no further than to a step."""
    return (
        step.kind in _TAKING_OUT
        or (step.dead_letter is not None and step.dead_letter.when is not None)
        or (step.enrich is not None and step.enrich.lookup is not None and step.enrich.lookup.missing == "drop")
        or (step.route is not None and step.route.otherwise == "drop" and not step.route.ways)
    )


def _matches(pattern: str | None, topic: str) -> bool:
    try:
        return pattern is not None and re.fullmatch(pattern, topic) is not None
    except re.error:
        return False


def _one_of(sentence: str, kinds: Sequence[str], given: Sequence[str]) -> str:
    said = f", not by {' and '.join(given)} at once" if given else "; there is none of them"
    return f"{sentence} exactly one of {', '.join(kinds)}{said}"


def _mark(aggregate: Aggregate, inputs: Sequence[str]) -> tuple[object, ...]:
    """What a watermark goes by."""
    return (*inputs, aggregate.window.column if aggregate.window is not None else "", aggregate.watermark)


def _and(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
