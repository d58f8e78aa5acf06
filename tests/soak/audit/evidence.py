"""What an audit looks at: the ledgers, what is stored, and when something was made to fail."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import millstream
from millstream.errors import TopicNotFound
from tests.queue_kills import Entry, read_diary
from tests.soak.faults import Happened
from tests.soak.ledger import Note, read_ledger, read_ledgers

__all__ = ["Evidence", "SetClock", "Stored", "read_grants", "read_removals", "read_stored"]


class Stored(NamedTuple):
    """A message as it lies in a log."""

    partition: int
    offset: int
    key: str
    value: str
    append_ms: int = 0
    headers: dict[str, str] = {}  # noqa: RUF012


class SetClock(NamedTuple):
    """When the broker's clock was set, in the true time; and by how much it was wrong before, and after."""

    at_ms: int
    before_ms: int
    after_ms: int


def read_removals(log: Path) -> list[Happened]:
    """When the broker gave up on members of groups: a machine that is busy enough can do that without a fault."""
    monotonic_s = time.time() - time.monotonic()
    found = []
    for line in log.read_text().splitlines():
        if '"member removed"' in line:
            entry = json.loads(line)
            at_s = datetime.fromisoformat(entry["time"]).timestamp() - monotonic_s
            found.append(Happened("member removed", entry["group"], entry["reason"], at_s, at_s))
    return found


def read_grants(path: Path) -> dict[str, float]:
    """When each lease was granted (see tests/soak/broker.py); of two that chance gave one name, the later."""
    found: dict[str, float] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            at_s, lease = line.split()
            found[lease] = max(float(at_s), found.get(lease, 0.0))
    return found


@dataclass
class Evidence:
    """Everything there is about a run."""

    ledgers: Path
    #: Topics by name, each partition in its order.
    stored: dict[str, list[Stored]]
    faults: Sequence[Happened] = field(default_factory=list)
    clocks: Sequence[SetClock] = field(default_factory=list)
    #: When the broker granted which lease, by its own account.
    grants: Mapping[str, float] = field(default_factory=dict)

    def notes(self, kind: str) -> list[Note]:
        return read_ledgers(self.ledgers, kind)

    def session(self, name: str) -> list[Note]:
        """Of a client of MQTT."""
        return list(read_ledger(self.ledgers / f"mqtt-{name}.tsv"))

    def diaries(self) -> list[Entry]:
        """Of the consumers of queues."""
        return sorted(entry for path in self.ledgers.glob("*.diary") for entry in read_diary(path))

    def ids(self, kind: str, what: str) -> set[str]:
        """Names and numbers of what workers of a kind noted."""
        return {
            f"{note.name}:{number}"
            for note in self.notes(kind)
            if note.what == what
            for number in range(note.first, note.last + 1)
        }

    def values(self, kind: str, what: str) -> set[str]:
        """As `ids`, where the name says everything."""
        return {note.name for note in self.notes(kind) if note.what == what}


def read_stored(client: millstream.Client, topic: str) -> list[Stored]:
    """A whole topic, or what can be read of it: the audit misses the rest."""
    try:
        wanted = sum(client.offsets(topic).values())
    except TopicNotFound:  # nobody ever sent anything there
        wanted = 0
    found: list[Stored] = []
    if not wanted:
        return found
    with client.stream(topic, start="earliest", timeout_s=20, on_damage="skip") as stream:
        for messages in stream.batches():
            for message in messages:
                found.append(
                    Stored(
                        message.partition,
                        message.offset,
                        "" if message.key is None else bytes(message.key).decode(),
                        message.text,
                        round(message.append_time.timestamp() * 1000),
                        dict(message.headers),
                    )
                )
            if len(found) >= wanted:
                break
    return found
