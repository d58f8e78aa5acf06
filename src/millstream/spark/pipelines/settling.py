"""The ack of what the last batch of a query has claimed.

A reader acks a batch when Spark asks it for the next one.  When a query has come to its end, Spark asks for no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from millstream.errors import MillstreamError
from millstream.spark.options import SourceOptions
from millstream.spark.pipelines.loading import Checked

__all__ = ["settle_last"]


def settle_last(checked: Checked, progress: Mapping[str, Any]) -> None:
    """`progress` is the last that a query which is over has told: Spark tells it of batches that are committed.

    Where the broker cannot be reached, the next start does it.
    """
    sources = [source for source in checked.definition.sources.values() if "claim" in map(str.lower, source.options)]
    if not sources:
        return
    from millstream.spark.claiming import acknowledge

    for end in map(_offset, progress.get("sources") or []):
        for source in sources if "claim" in end else []:
            # Each takes of it what is of its topics and its group.
            with suppress(MillstreamError):
                acknowledge(SourceOptions.of(checked.source_options(source), streaming=True), end)


def _offset(source: Mapping[str, Any]) -> dict[str, Any]:
    end = source.get("endOffset")
    if isinstance(end, str):  # Spark has it as the text that is in its checkpoint
        with suppress(ValueError):
            end = json.loads(end)
    return end if isinstance(end, dict) else {}
