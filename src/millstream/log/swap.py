"""Putting a compacted segment in the place of the segments it was made from, so that a crash at any point is harmless.

The new segment is prepared beside the old ones as `{base}.index.new` and `{base}.log.new`, named after the first of its
inputs.  The index's name is made durable before the log file is created.  Then:

1. `{base}.index.new` becomes `{base}.index`.  From here on the swap counts: the new index says that its segment
   supersedes everything up to its next offset.
2. `{base}.log.new` becomes `{base}.log`.
3. The other inputs are removed.

Recovery finds either both new files (step 1 did not happen: they are removed), or only the new log file (steps 2 and 3
are done again), or none (step 3 is done again, if inputs are left).  A new log file without a new index can mean
nothing else, because the index's name came first.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.log.index import INDEX_HEADER_BYTES, IndexFlags, IndexHeader
from millstream.log.segment import segment_name
from millstream.log.storage import Storage, Syncable

__all__ = ["finish_swaps", "put_in_place", "read_index_header", "remove_segment", "remove_superseded"]


def put_in_place(storage: Storage, directory: str, names: Syncable, base_offset: int) -> None:
    """Do the swap up to where the new segment is the one that is read; its files are complete and synced.

    `names` is the directory, open: once this has begun it has to go on.
    """
    index, log = segment_name(directory, base_offset, "index"), segment_name(directory, base_offset, "log")
    storage.rename(f"{index}.new", index)
    names.sync()
    storage.rename(f"{log}.new", log)


def remove_superseded(storage: Storage, directory: str, names: Syncable, superseded: Sequence[int]) -> None:
    """Do the rest; `superseded` are base offsets of inputs but the first."""
    names.sync()
    for base in superseded:
        remove_segment(storage, directory, base)
    names.sync()


def finish_swaps(storage: Storage, directory: str) -> None:
    """Complete or undo what a crash has interrupted."""
    names = set(storage.names(directory))
    changed = False
    # The log file goes before its index here as well, or a second crash would leave it as that of a swap that counts.
    for name in sorted(names, reverse=True):
        if name.endswith(".log.new"):
            log = name.removesuffix(".new")
            index = log.removesuffix("log") + "index"
            header, _ = read_index_header(storage, f"{directory}/{index}")
            decided = f"{index}.new" not in names and header is not None and header.flags & IndexFlags.COMPACTED
            if decided and header is not None and header.log_bytes == storage.size(f"{directory}/{name}"):
                storage.rename(f"{directory}/{name}", f"{directory}/{log}")
            else:
                storage.remove(f"{directory}/{name}")
            changed = True
        elif name.endswith((".index.new", ".tmp")):
            storage.remove(f"{directory}/{name}")
            changed = True
    if changed:
        storage.sync_directory(directory)


def read_index_header(storage: Storage, path: str) -> tuple[IndexHeader | None, int]:
    """The header of an index file, None unless it is good, and the size of the file."""
    try:
        file = storage.open(path)
    except FileNotFoundError:
        return None, 0
    try:
        return IndexHeader.decode(file.read(0, INDEX_HEADER_BYTES)), file.size()
    finally:
        file.close()


def remove_segment(storage: Storage, directory: str, base_offset: int) -> None:
    """Remove a segment's files; the log file first, because an index without one is taken for a leftover."""
    for suffix in ("log", "index"):
        path = segment_name(directory, base_offset, suffix)
        if storage.exists(path):
            storage.remove(path)
