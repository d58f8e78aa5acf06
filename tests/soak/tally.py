"""How much was sent, confirmed and received so far, read from the ledgers while they are written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

__all__ = ["Tally"]

#: What a line is counted as, by its second word; of a diary (see tests/queue_kills.py) by its fourth.
_COUNTED: Final = {
    "sure": "confirmed",
    "received": "confirmed",
    "saw": "received",
    "got": "received",
    "got1": "received",
    "got2": "received",
}


class Tally:
    """Reads on from where it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: Counter[Path] = Counter()
        #: By the kind of worker and what it did.
        self.counts: Counter[tuple[str, str]] = Counter()

    def look(self) -> None:
        for path in self._folder.glob("*"):
            with path.open("rb") as file:
                file.seek(self._positions[path])
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._positions[path] += len(data)
            kind = path.name.partition("-")[0]
            is_diary = path.suffix == ".diary"
            for line in data.decode().splitlines():
                words = line.split("\t")
                if is_diary:
                    if words[3] == "got":
                        self.counts[kind, "received"] += 1
                elif (what := _COUNTED.get(words[1])) is not None and int(words[4]) >= 0:
                    # Of what was leased the line says where it lies, of everything else from where to where.
                    self.counts[kind, what] += 1 if words[1] == "got" else int(words[5]) - int(words[4]) + 1

    def total(self, what: str) -> int:
        return sum(count for (_, each), count in self.counts.items() if each == what)
