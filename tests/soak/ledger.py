"""What each worker sent, was told and saw: one file per worker, written line by line.

A line is in the file before the worker does the next thing.  So whatever kills a worker, it leaves behind everything
that it was told, and the audit can hold the broker to it.  All processes of a machine share the clock of `at_s`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ledger", "Note", "read_ledger", "read_ledgers"]


class Note(NamedTuple):
    """One line.  `where` is a topic, or a topic and its group; `first` and `last` are numbers or offsets."""

    at_s: float
    what: str
    where: str
    name: str
    first: int
    last: int
    more: str = ""


class Ledger:
    """Appends lines to a file; whole lines, or none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, where: str, name: str, first: int = 0, last: int = -1, more: str = "") -> None:
        """`last` is `first` unless it is given."""
        self.note_all(what, where, [(name, first, first if last < first else last, more)])

    def note_all(self, what: str, where: str, entries: Iterable[tuple[str, int, int, str]]) -> None:
        now_s = time.monotonic()
        lines = [
            f"{now_s:.6f}\t{what}\t{where}\t{name}\t{first}\t{last}\t{more}\n" for name, first, last, more in entries
        ]
        if lines:
            os.write(self._file, "".join(lines).encode())


def read_ledger(path: Path) -> Iterator[Note]:
    """The whole lines of a file."""
    if not path.exists():
        return
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                at_s, what, where, name, first, last, more = line[:-1].split("\t")
                yield Note(float(at_s), what, where, name, int(first), int(last), more)


def read_ledgers(folder: Path, kind: str) -> list[Note]:
    """The lines of all workers of a kind, in the order in which they were written."""
    return sorted(note for path in folder.glob(f"{kind}-*.tsv") for note in read_ledger(path))
