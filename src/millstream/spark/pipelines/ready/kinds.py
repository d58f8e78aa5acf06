"""Which ready pipelines there are, and a file that names one, as a definition like any other."""

from __future__ import annotations

from typing import Final

from pydantic import Field, ValidationError, create_model

from millstream.spark.columns import suggestion
from millstream.spark.pipelines.definition import Definition, Sink, Source
from millstream.spark.pipelines.document import Document
from millstream.spark.pipelines.ready.archive import Archive
from millstream.spark.pipelines.ready.audit import Audit
from millstream.spark.pipelines.ready.dlq_report import DeadLetterReport
from millstream.spark.pipelines.ready.key_skew import KeySkew
from millstream.spark.pipelines.ready.latency import Latency
from millstream.spark.pipelines.ready.replay import Replay
from millstream.spark.pipelines.ready.usage import Usage
from millstream.spark.pipelines.ready.work import Ready
from millstream.spark.pipelines.sentences import sentences_of

__all__ = ["KINDS", "ReadyDefinition", "is_ready", "read_ready"]

KINDS: Final[dict[str, type[Ready]]] = {
    "archive": Archive,
    "replay": Replay,
    "dlq-report": DeadLetterReport,
    "audit": Audit,
    "latency": Latency,
    "key-skew": KeySkew,
    "usage": Usage,
}
_OURS: Final = ("sources", "steps", "sinks")


class ReadyDefinition(Definition):
    """A pipeline whose sources, work and sinks follow from what it is told."""

    ready: str
    options: Ready
    sources: dict[str, Source] = Field(default={}, repr=False)
    sinks: list[Sink] = Field(default=[], repr=False)


#: So that a mistake in an option can be told with the names of those that there are.
_MODELS: Final[dict[str, type[ReadyDefinition]]] = {
    name: create_model(f"{kind.__name__}Definition", __base__=ReadyDefinition, options=(kind, ...))
    for name, kind in KINDS.items()
}


def is_ready(document: Document) -> bool:
    return isinstance(document.values, dict) and "ready" in document.values


def read_ready(document: Document) -> ReadyDefinition | None:
    """What the file says; None, and mistakes in the document, if that makes no sense."""
    named = document.values["ready"]
    model = _MODELS.get(str(named))
    if model is None:
        document.mistake(("ready",), f"there is no ready pipeline {named!r}{suggestion(str(named), KINDS)}")
        return None
    for name in _OURS:
        if name in document.values:
            document.mistake((name,), f"leave this out: `ready: {named}` knows it by its options")
    try:
        definition = model.model_validate(document.values)
    except ValidationError as problem:
        for path, sentence in sentences_of(problem, model):
            document.mistake(path, sentence)
        return None
    options = definition.options
    for place, sentence in options.mistakes():
        document.mistake(("options", *place), sentence)
    for name in options.LOCAL:
        given: str | None = definition.checkpoint if name == "checkpoint" else getattr(options, name, None)
        if given is not None and "://" in given and not given.startswith("file:"):
            where = (name,) if name == "checkpoint" else ("options", name)
            document.mistake(where, f"{given} is elsewhere: this must be a path of the machine on which it runs")
    if options.NEEDS_CHECKPOINT and definition.checkpoint is None:
        document.mistake((), "say where to keep how far it is: `checkpoint: DIRECTORY`")
    if document.mistakes:
        return None
    return definition.model_copy(update={"sources": options.sources(), "sinks": options.sinks()})
