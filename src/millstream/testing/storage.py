"""A disk that can lose power and fail on request, for tests of everything that claims to be durable.

The fault model, which is what journalling file systems on honest disks promise and not more:

*Bytes.*  A write goes to the page cache, where everybody sees it at once.  It is on the media after `sync` of its file
has returned.  At a power cut each file, by itself, keeps one of: nothing of what was not synced; all of it; the first
part of it in the order of the writes, cut at any byte; any selection of its 512-byte pages, the others holding what
they held before, or zeros.

*Names.*  Making, renaming and removing a file change the directory in the cache.  They are on the media after
`sync_directory`.  At a power cut each directory keeps some number of the first changes, in the order they were made,
as a journal does.  A file whose name was lost is lost.  Directories themselves are made durably.

*Failed syncs.*  A sync that reports EIO has put an unknown part of the file's new bytes on the media; the rest counts
as clean from then on and is never written, however often the file is synced again.  Reads go on showing it, until the
power goes.

*Failed writes.*  ENOSPC and EIO come after any part of the data has been written.  A short write writes a part, says
so, and the caller has to go on.

*No more files.*  A new file, or a directory whose names are to be synced, cannot be opened; nothing else happens.

*Kill.*  A killed process loses its handles and nothing else.

*Rot.*  Bits change only where a test changes them, with `flip`.

All choices come from one seed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Final

from millstream.log.storage import Directory, File, NotOpened, parent_of, write_fully
from millstream.records import Buffer

__all__ = ["Fault", "Operation", "PowerCut", "SimulatedStorage"]

_PAGE_BYTES: Final = 512


class PowerCut(Exception):
    """The machine went down in the middle of an operation; `restart` brings it back."""


class Fault(Enum):
    """What can go wrong in an operation on the storage."""

    SHORT_WRITE = auto()
    NO_SPACE = auto()
    WRITE_ERROR = auto()
    SYNC_ERROR = auto()
    NO_FILES = auto()
    POWER_CUT = auto()

    def hits(self, operation: Operation) -> bool:
        """Whether an operation is of the kind that this fault happens to."""
        match self:
            case Fault.POWER_CUT:
                return True
            case Fault.SYNC_ERROR:
                return operation.kind in ("sync", "sync_directory")
            case Fault.NO_SPACE:
                return operation.kind in ("write", "create")
            case Fault.NO_FILES:
                return operation.kind in ("create", "open_directory", "sync_directory")
            case _:
                return operation.kind == "write"


@dataclass(frozen=True, slots=True)
class Operation:
    """One change that the storage was asked for; numbered from 1."""

    number: int
    kind: str  # write, truncate, sync, create, rename, remove, open_directory, sync_directory
    path: str


@dataclass(slots=True)
class _Injected:
    fault: Fault
    when: Callable[[Operation], bool]
    times: int


@dataclass(eq=False, slots=True)
class _Inode:
    """A file's contents: as everybody sees them, as the media has them, and the changes in between."""

    cached: bytearray = field(default_factory=bytearray)
    media: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # position and data, or size and None


def _apply(contents: bytearray, position: int, data: bytes | None) -> None:
    if len(contents) < position:
        contents.extend(bytes(position - len(contents)))
    if data is None:
        del contents[position:]
    else:
        contents[position : position + len(data)] = data


class SimulatedFile:
    """A handle, good until the machine or the process goes down."""

    def __init__(self, storage: SimulatedStorage, inode: _Inode, path: str) -> None:
        self._storage = storage
        self._inode = inode
        self._boot = storage.boots
        self.path = path

    def write(self, data: Buffer, position: int) -> None:
        write_fully(self._write_some, data, position)

    def _write_some(self, data: memoryview, position: int) -> int:
        fault = self._begin("write")
        size = len(data)
        if fault is not None:
            size = self._storage.random.randrange(size + 1)
        if size:
            self._change(position, bytes(data[:size]))
        match fault:
            case None:
                return size
            case Fault.SHORT_WRITE:
                # At least a byte: a write of nothing is another kind of failure.
                if not size:
                    self._change(position, bytes(data[:1]))
                return max(size, 1)
            case Fault.NO_SPACE:
                raise OSError(errno.ENOSPC, "No space left on device", self.path)
            case Fault.WRITE_ERROR:
                raise OSError(errno.EIO, "Input/output error", self.path)
            case _:
                raise self._storage.go_down()

    def read(self, position: int, size: int) -> bytes:
        self._check()
        return bytes(self._inode.cached[position : position + size])

    def sync(self) -> None:
        fault = self._begin("sync")
        inode = self._inode
        if fault is Fault.POWER_CUT:
            raise self._storage.go_down()
        if fault is Fault.SYNC_ERROR:
            kept = inode.pending[: self._storage.random.randrange(len(inode.pending) + 1)]
        else:
            kept = inode.pending
        for position, data in kept:
            _apply(inode.media, position, data)
        inode.pending = []
        if fault is Fault.SYNC_ERROR:
            raise OSError(errno.EIO, "Input/output error", self.path)

    def truncate(self, size: int) -> None:
        if self._begin("truncate") is not None:
            raise self._storage.go_down()
        self._change(size, None)

    def size(self) -> int:
        self._check()
        return len(self._inode.cached)

    def close(self) -> None:
        """Nothing to do: a handle costs nothing."""

    def _begin(self, kind: str) -> Fault | None:
        self._check()
        return self._storage.begin(kind, self.path)

    def _check(self) -> None:
        self._storage.check_up()
        if self._boot != self._storage.boots:
            raise OSError(errno.EBADF, "the file was opened before the restart", self.path)

    def _change(self, position: int, data: bytes | None) -> None:
        _apply(self._inode.cached, position, data)
        self._inode.pending.append((position, data))


@dataclass(frozen=True, slots=True)
class SimulatedDirectory:
    """A handle on the names in a directory."""

    storage: SimulatedStorage
    directory: str

    def sync(self) -> None:
        self.storage.sync_names(self.directory, is_open=True)

    def close(self) -> None:
        """Nothing to do: a handle costs nothing."""


class SimulatedStorage:
    """A disk that loses power and fails on request; the module says how.

    `operations` counts changes, so that a test can fail each one in turn.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.operations = 0
        self.boots = 0
        self.free = 1 << 62  # what the disk says is left; writes do not change it
        #: Called the moment the power goes in the middle of an operation.
        self.on_power_cut: Callable[[], None] | None = None
        self._is_up = True
        self._names: dict[str, _Inode] = {}
        #: What is in each directory: with thousands of files, to look through all of them took most of the time.
        self._below: dict[str, set[str]] = {}
        self._media_names: dict[str, _Inode] = {}
        self._changes: dict[str, list[tuple[str | None, str | None, _Inode | None]]] = {}  # old and new name, file
        self._directories: set[str] = {""}
        self._injected: list[_Injected] = []

    # Faults

    def inject(
        self,
        fault: Fault,
        *,
        at: int | None = None,
        when: Callable[[Operation], bool] = lambda _: True,
        times: int = 1,
    ) -> None:
        """Let a fault happen to the next operations of its kind, from number `at` on, where `when` agrees."""
        first = at if at is not None else 0
        self._injected.append(_Injected(fault, lambda it: it.number >= first and when(it), times))

    def heal(self) -> None:
        """Forget all faults that were injected."""
        self._injected.clear()

    def kill(self) -> None:
        """End the process: open files are closed, and that is all."""
        self.boots += 1

    def power_cut(self, *, lose_everything: bool = False) -> None:
        """Cut the power now, and come back with what the media has."""
        self._is_up = False
        self.restart(lose_everything=lose_everything)

    def restart(self, *, lose_everything: bool = False) -> None:
        """Come back from a power cut."""
        assert not self._is_up, "the power was not cut"
        for directory in sorted(self._changes):
            count = len(self._changes[directory])
            self._commit_names(directory, 0 if lose_everything else self.random.randrange(count + 1))
        self._changes.clear()
        for path in sorted(self._media_names):
            self._settle(self._media_names[path], lose_everything)
        self._names = dict(self._media_names)
        self._below.clear()
        for path in (*self._names, *self._directories):
            self._list(path)
        self._is_up = True
        self.boots += 1

    def flip(self, path: str, position: int, bits: int = 1) -> None:
        """Let some bits of a byte rot, in the cache and on the media."""
        inode = self._inode(path)
        for contents in (inode.cached, inode.media):
            if position < len(contents):
                contents[position] ^= bits

    def begin(self, kind: str, path: str) -> Fault | None:
        """Count an operation; the fault that happens to it, if one does."""
        self.check_up()
        self.operations += 1
        operation = Operation(self.operations, kind, path)
        for injected in self._injected:
            if injected.times and injected.fault.hits(operation) and injected.when(operation):
                injected.times -= 1
                return injected.fault
        return None

    @property
    def is_up(self) -> bool:
        return self._is_up

    def go_down(self) -> PowerCut:
        self._is_up = False
        if self.on_power_cut is not None:
            self.on_power_cut()
        return PowerCut(f"at operation {self.operations}")

    def check_up(self) -> None:
        if not self._is_up:
            raise PowerCut("the power is off")

    def _settle(self, inode: _Inode, lose_everything: bool) -> None:
        """Decide what the media has of a file."""
        pending, inode.pending = inode.pending, []
        if pending and not lose_everything:
            fate = self.random.randrange(4)
            if fate == 1:
                for position, data in pending:
                    _apply(inode.media, position, data)
            elif fate == 2:
                self._keep_prefix(inode, pending)
            elif fate == 3:
                self._keep_pages(inode, pending)
        inode.cached = bytearray(inode.media)

    def _keep_prefix(self, inode: _Inode, pending: list[tuple[int, bytes | None]]) -> None:
        whole = self.random.randrange(len(pending))
        for position, data in pending[:whole]:
            _apply(inode.media, position, data)
        position, data = pending[whole]
        if data is not None:
            _apply(inode.media, position, data[: self.random.randrange(len(data) + 1)])

    def _keep_pages(self, inode: _Inode, pending: list[tuple[int, bytes | None]]) -> None:
        final = bytearray(inode.media)
        for position, data in pending:
            _apply(final, position, data)
        for start in range(0, len(final), _PAGE_BYTES):
            if self.random.random() < 0.5:
                end = min(start + _PAGE_BYTES, len(final))
                final[start:end] = inode.media[start:end].ljust(end - start, b"\0")
        inode.media = final

    # Storage

    def open(self, path: str, *, create: bool = False) -> File:
        self.check_up()
        inode = self._names.get(path)
        if inode is None:
            if not create or parent_of(path) not in self._directories:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            match self.begin("create", path):
                case Fault.POWER_CUT:
                    raise self.go_down()
                case Fault.NO_SPACE:
                    raise OSError(errno.ENOSPC, "No space left on device", path)
                case Fault.NO_FILES:
                    raise OSError(errno.EMFILE, "Too many open files", path)
            inode = _Inode()
            self._change_name(None, path, inode)
        return SimulatedFile(self, inode, path)

    def names(self, directory: str) -> list[str]:
        self.check_up()
        return sorted(self._below.get(directory, ()))

    def size(self, path: str) -> int:
        return len(self._inode(path).cached)

    def exists(self, path: str) -> bool:
        self.check_up()
        return path in self._names or path in self._directories

    def make_directory(self, *paths: str) -> None:
        self.check_up()
        for path in paths:
            while path:
                self._directories.add(path)
                self._list(path)
                path = parent_of(path)

    def rename(self, old: str, new: str) -> None:
        inode = self._inode(old)
        assert parent_of(old) == parent_of(new), "renames between directories are not simulated"
        if self.begin("rename", old) is not None:
            raise self.go_down()
        self._change_name(old, new, inode)

    def remove(self, path: str) -> None:
        self._inode(path)
        if self.begin("remove", path) is not None:
            raise self.go_down()
        self._change_name(path, None, None)

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - there are none
        return False

    def remove_tree(self, directory: str) -> None:
        prefix = f"{directory}/"
        for path in [path for path in self._names if path.startswith(prefix)]:
            self.remove(path)
            self._commit_names(parent_of(path), len(self._changes[parent_of(path)]))
        for path in [path for path in self._directories if path == directory or path.startswith(prefix)]:
            self._directories.remove(path)
            self._unlist(path)

    def sync_directory(self, directory: str) -> None:
        self.sync_names(directory, is_open=False)

    def sync_names(self, directory: str, *, is_open: bool) -> None:
        self.check_up()
        if directory not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", directory)
        match self.begin("sync_directory", directory):
            case Fault.POWER_CUT:
                raise self.go_down()
            case Fault.SYNC_ERROR:
                raise OSError(errno.EIO, "Input/output error", directory)
            case Fault.NO_FILES if not is_open:
                raise NotOpened(errno.EMFILE, "Too many open files", directory)
        self._commit_names(directory, len(self._changes.get(directory, ())))

    def open_directory(self, directory: str) -> Directory:
        match self.begin("open_directory", directory):
            case Fault.POWER_CUT:
                raise self.go_down()
            case Fault.NO_FILES:
                raise NotOpened(errno.EMFILE, "Too many open files", directory)
        return SimulatedDirectory(self, directory)

    def replace(self, path: str, data: bytes) -> None:
        temporary = f"{path}.tmp"
        file = self.open(temporary, create=True)
        file.truncate(0)
        file.write(data, 0)
        file.sync()
        self.rename(temporary, path)
        self.sync_directory(parent_of(path))

    def read_all(self, path: str) -> bytes:
        return bytes(self._inode(path).cached)

    def free_bytes(self) -> int:
        return self.free

    def _inode(self, path: str) -> _Inode:
        self.check_up()
        try:
            return self._names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path) from None

    def _change_name(self, old: str | None, new: str | None, inode: _Inode | None) -> None:
        directory = parent_of(old or new or "")
        if old is not None:
            del self._names[old]
            self._unlist(old)
        if new is not None:
            assert inode is not None
            self._names[new] = inode
            self._list(new)
        self._changes.setdefault(directory, []).append((old, new, inode))

    def _list(self, path: str) -> None:
        if path:
            self._below.setdefault(parent_of(path), set()).add(path.rpartition("/")[2])

    def _unlist(self, path: str) -> None:
        self._below[parent_of(path)].discard(path.rpartition("/")[2])

    def _commit_names(self, directory: str, count: int) -> None:
        """Put the first changes of a directory on the media."""
        changes = self._changes.get(directory, [])
        for old, new, inode in changes[:count]:
            if old is not None:
                self._media_names.pop(old, None)
            if new is not None and inode is not None:
                self._media_names[new] = inode
        del changes[:count]
