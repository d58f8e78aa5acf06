"""What a broker notes about itself in its data directory: who it is, and whether it has stopped in an orderly way.

It also checks, before the first byte is written there, that the directory is one that a broker can start with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import structlog

from millstream.broker.partition import Partition
from millstream.errors import StartFailed, StorageFailed
from millstream.log.format import check_format
from millstream.log.holding import RESTORING
from millstream.log.storage import NO_ROOM, Storage

__all__ = [
    "TOPICS_STATE",
    "check_data",
    "close_all",
    "load_node_id",
    "next_epoch",
    "note_epoch",
    "take_clean_marker",
]

_log = structlog.get_logger("millstream.broker")

#: The state log that says which topics there are.
TOPICS_STATE: Final = "state/topics"
_CLEAN_MARKER: Final = "clean"
_NODE_ID: Final = "node_id"
_EPOCH: Final = "epoch"


def check_data(storage: Storage) -> None:
    """Raises StartFailed when a broker would take the directory for something that it is not; changes nothing.

    And NewerData when it would not understand what is there.
    """
    check_format(storage)
    if storage.exists(RESTORING):
        raise StartFailed("the data directory holds a restore that was cut short: empty it and restore again")
    try:
        if storage.exists(_NODE_ID):
            storage.read_all(_NODE_ID)
        orphan = None if storage.names(TOPICS_STATE) else _first_stored(storage)
    except OSError as error:
        what, why = error.filename or "the data directory", error.strerror or error
        raise StartFailed(f"{what} cannot be read: {why}; let this user read it") from None
    if orphan is not None:
        raise StartFailed(
            f"the data directory has messages ({orphan}) but lacks {TOPICS_STATE}, which says what they belong to: "
            "put that directory back or restore a backup into an empty one; to begin without these messages, move "
            "topics/ and state/ elsewhere"
        )


def _first_stored(storage: Storage) -> str | None:
    """A partition that has files.

    One that has none does not count: its directory is made while its topic is recorded, and a crash may leave only
    the directory.  Files come when the record is on disk.
    """
    for namespace in _names(storage, "topics"):
        for topic in _names(storage, f"topics/{namespace}"):
            for partition in _names(storage, f"topics/{namespace}/{topic}"):
                directory = f"topics/{namespace}/{topic}/{partition}"
                if _names(storage, directory):
                    return directory
    return None


def _names(storage: Storage, directory: str) -> list[str]:
    try:
        return storage.names(directory)
    except (NotADirectoryError, PermissionError):  # what somebody else has put there is none of the broker's
        return []


def load_node_id(storage: Storage, draw: Callable[[], int]) -> str:
    """The name of this node, made of 64 bits drawn by chance when it starts for the first time."""
    if storage.exists(_NODE_ID):
        return storage.read_all(_NODE_ID).decode().strip()
    node_id = f"{draw():016x}"
    storage.replace(_NODE_ID, node_id.encode() + b"\n")
    return node_id


def take_clean_marker(storage: Storage) -> bool:
    """Whether the last run has stopped in an orderly way.  Removes its note: this run has yet to earn one."""
    clean = storage.exists(_CLEAN_MARKER)
    if clean:
        storage.remove(_CLEAN_MARKER)
        storage.sync_directory("")
    return clean


def next_epoch(storage: Storage, now_us: int) -> int:
    """The number that batches written by this run carry, larger than that of any run before.

    A power cut may have taken the end of a log, and what is stored there next gets the same offsets.  By the epoch a
    reader knows the one from the other.  It is the time in seconds where that is larger: a data directory that comes
    from a backup would otherwise count on with numbers that what was written after the backup had already.
    """
    written = storage.read_all(_EPOCH).strip() if storage.exists(_EPOCH) else b"0"
    if not written.isdigit():
        _log.error(
            "the epoch of the last run cannot be read; this one begins with the time", written=repr(written[:20])
        )
        written = b"0"
    return max(int(written) + 1, now_us // 1_000_000)


def note_epoch(storage: Storage, epoch: int) -> None:
    """Before the first batch of it is written."""
    try:
        storage.replace(_EPOCH, b"%d\n" % epoch)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        # A broker starts on a full disk, too.  The next epoch is larger by the time alone.
        _log.warning("the epoch of this run could not be noted", epoch=epoch, reason=error.strerror)


def close_all(storage: Storage, partitions: Iterable[Partition], *, settled: bool) -> None:
    """Everything is on disk: close the logs, and note that the next start can trust them if nothing is left to do."""
    for partition in partitions:
        settled = settled and partition.failed is None
        try:
            partition.log.close()
        except StorageFailed as error:  # the next start has to look what is there; the others are fine
            settled = False
            _log.error("a log could not be closed in order", directory=partition.log.directory, reason=str(error))
    if settled:
        _leave_clean_marker(storage)


def _leave_clean_marker(storage: Storage) -> None:
    try:
        storage.replace(_CLEAN_MARKER, b"")
    except OSError as error:  # the next start only has to find out what is there
        _log.warning("the next start will check everything: its note could not be left", reason=str(error))
