"""Offsets that a power cut gave back: what was remembered about their old messages must not meet their new ones.

Under fsync `interval` and `never` a message can be delivered and settled before it is on disk.  A power cut may take
the message and leave the settle, which is in another file.  The next message gets the same offset, and would be taken
for settled.  So before anything is appended to a partition, its journal is told where the log ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from millstream.broker.journal import EntityFact, Fact, Journal
from millstream.queues.facts import CUT, START, cut_fact, end_of

__all__ = ["forget_lost"]

_log = structlog.get_logger("millstream.journal")

_QUEUES: Final = "queue/"
_BURIALS: Final = "burials/"
_LANES: Final = "lanes"


def forget_lost(journal: Journal, end: int) -> None:
    """Take back what an earlier process said about offsets that are not in the log any more."""
    lost: list[EntityFact] = []
    for entity, facts in journal.unclaimed().items():
        is_queue, is_burials = entity.startswith(_QUEUES), entity.startswith(_BURIALS)
        if (is_queue and _end_of_all(facts) > end) or (is_burials and any(_owed_until(fact) > end for fact in facts)):
            lost.append((entity, cut_fact(end)))
        elif entity == _LANES and facts.last[1] > end:
            lost.append((entity, ["seen", end]))
    if lost:
        _log.warning(
            "the log lost its end; what was settled there is forgotten", journal=journal.partition.log.directory
        )
        journal.amend(lost)


def _end_of_all(facts: Iterable[Fact]) -> int:
    """How far the facts of a queue reach, all in all."""
    end = 0
    for fact in facts:
        its = end_of(fact)
        end = its if fact[0] == START else min(end, its) if fact[0] == CUT else max(end, its)
    return end


def _owed_until(fact: Fact) -> int:
    return int(fact[2]) + int.from_bytes(fact[3], "little").bit_length() if fact[0] == "owed" else 0
