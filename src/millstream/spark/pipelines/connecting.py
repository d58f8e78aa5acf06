"""What a pipeline says to the data source: its own options, and which broker."""

from __future__ import annotations

from typing import Final

from millstream.spark.pipelines.definition import Definition, Sink, Source

__all__ = ["DEFAULT_BROKER", "sink_options", "source_options"]

DEFAULT_BROKER: Final = "localhost:9092"


def source_options(definition: Definition, source: Source) -> dict[str, str]:
    """The options of the data source for a source that is topics or a table."""
    options = dict(source.options)
    given = {name.lower() for name in options}
    if "path" not in given:
        if "bootstrap.servers" not in given:
            options["bootstrap.servers"] = definition.broker or DEFAULT_BROKER
        if "namespace" not in given and definition.namespace is not None:
            options["namespace"] = definition.namespace
    if source.reads_topics:
        if source.pattern is not None:
            options["subscribePattern"] = source.pattern
        elif "assign" not in given:
            options["subscribe"] = ",".join(source.topic_names)
        if "includeheaders" not in given:
            options["includeHeaders"] = "true"  # a pipeline that loses headers surprises everybody
    elif source.table is not None:
        options["table"] = source.table
    return options


def sink_options(definition: Definition, sink: Sink | None) -> dict[str, str]:
    """The options of the data source for topics; which ones, a column says."""
    options = dict(sink.options) if sink is not None else {}
    given = {name.lower() for name in options}
    if "bootstrap.servers" not in given:
        options["bootstrap.servers"] = definition.broker or DEFAULT_BROKER
    if "namespace" not in given and definition.namespace is not None:
        options["namespace"] = definition.namespace
    return options
