"""One broker per data directory: an advisory lock that ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from millstream.errors import DataDirLocked

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """The exclusive right to a data directory, held through `flock` on its file `lock`.

    The file stays behind and its contents (the owner's process id) are for people only: the kernel's lock decides, so a
    process that was killed leaves nothing to clean up.
    """

    def __init__(self, path: Path) -> None:
        self._directory = path
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock, or raise DataDirLocked, naming the process that has it.  The directory must exist."""
        assert self._fd < 0, "the lock is held already"
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise DataDirLocked(f"{self._directory} is used by another broker (process {owner})") from None
        except BaseException:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def _open(self) -> int:
        path, flags = self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | os.O_EXCL, 0o640)
        except FileExistsError:
            return os.open(path, flags, 0o640)
        if os.geteuid() == 0:
            # Root looks at the files of a broker, which would not get at its own lock afterwards.
            owner = os.stat(self._directory)
            with suppress(OSError):
                os.fchown(fd, owner.st_uid, owner.st_gid)
        return fd

    def release(self) -> None:
        """Give the lock up; fine when it is not held."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
