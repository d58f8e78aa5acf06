"""`millstream serve`, on a disk that can be full or fail and a clock that can be set.

`python -m tests.soak.broker CONTROL ARGUMENTS...`: CONTROL is a directory, in which files say what is wrong.

* `full`: as long as it is there, what makes a file longer fails with ENOSPC, after some of it was written;
* `fail-sync`: the next sync of a file whose path contains the text in it fails with EIO; then it is removed;
* `clock`: by how many seconds the clock is wrong.

Whoever wants them puts them there, before or while the broker runs: a broker that is killed forgets nothing.  And the
broker itself writes down, line by line and before anybody hears of it, which lease of a queue it has granted when:
`grants`.  What a consumer hands out later than others expect can then be told from what the broker did.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from millstream.broker.queues import part
from millstream.cli.main import main
from millstream.log.holding import Holding
from millstream.log.storage import DiskFile, DiskStorage, File
from millstream.queues.ledger import Ledger
from millstream.queues.records import Delivery
from millstream.records import Buffer
from millstream.server import lifecycle

#: How often it is looked whether the clock was set.
_LOOK_S: Final = 0.05


class Control:
    """The directory, seen from the broker."""

    def __init__(self, directory: Path) -> None:
        self._full = str(directory / "full")
        self._fail_sync = directory / "fail-sync"
        self._clock = directory / "clock"
        self._ahead_us = 0
        self._looked_s = 0.0

    def is_full(self) -> bool:
        return os.path.exists(self._full)

    def fails_sync(self, path: str) -> bool:
        """Whether this sync is the one; nobody else is then."""
        try:
            fails = self._fail_sync.read_text() in path
            if fails:
                self._fail_sync.rename(self._fail_sync.with_name("failed-sync"))
        except FileNotFoundError:
            return False
        return fails

    def ahead_us(self) -> int:
        now_s = time.monotonic()
        if now_s >= self._looked_s + _LOOK_S:
            self._looked_s = now_s
            with suppress(FileNotFoundError):  # nobody has set it yet
                self._ahead_us = round(float(self._clock.read_text()) * 1_000_000)
        return self._ahead_us


class FaultyFile(DiskFile):
    """A file of a disk that may be full, or fail."""

    __slots__ = ("_control",)

    def __init__(self, fd: int, path: str, holding: Holding, control: Control) -> None:
        super().__init__(fd, path, holding)
        self._control = control

    def write(self, data: Buffer, position: int) -> None:
        if self._control.is_full() and position + len(data) > self.size():
            some = memoryview(data)[: random.randrange(len(data) + 1)]
            if some:
                super().write(some, position)
            raise OSError(errno.ENOSPC, "No space left on device", self.path)
        super().write(data, position)

    def sync(self) -> None:
        if self._control.fails_sync(self.path):
            raise OSError(errno.EIO, "Input/output error", self.path)
        super().sync()


class FaultyStorage(DiskStorage):
    """A disk of this machine that does what the control directory says."""

    def __init__(self, root: Path, control: Control) -> None:
        super().__init__(root)
        self._control = control

    def open(self, path: str, *, create: bool = False) -> File:
        if create and self._control.is_full() and not self.exists(path):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return FaultyFile(os.open(self._at(path), flags, 0o640), path, self.holding, self._control)

    def free_bytes(self) -> int:
        return 0 if self._control.is_full() else super().free_bytes()


class WrongClock:
    """The machine's clock, as somebody has set it.  Setting it changes nothing about how time passes."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._control.ahead_us()

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    elapsed_ms = monotonic_ms


class Grants:
    """Which lease was granted when, by the clock that all processes of this machine share."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "grants", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)

    def note(self, delivery: Delivery) -> Delivery:
        if delivery.leases:
            now_s = time.monotonic()
            os.write(self._file, "".join(f"{now_s}\t{lease.nonce:016x}\n" for lease in delivery.leases).encode())
        return delivery


def noted(grants: Grants) -> type[Ledger]:
    """Ledgers that write down what they grant."""

    class NotedLedger(Ledger):
        def lease(self, *args: Any, **options: Any) -> Delivery:
            return grants.note(super().lease(*args, **options))

        def retake(self, *args: Any, **options: Any) -> Delivery:
            return grants.note(super().retake(*args, **options))

    return NotedLedger


def serve(directory: Path, arguments: list[str]) -> None:
    control = Control(directory)
    # Everything else is as users run it.
    vars(lifecycle).update(
        DiskStorage=lambda root: FaultyStorage(root, control), SystemClock=lambda: WrongClock(control)
    )
    vars(part).update(Ledger=noted(Grants(directory)))
    sys.argv = ["millstream", "serve", *arguments]
    main()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
