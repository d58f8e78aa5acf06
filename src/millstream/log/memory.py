"""A storage without a disk: for ephemeral topics, which promise nothing beyond the process's life, and for tests."""

from __future__ import annotations

from millstream.log.storage import Directory, File, parent_of
from millstream.records import Buffer

__all__ = ["MemoryFile", "MemoryStorage"]


class MemoryFile:
    """A handle on contents that live as long as a name or a handle refers to them."""

    __slots__ = ("_contents", "path")

    def __init__(self, contents: bytearray, path: str) -> None:
        self._contents = contents
        self.path = path

    def write(self, data: Buffer, position: int) -> None:
        contents = self._contents
        if position > len(contents):
            contents.extend(bytes(position - len(contents)))
        contents[position : position + len(data)] = data

    def read(self, position: int, size: int) -> bytes:
        # Copies twice, on purpose: while a memoryview exists the contents cannot grow, and an append on another
        # thread would fail.
        return bytes(self._contents[position : position + size])

    def sync(self) -> None:
        """Nothing to do: memory is all there is."""

    def truncate(self, size: int) -> None:
        contents = self._contents
        if size <= len(contents):
            del contents[size:]
        else:
            contents.extend(bytes(size - len(contents)))

    def size(self) -> int:
        return len(self._contents)

    def close(self) -> None:
        """Nothing to do: the contents stay with their name."""


class MemoryDirectory:
    """A handle on names that live as long as the process."""

    def sync(self) -> None:
        """Nothing to do: memory is all there is."""

    def close(self) -> None:
        """Nothing to do: nothing is open."""


class MemoryStorage:
    """Files in a dictionary; directories exist so that mistakes show that a disk would show."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        #: What each directory holds, by name.
        self._directories: dict[str, set[str]] = {"": set()}

    def open(self, path: str, *, create: bool = False) -> File:
        contents = self._files.get(path)
        if contents is None:
            if not create:
                raise FileNotFoundError(path)
            contents = self._put(path, bytearray())
        return MemoryFile(contents, path)

    def names(self, directory: str) -> list[str]:
        return sorted(self._directories.get(directory, ()))

    def size(self, path: str) -> int:
        return len(self._contents(path))

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._directories

    def make_directory(self, *paths: str) -> None:
        for path in paths:
            if path not in self._directories:
                self.make_directory(parent_of(path))
                self._directories[parent_of(path)].add(_name_of(path))
                self._directories[path] = set()

    def rename(self, old: str, new: str) -> None:
        self._put(new, self._contents(old))
        self.remove(old)

    def remove(self, path: str) -> None:
        self._contents(path)
        del self._files[path]
        self._directories[parent_of(path)].discard(_name_of(path))

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - there are none
        return False

    def remove_tree(self, directory: str) -> None:
        if directory in self._directories:
            self._directories[parent_of(directory)].discard(_name_of(directory))
            self._forget(directory)

    def sync_directory(self, directory: str) -> None:
        if directory not in self._directories:
            raise FileNotFoundError(directory)

    def open_directory(self, directory: str) -> Directory:
        self.sync_directory(directory)
        return MemoryDirectory()

    def replace(self, path: str, data: bytes) -> None:
        self._put(path, bytearray(data))

    def read_all(self, path: str) -> bytes:
        return bytes(self._contents(path))

    def free_bytes(self) -> int:
        return 1 << 62  # the machine's memory is watched by the machine

    def _contents(self, path: str) -> bytearray:
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _put(self, path: str, contents: bytearray) -> bytearray:
        directory = self._directories.get(parent_of(path))
        if directory is None:
            raise FileNotFoundError(path)
        directory.add(_name_of(path))
        self._files[path] = contents
        return contents

    def _forget(self, path: str) -> None:
        for name in self._directories.pop(path, ()):
            self._forget(f"{path}/{name}")
        self._files.pop(path, None)


def _name_of(path: str) -> str:
    return path.rpartition("/")[2]
