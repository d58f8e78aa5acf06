"""What a pipeline says to the data source: its own options, and which broker."""

from __future__ import annotations

import re
from typing import Final

from millstream.dead_letters import DEAD_LETTER_SUFFIX
from millstream.spark.pipelines.definition import Definition, Sink, Source

__all__ = ["DEFAULT_BROKER", "sink_options", "source_options"]

DEFAULT_BROKER: Final = "localhost:9092"
_FLAGS: Final = re.compile(r"(?:\s*\(\?[a-zA-Z]+\))+")


def source_options(definition: Definition, source: Source, *, letters: bool = True) -> dict[str, str]:
    """The options of the data source for a source that is topics or a table; a pattern with or without dead letters."""
    options = dict(source.options)
    given = {name.lower() for name in options}
    if "path" not in given:
        if "bootstrap.servers" not in given:
            options["bootstrap.servers"] = definition.broker or DEFAULT_BROKER
        if "namespace" not in given and definition.namespace is not None:
            options["namespace"] = definition.namespace
    if source.reads_topics:
        if source.pattern is not None:
            options["subscribePattern"] = source.pattern if letters else _without_letters(source.pattern)
        elif "assign" not in given:
            options["subscribe"] = ",".join(source.topic_names)
        if "includeheaders" not in given:
            options["includeHeaders"] = "true"  # a pipeline that loses headers surprises everybody
    elif source.table is not None:
        options["table"] = source.table
    return options


def _without_letters(pattern: str) -> str:
    """What a pipeline could not work on would come back to it, and could not be worked on again, without end."""
    flags = _FLAGS.match(pattern)
    begin = flags[0] if flags else ""  # they must come first
    end = "\n" if "x" in begin else ""  # of a comment
    return f"{begin}(?!.*{re.escape(DEAD_LETTER_SUFFIX)}$)(?:{pattern.removeprefix(begin)}{end})"


def sink_options(definition: Definition, sink: Sink | None) -> dict[str, str]:
    """The options of the data source for topics; which ones, a column says."""
    options = dict(sink.options) if sink is not None else {}
    given = {name.lower() for name in options}
    if "bootstrap.servers" not in given:
        options["bootstrap.servers"] = definition.broker or DEFAULT_BROKER
    if "namespace" not in given and definition.namespace is not None:
        options["namespace"] = definition.namespace
    return options
