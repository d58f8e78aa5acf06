"""Which version of Millstream can read a data directory: one number, in its file `format`.

Whoever changes what is stored so that an earlier version would misread it, or not keep it, raises the number: another
layout of a file, but also another kind of fact or another field of a document.  Settings of topics and queues do not
count: they are stored only where they are used, and refused only there.

What an earlier version wrote is read for good.  The first start of a version with a higher number writes it down before
anything else, and from then on an earlier version does not touch the directory.  Without the file the number is 1.
"""

from __future__ import annotations

from typing import Final

from millstream.errors import NewerData
from millstream.log.storage import Storage

__all__ = ["FORMAT", "FORMAT_FILE", "check_format", "raise_format"]

#: What this version reads and writes.
FORMAT: Final = 1
FORMAT_FILE: Final = "format"


def check_format(storage: Storage) -> None:
    """Raises NewerData when a newer version has written the directory; changes nothing."""
    written = _written(storage)
    if written is None or written > FORMAT:
        raise NewerData(
            f"the data directory has the format {'?' if written is None else written}, and this version of Millstream "
            f"knows the formats up to {FORMAT}: use the version that wrote it or a newer one; to go back, restore a "
            "backup from before the upgrade into an empty directory"
        )


def raise_format(storage: Storage) -> None:
    """From now on no version that knows less touches the directory; to be called when `check_format` was content."""
    written = _written(storage)
    if written is not None and written < FORMAT:
        storage.replace(FORMAT_FILE, b"%d\n" % FORMAT)


def _written(storage: Storage) -> int | None:
    """The number in the file; None if it is none, as only a version that we know nothing of can have written it."""
    if not storage.exists(FORMAT_FILE):
        return 1
    try:
        return int(storage.read_all(FORMAT_FILE))
    except ValueError:
        return None
