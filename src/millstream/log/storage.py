"""The file operations that the log relies on, and the only place that performs them on a disk.

Everything above this module speaks to `Storage` and `File`, so the same code runs on a disk, in memory (ephemeral
topics) and on the simulated disk that loses power in tests.  What the log may assume of any storage:

- written bytes can be read back at once, but survive a power cut only after `File.sync`;
- a new, renamed or removed name survives a power cut only after `sync_directory` of the directory it stands in;
- a rename replaces its target in one step;
- a failed sync says nothing about which bytes are on disk, and repeating it proves nothing (the kernel may already have
  dropped the pages), so the caller must stop trusting what it has not confirmed before.

Paths are relative to the storage's root and separated by '/'.  Errors are OSError; callers translate them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from millstream.log.holding import Holding
from millstream.records import Buffer

__all__ = [
    "NO_FILES",
    "NO_ROOM",
    "Directory",
    "DiskStorage",
    "File",
    "NotOpened",
    "Storage",
    "Syncable",
    "make_data_directory",
    "parent_of",
    "write_fully",
]

#: What is said where a disk has no more room, and where a process or its machine can have no more files open.
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class NotOpened(OSError):
    """A directory cannot be opened now, so that its names were not synced.

    Nothing was tried, so nothing is in doubt: unlike a sync that failed it can be tried again.
    """


class Syncable(Protocol):
    """Something whose contents `sync` puts on disk; may be called from another thread."""

    def sync(self) -> None: ...


class File(Syncable, Protocol):
    """An open file, read and written at explicit positions, so that threads share no cursor."""

    @property
    def path(self) -> str: ...

    def write(self, data: Buffer, position: int) -> None:
        """Write everything, going on after a short write.  After an OSError any part of it may be in the file."""

    def read(self, position: int, size: int) -> bytes:
        """Read `size` bytes; fewer only at the end of the file."""

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Directory(Syncable, Protocol):
    """An open directory, for several syncs of its names, none of which can fail because it cannot be opened."""

    def close(self) -> None: ...


class Storage(Protocol):
    """A tree of files."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing.  Raises FileNotFoundError, unless `create`, which leaves contents alone."""

    def names(self, directory: str) -> list[str]:
        """Names of the files and directories in a directory, sorted; nothing when there is no such directory."""

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def is_link(self, path: str) -> bool:
        """Whether this only leads to where something is, or was: somebody has moved it to another disk."""

    def make_directory(self, *paths: str) -> None:
        """Make directories and their parents, durably; those that exist are fine.  Many cost hardly more than one.

        After a crash or an error the name of an empty directory may not be on disk, although it exists by now; that of
        one that holds something is.
        """

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file; raises FileNotFoundError when there is none."""

    def remove_tree(self, directory: str) -> None:
        """Remove a directory with everything in it, durably; one that does not exist is fine.

        Of a link only the link itself, whatever is behind it.
        """

    def sync_directory(self, directory: str) -> None:
        """Raises NotOpened when it cannot even begin."""

    def open_directory(self, directory: str) -> Directory: ...

    def replace(self, path: str, data: bytes) -> None:
        """Give a file new contents, durably and in one step: a crash leaves the old contents or the new."""

    def read_all(self, path: str) -> bytes: ...

    def free_bytes(self) -> int:
        """How much more fits."""


def parent_of(path: str) -> str:
    """The directory that holds a path; '' is the root."""
    return path.rpartition("/")[0]


def write_fully(write_some: Callable[[memoryview, int], int], data: Buffer, position: int) -> None:
    """Drive a write that may stop short until everything is written."""
    rest = memoryview(data)
    while rest:
        written = write_some(rest, position)
        if written <= 0:
            # Disks say ENOSPC or EIO; a write of nothing would make us spin.
            raise OSError(errno.EIO, "the write made no progress")
        rest = rest[written:]
        position += written


class DiskFile:
    """A file descriptor and its name."""

    __slots__ = ("_fd", "_holding", "path")

    def __init__(self, fd: int, path: str, holding: Holding) -> None:
        self._fd = fd
        self._holding = holding
        self.path = path

    def write(self, data: Buffer, position: int) -> None:
        if self._holding.sizes and position < self._holding.sizes.get(self.path, 0):
            self._holding.keep(self.path, changing=True)
        size = len(data)
        written = os.pwrite(self._fd, data, position)
        if written != size:
            write_fully(lambda rest, at: os.pwrite(self._fd, rest, at), memoryview(data)[written:], position + written)

    def read(self, position: int, size: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) < size:
            # Linux reads at most 2 GiB per call and a signal may cut one short; only b"" means the end.
            while more := os.pread(self._fd, size - len(data), position + len(data)):
                data += more
        return data

    def fileno(self) -> int:
        return self._fd

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        # Segments are cut in threads when they are sealed, and somebody may begin to hold them at any time.
        with self._holding.lock:
            if size < self._holding.sizes.get(self.path, 0):
                self._holding.keep(self.path, changing=True)
            os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        # -1 afterwards: a second close could otherwise hit a descriptor that somebody else has opened since.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DiskDirectory:
    """The descriptor of a directory."""

    __slots__ = ("_fd",)

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            if problem.errno in NO_FILES:
                raise NotOpened(problem.errno, problem.strerror, path) from problem
            raise

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class DiskStorage:
    """Files below a directory of the machine."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        #: For copying everything as it is at one moment.
        self.holding = Holding(self._root)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def open(self, path: str, *, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return DiskFile(os.open(self._at(path), flags, 0o640), path, self.holding)

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(directory)))
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        return os.stat(self._at(path)).st_size

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    def is_link(self, path: str) -> bool:
        return os.path.islink(self._at(path))

    def make_directory(self, *paths: str) -> None:
        make_data_directory(Path(self._root))
        missing = [path for path in paths if not os.path.isdir(self._at(path))]
        parents = dict.fromkeys(map(parent_of, missing))
        for parent in parents:
            self._prepare(parent)
        for path in missing:
            self._mkdir(path)
        for parent in parents:
            _sync_directory(self._at(parent))

    def _prepare(self, directory: str) -> None:
        """Have the name of a directory on disk before anything stands in it.

        An empty one may be what a crash, or a sync that failed, has left of the last try.
        """
        if directory and not self._is_in_use(directory):
            parent = parent_of(directory)
            self._prepare(parent)
            self._mkdir(directory)
            _sync_directory(self._at(parent))

    def _is_in_use(self, directory: str) -> bool:
        with suppress(FileNotFoundError), os.scandir(self._at(directory)) as entries:
            return any(entries)  # the first one is enough: there may be thousands
        return False

    def _mkdir(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(self._at(path), 0o750)

    def rename(self, old: str, new: str) -> None:
        with self.holding.lock:
            self.holding.keep_renamed(old)
            self.holding.keep(new)
            os.replace(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        with self.holding.lock:
            self.holding.keep(path)
            os.unlink(self._at(path))

    def remove_tree(self, directory: str) -> None:
        if self.is_link(directory):
            self.remove(directory)
            _sync_directory(self._at(parent_of(directory)))
        elif os.path.isdir(self._at(directory)):
            # File by file, since somebody may begin to hold them at any time.
            for place, directories, names in os.walk(self._at(directory), topdown=False):
                links = [name for name in directories if os.path.islink(f"{place}/{name}")]
                for name in (*names, *links):
                    self.remove(f"{place}/{name}".removeprefix(f"{self._root}/"))
                os.rmdir(place)
            _sync_directory(self._at(parent_of(directory)))

    def sync_directory(self, directory: str) -> None:
        _sync_directory(self._at(directory))

    def open_directory(self, directory: str) -> Directory:
        return DiskDirectory(self._at(directory))

    def replace(self, path: str, data: bytes) -> None:
        temporary = f"{path}.tmp"
        file = self.open(temporary, create=True)
        try:
            # A leftover of a crash may be longer than what we write now.
            file.truncate(0)
            file.write(data, 0)
            file.sync()
        finally:
            file.close()
        self.rename(temporary, path)
        self.sync_directory(parent_of(path))

    def free_bytes(self) -> int:
        """What an ordinary user may still write to this disk."""
        room = os.statvfs(self._root)
        return room.f_bavail * room.f_frsize

    def read_all(self, path: str) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()


def make_data_directory(path: Path) -> None:
    """Make a directory and whatever is missing above it; their names are on disk when this returns."""
    made = os.path.abspath(path)
    missing: list[str] = []
    while not os.path.isdir(made):
        missing.append(made)
        made = os.path.dirname(made)
    for made in reversed(missing):
        Path(made).mkdir(0o750 if made == missing[0] else 0o777, exist_ok=True)  # another broker may begin there, too
        with suppress(PermissionError):  # who may write to a directory need not be allowed to list it, which this takes
            _sync_directory(os.path.dirname(made))


def _sync_directory(path: str) -> None:
    directory = DiskDirectory(path)
    try:
        directory.sync()
    finally:
        directory.close()
