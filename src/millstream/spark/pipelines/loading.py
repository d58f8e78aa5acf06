"""A pipeline's file, read and found free of mistakes, or refused with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millstream.errors import ConfigInvalid
from millstream.spark.pipelines.checking import Checker
from millstream.spark.pipelines.connecting import sink_options, source_options
from millstream.spark.pipelines.definition import Definition, Sink, Source
from millstream.spark.pipelines.document import read_document
from millstream.spark.pipelines.graph import Graph
from millstream.spark.pipelines.ready.kinds import is_ready, read_ready
from millstream.spark.pipelines.sentences import sentences_of

__all__ = ["Checked", "check_pipeline", "load_pipeline"]


@dataclass(frozen=True)
class Checked:
    """A pipeline without mistakes, and where its file is."""

    definition: Definition
    graph: Graph
    directory: Path
    #: As it was written.
    document: Mapping[str, Any]
    #: Options for everything that talks to the broker and does not say otherwise: key and authorities.
    credentials: Mapping[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """A path of the file as Spark takes it: what is not absolute belongs beside the file."""
        return path if "://" in path or path.startswith("file:") else str(self.directory / Path(path).expanduser())

    def source_options(self, source: Source) -> dict[str, str]:
        beside = source.is_stream and self.graph.has_letters_beside(source)
        asked_for = "dlq" in (source.pattern or "")
        options = source_options(self.definition, source, letters=asked_for or not beside)
        return {**self.credentials, **options} if "bootstrap.servers" in options else options

    def sink_options(self, sink: Sink | None) -> dict[str, str]:
        return {**self.credentials, **sink_options(self.definition, sink)}

    def topics_read(self) -> list[str]:
        """For people: topics by their names, everything else by what it is."""
        found = []
        for source in self.definition.sources.values():
            found += source.topic_names or [source.pattern or source.table or self.place(source.parquet or "")]
        return found

    @property
    def report(self) -> str | None:
        """The page for people that it ends in, if it does."""
        path = (self.document.get("options") or {}).get("report")
        return None if path is None else self.place(path)

    def topics_written(self) -> list[str]:
        found: list[str] = [] if self.report is None else [self.report]
        for sink in self.definition.sinks:
            routes = [step.route for step in self.definition.steps if step.route is not None]
            if sink.topic_column is not None:
                found += [topic for route in routes for topic in route.targets] or [f"({sink.topic_column})"]
            else:
                found.append(sink.topic or self.place(sink.parquet or sink.delta or ""))
        return list(dict.fromkeys(found))


def load_pipeline(
    path: Path, *, broker: str | None = None, namespace: str | None = None, credentials: Mapping[str, str] | None = None
) -> Checked:
    """Read and check a file; what is given here goes before what it says.  Raises ConfigInvalid with every mistake."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigInvalid(f"the pipeline {path} cannot be read: {reason}") from None
    checked, mistakes = check_pipeline(text, path.resolve().parent)
    if checked is None:
        if len(mistakes) == 1:
            raise ConfigInvalid(f"{path} {mistakes[0]}")
        listed = "".join(f"\n  {mistake}" for mistake in mistakes)
        raise ConfigInvalid(f"{path} has {len(mistakes)} mistakes:{listed}")
    said = {name: value for name, value in (("broker", broker), ("namespace", namespace)) if value is not None}
    definition = checked.definition.model_copy(update=said)
    return replace(checked, definition=definition, graph=Graph(definition), credentials=dict(credentials or {}))


def check_pipeline(text: str, directory: Path) -> tuple[Checked | None, list[str]]:
    """A pipeline, or what is wrong with it."""
    document = read_document(text)
    definition: Definition | None = None
    graph: Graph | None = None
    if not document.mistakes and is_ready(document):
        definition = read_ready(document)
    elif not document.mistakes:
        try:
            definition = Definition.model_validate(document.values)
        except ValidationError as problem:
            for path, sentence in sentences_of(problem, Definition):
                document.mistake(path, sentence)
    if definition is not None:
        graph = Checker(document, definition, directory).check()
    if document.mistakes:
        return None, [str(each) for each in sorted(document.mistakes, key=lambda each: each.line)]
    assert definition is not None
    assert graph is not None
    return Checked(definition, graph, directory, document.values), []
