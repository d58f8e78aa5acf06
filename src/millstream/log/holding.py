"""Holding files: a tree as it was at one moment, for as long as it takes to copy it, while everything goes on.

Logs only grow, so of most files it is enough to know how long they were.  What would be removed, replaced, cut or
overwritten is put aside first, under `held/kept/` by the same path: mostly as a second name of the same bytes, which
costs nothing, and as a copy where bytes are changed in place (headers of small index files).

A copy made this way is what a broker that was killed at that moment would have left.  Copying files one after the
other, in whatever order, would not be: what is remembered in one file (the next producer id, how far a move has come)
would be older or newer than the messages in another, and a message could be taken for one that is there already.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import BinaryIO, Final

import msgspec

__all__ = ["HELD", "LOST_AND_FOUND", "RESTORING", "HeldList", "Holding", "files_below", "open_held", "read_list"]

#: Where files are put aside, and what was held.
HELD: Final = "held"
_KEPT: Final = f"{HELD}/kept"
_LIST: Final = f"{HELD}/list"
#: Stands in a directory until everything that belongs there has been put there.
RESTORING: Final = "restoring"
#: What belongs to a broker at the top of its data directory, and lasts.  The lock, what is held and the mark of a
#: restore are of one process or one moment; whatever else is there, others have put there.
_LASTING: Final = frozenset({"node_id", "epoch", "format", "clean", "topics", "state", "history", "traces", "stages"})
#: A file system has this where it begins, for itself, and lets nobody look into it.
LOST_AND_FOUND: Final = "lost+found"
#: Files that are being written; they count once they have another name.
_UNFINISHED: Final = (".tmp", ".new")
_COMPACTED: Final = ".log.new"
#: Files whose bytes are changed in place, the indexes, are smaller than this.
_CHANGED_BYTES_MAX: Final = 16 * 1024 * 1024


class HeldList(msgspec.Struct):
    """What was there at the moment: how many bytes of each file count."""

    hold_id: str
    sizes: dict[str, int]


class Holding:
    """What a storage asks before it removes or overwrites bytes.  `sizes` is empty while nothing is held."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.sizes: dict[str, int] = {}
        self._kept: set[str] = set()
        #: Why not everything is there any more; empty while it is.
        self.lost = ""
        #: Held by whoever changes names, so that the moment is one moment for threads as well.
        self.lock: Final = threading.RLock()

    def begin(self, hold_id: str) -> HeldList:
        """From now on nothing is lost.  To be called where nobody appends meanwhile.  Raises OSError."""
        with self.lock:
            assert not self.sizes, "files are held already"
            shutil.rmtree(f"{self._root}/{HELD}", ignore_errors=True)
            held = HeldList(hold_id, files_below(self._root))
            os.makedirs(f"{self._root}/{HELD}", mode=0o750)
            with open(f"{self._root}/{_LIST}", "wb") as file:
                file.write(msgspec.json.encode(held))
            self._kept = set()
            self.lost = ""
            self.sizes = held.sizes
        return held

    def end(self) -> None:
        """What was put aside may go; fine when nothing is held.  May take a while."""
        with self.lock:
            self.sizes = {}
        shutil.rmtree(f"{self._root}/{HELD}", ignore_errors=True)

    def keep_renamed(self, path: str) -> None:
        """As `keep`, before a file is renamed: under its new name a later change in place would not be noticed."""
        self.keep(path, changing=self.sizes.get(path, 0) <= _CHANGED_BYTES_MAX)

    def keep(self, path: str, *, changing: bool = False) -> None:
        """Called before a name goes away or, with `changing`, before bytes that were there at the moment do.

        Never fails: on a disk without room the copy is lost, and not what the broker is doing.
        """
        if path not in self.sizes:
            return
        with self.lock:
            size = self.sizes.get(path)
            if size is None or path in self._kept:
                return
            source, kept = f"{self._root}/{path}", f"{self._root}/{_KEPT}/{path}"
            try:
                os.makedirs(os.path.dirname(kept), mode=0o750, exist_ok=True)
                if changing or not _linked(source, kept):
                    _copy(source, kept, size)
            except OSError as error:
                self.lost = f"{path} could not be put aside: {error.strerror or error}"
                self.sizes = {}
            else:
                self._kept.add(path)


def _linked(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except FileNotFoundError:
        return True  # somebody else removed it by hand; whoever copies it will say so
    except OSError:
        return False  # some file systems have one name per file
    return True


def _copy(source: str, target: str, size: int) -> None:
    with open(source, "rb") as file:
        data = file.read(size)
    with open(f"{target}.part", "wb") as file:
        file.write(data)
    os.rename(f"{target}.part", target)


def files_below(root: str, place: str = "") -> dict[str, int]:
    """Every file that belongs to a data directory, or to a place in it, by its path in it, and its size.

    Parts of it may be links to other disks.  Raises OSError, with the name of what cannot be read.
    """
    found: dict[str, int] = {}
    followed: set[tuple[int, int]] = set()
    pending = [place]
    while pending:
        directory = pending.pop()
        entries: list[os.DirEntry[str]] = []
        with suppress(FileNotFoundError), os.scandir(f"{root}/{directory}") as scanned:
            entries = list(scanned)
        names = {entry.name for entry in entries}
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            if entry.name == LOST_AND_FOUND or not (directory or entry.name in _LASTING):
                continue
            if entry.is_symlink():
                _check_link(entry, followed)
            if entry.is_dir():
                pending.append(path)
            elif entry.is_file() and not _is_unfinished(entry.name, names):
                with suppress(FileNotFoundError):
                    found[path] = entry.stat().st_size
    return dict(sorted(found.items()))


def _check_link(link: os.DirEntry[str], followed: set[tuple[int, int]]) -> None:
    """Raises OSError when nothing is behind it, or a directory to which a link has led before, perhaps this one."""
    target = link.stat()
    place = (target.st_dev, target.st_ino)
    if place in followed:
        raise OSError(errno.ELOOP, "this link leads back, or to where another one leads", link.path)
    if link.is_dir():
        followed.add(place)


def _is_unfinished(name: str, names: Collection[str]) -> bool:
    if name.endswith(_COMPACTED):
        # Without a new index beside it, it belongs to the index that is in place: a swap was interrupted (see swap.py).
        return f"{name.removesuffix(_COMPACTED)}.index.new" in names
    return name.endswith(_UNFINISHED)


def read_list(root: str) -> HeldList:
    """What a broker holds in this directory.  Raises OSError, and msgspec.DecodeError."""
    with open(f"{root}/{_LIST}", "rb") as file:
        return msgspec.json.decode(file.read(), type=HeldList)


def open_held(root: str, path: str) -> BinaryIO:
    """A file with the bytes of the moment, whatever has become of it since."""
    kept = f"{root}/{_KEPT}/{path}"
    with suppress(FileNotFoundError):
        return open(kept, "rb")
    try:
        file: BinaryIO = open(f"{root}/{path}", "rb")  # noqa: SIM115
    except FileNotFoundError:
        return open(kept, "rb")
    if os.fstat(file.fileno()).st_size <= _CHANGED_BYTES_MAX:
        # It may be changed in place after it was opened, so it is read before we look again.
        with file:
            file = io.BytesIO(file.read())
    # It is put aside before it is replaced: what is not there now was not yet replaced when we opened it.
    with suppress(FileNotFoundError):
        aside = open(kept, "rb")  # noqa: SIM115
        file.close()
        return aside
    return file
