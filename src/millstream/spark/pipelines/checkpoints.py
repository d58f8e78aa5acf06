"""Whose a checkpoint is.  Spark would let a second pipeline go on where the first one is, and leave out all before."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from millstream.errors import ConfigInvalid
from millstream.spark.pipelines.graph import queries_of
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.ready.kinds import ReadyDefinition

__all__ = ["own_checkpoint"]

#: Where Spark looks for paths that do not say it.
_SOMEWHERE: Final = "spark.hadoop.fs.defaultFS"
_NO_SETTINGS: Final[Mapping[str, str]] = {}


def own_checkpoint(checked: Checked, settings: Mapping[str, str] = _NO_SETTINGS) -> None:
    """Write down whose the checkpoint of each query is; what cannot be looked at from here is not.

    Raises ConfigInvalid if one is another pipeline's.
    """
    directory = _on_this_machine(checked, settings)
    if directory is None:
        return
    name = checked.definition.name
    # Beside the checkpoints: what is inside is Spark's.
    files = {query: directory / f".{query}.pipeline" for query in _queries(checked)}
    try:
        owners = {query: file.read_text().strip() if file.exists() else "" for query, file in files.items()}
    except (OSError, UnicodeDecodeError):
        return  # Spark will see
    for query, file in files.items():
        if (owner := owners[query]) not in ("", name):
            raise ConfigInvalid(
                f"the checkpoint {directory / query} is that of pipeline {owner!r}, and what that has read this "
                f"one would leave out: give each a directory of its own, or remove {file} if it is the same one under "
                "another name"
            )
    with suppress(OSError):
        for query, file in files.items():
            if not owners[query]:
                directory.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{name}\n")


def _queries(checked: Checked) -> list[str]:
    """The names of the queries that have a checkpoint."""
    definition = checked.definition
    if isinstance(definition, ReadyDefinition):
        return [definition.ready] if definition.options.NEEDS_CHECKPOINT else []
    return [query.name for query in queries_of(checked.graph) if query.is_stream]


def _on_this_machine(checked: Checked, settings: Mapping[str, str]) -> Path | None:
    given = checked.definition.checkpoint
    if given is None:
        return None
    if given.startswith("file:"):
        return Path("/", given.removeprefix("file:").lstrip("/"))
    if "://" in given or _SOMEWHERE in {**checked.definition.spark, **settings}:
        return None
    return Path(checked.place(given))
