"""Whose a checkpoint is.  Spark would let a second pipeline go on where the first one is, and leave out all before."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millstream.errors import ConfigInvalid
from millstream.spark.pipelines.loading import Checked

__all__ = ["own_checkpoint"]

#: No query is called so, and its checkpoint neither.
_OWNER: Final = ".pipeline"


def own_checkpoint(checked: Checked) -> None:
    """Write down whose it is; one that is not on this machine is not looked at.

    Raises ConfigInvalid if it is another pipeline's.
    """
    place = checked.definition.checkpoint
    if place is None or "://" in place:
        return
    name = checked.definition.name
    file = Path(checked.place(place).removeprefix("file:"), _OWNER)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        owner = file.read_text().strip() if file.exists() else ""
        if not owner:
            file.write_text(f"{name}\n")
    except OSError as problem:
        raise ConfigInvalid(f"the checkpoint {file.parent} cannot be written: {problem.strerror}") from None
    if owner not in ("", name):
        raise ConfigInvalid(
            f"the checkpoint {file.parent} is that of pipeline {owner!r}, and what that has read this one would leave "
            f"out: give each a directory of its own, or remove {file} if it is the same one under another name"
        )
