"""Stream groups: each message was seen by a member, in the order of its partition, and again only after a fault."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from tests.soak.audit.verdict import Verdict
from tests.soak.ledger import Note

__all__ = ["check_group"]


def check_group(verdict: Verdict, group: str, notes: Iterable[Note], ends: Mapping[int, int]) -> None:
    """`notes` in the order of time; `ends` says how many messages each partition has."""
    seen_s = {partition: array("d", bytes(8 * end)) for partition, end in ends.items()}
    high = dict.fromkeys(ends, 0)
    skipped, unexplained, beyond = [], [], []
    for note in notes:
        if note.what != "saw":
            continue
        partition = int(note.more)
        times_s = seen_s.get(partition)
        if times_s is None or note.last >= len(times_s):
            beyond.append(f"{partition}/{note.first}-{note.last}")
            continue
        verdict.counts[f"{group}: deliveries"] += note.last - note.first + 1
        if note.first > high[partition]:
            skipped.append(f"{partition}/{note.first} by {note.name} before {partition}/{high[partition]}")
        high[partition] = max(high[partition], note.last + 1)
        again = [offset for offset in range(note.first, note.last + 1) if times_s[offset]]
        if again:
            before_s = max(times_s[offset] for offset in again)
            if not verdict.explain(f"{group}: read again", group, "native", before_s, note.at_s, len(again)):
                unexplained.append(f"{partition}/{again[0]}-{again[-1]} by {note.name}")
        for offset in range(note.first, note.last + 1):
            times_s[offset] = note.at_s
    missing = [f"{at}/{offset}" for at, times_s in seen_s.items() for offset, at_s in enumerate(times_s) if not at_s]
    verdict.find("lost", f"{group}: never seen by a member", missing)
    verdict.find("order", f"{group}: seen before what lies in front of it", skipped)
    verdict.find("again", f"{group}: read again for no reason", unexplained)
    verdict.find("made up", f"{group}: seen, and not in the log", beyond)
