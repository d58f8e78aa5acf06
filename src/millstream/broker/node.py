"""What a broker notes about itself in its data directory: who it is, and whether it has stopped in an orderly way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from millstream.log.storage import Storage

__all__ = ["leave_clean_marker", "load_node_id", "take_clean_marker"]

_log = structlog.get_logger("millstream.broker")

_CLEAN_MARKER: Final = "clean"


def load_node_id(storage: Storage, draw: Callable[[], int]) -> str:
    """The name of this node, made of 64 bits drawn by chance when it starts for the first time."""
    if storage.exists("node_id"):
        return storage.read_all("node_id").decode().strip()
    node_id = f"{draw():016x}"
    storage.replace("node_id", node_id.encode() + b"\n")
    return node_id


def take_clean_marker(storage: Storage) -> bool:
    """Whether the last run has stopped in an orderly way; only the next one may say so of this one."""
    clean = storage.exists(_CLEAN_MARKER)
    if clean:
        storage.remove(_CLEAN_MARKER)
        storage.sync_directory("")
    return clean


def leave_clean_marker(storage: Storage) -> None:
    """Everything is on disk: the next start can trust it."""
    try:
        storage.replace(_CLEAN_MARKER, b"")
    except OSError as error:  # the next start only has to find out what is there
        _log.warning("the next start will check everything: its note could not be left", reason=str(error))
