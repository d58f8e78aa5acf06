"""A storage without a disk: for ephemeral topics, which promise nothing beyond the process's life, and for tests."""

from __future__ import annotations

from millstream.log.storage import File, parent_of
from millstream.records import Buffer

__all__ = ["MemoryStorage"]


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


class MemoryStorage:
    """Files in a dictionary; directories exist so that mistakes show that a disk would show."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._directories: set[str] = {""}

    def open(self, path: str, *, create: bool = False) -> File:
        contents = self._files.get(path)
        if contents is None:
            if not create or parent_of(path) not in self._directories:
                raise FileNotFoundError(path)
            contents = self._files[path] = bytearray()
        return MemoryFile(contents, path)

    def names(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory else ""
        below = (path[len(prefix) :] for path in (*self._files, *self._directories) if path.startswith(prefix))
        return sorted(name for name in below if name and "/" not in name)

    def size(self, path: str) -> int:
        return len(self._contents(path))

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._directories

    def make_directory(self, *paths: str) -> None:
        for path in paths:
            while path:
                self._directories.add(path)
                path = parent_of(path)

    def rename(self, old: str, new: str) -> None:
        self._files[new] = self._contents(old)
        del self._files[old]

    def remove(self, path: str) -> None:
        self._contents(path)
        del self._files[path]

    def remove_tree(self, directory: str) -> None:
        prefix = f"{directory}/"
        self._files = {path: data for path, data in self._files.items() if not path.startswith(prefix)}
        self._directories = {path for path in self._directories if path != directory and not path.startswith(prefix)}

    def sync_directory(self, directory: str) -> None:
        if directory not in self._directories:
            raise FileNotFoundError(directory)

    def replace(self, path: str, data: bytes) -> None:
        if parent_of(path) not in self._directories:
            raise FileNotFoundError(path)
        self._files[path] = bytearray(data)

    def read_all(self, path: str) -> bytes:
        return bytes(self._contents(path))

    def free_bytes(self) -> int:
        return 1 << 62  # the machine's memory is watched by the machine

    def _contents(self, path: str) -> bytearray:
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None
