"""What is stored: all that was confirmed, once, in the order of its producer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from tests.soak.audit.evidence import SetClock, Stored
from tests.soak.audit.verdict import Verdict

#: How long a message that is due may take to its log on a busy machine.
_ON_ITS_WAY_MS: Final = 10_000
#: How much later the broker may notice that its clock was set.
_LOOK_MS: Final = 200

__all__ = ["check_copies", "check_due", "check_order", "check_stored"]


def check_stored(
    verdict: Verdict, topic: str, stored: Iterable[str], *, sent: Collection[str], sure: Collection[str]
) -> None:
    """What was confirmed is there, what was not may be; nothing is there twice, and nothing that nobody sent."""
    counts = Counter(stored)
    verdict.counts[f"{topic}: confirmed"] += len(sure)
    verdict.counts[f"{topic}: stored"] += counts.total()
    verdict.counts[f"{topic}: stored, and never confirmed"] += len(counts.keys() - sure)
    verdict.find("lost", f"{topic}: confirmed and not stored", sorted(set(sure) - counts.keys()))
    verdict.find("twice", f"{topic}: stored more than once", [it for it, count in counts.items() if count > 1])
    verdict.find("made up", f"{topic}: stored, and nobody sent it", sorted(counts.keys() - set(sent)))


def check_order(verdict: Verdict, topic: str, stored: Sequence[Stored]) -> None:
    """The numbers of a producer rise for each of its keys."""
    last: dict[tuple[str, str], int] = {}
    wrong = []
    for message in stored:
        name, number = message.value.split(":")[:2]
        if int(number) <= last.get((name, message.key), -1):
            wrong.append(f"{message.value} (key {message.key}) behind {last[name, message.key]}")
        last[name, message.key] = int(number)
    verdict.find("order", f"{topic}: out of order", wrong)


def check_due(verdict: Verdict, topic: str, stored: Iterable[Stored], clocks: Sequence[SetClock] = ()) -> None:
    """What was scheduled was stored when it was due by the broker's clock, and not before."""
    scheduled = [(message, int(message.value.split(":")[3])) for message in stored]
    verdict.counts[f"{topic}: scheduled and delivered"] += sum(due > 0 for _, due in scheduled)
    early = []
    for message, due_ms in scheduled:
        if message.append_ms >= due_ms:
            continue
        if any(_was_due(clock, due_ms) for clock in clocks):
            verdict.explained[f"{topic}: on its way while the clock was set back", "clock"] += 1
        else:
            early.append(f"{message.value} at {message.append_ms}")
    verdict.find("early", f"{topic}: delivered before its time", early)


def _was_due(clock: SetClock, due_ms: int) -> bool:
    """Whether it became due shortly before the clock was set back; its time of storing is by the clock afterwards."""
    by_then_ms = clock.at_ms + clock.before_ms - due_ms
    return clock.after_ms < clock.before_ms and -_LOOK_MS <= by_then_ms <= _ON_ITS_WAY_MS


def check_copies(verdict: Verdict, original: Iterable[Stored], copies: Iterable[Stored]) -> None:
    """Spark's sink writes each message exactly once."""
    wanted = Counter((message.key, message.value) for message in original)
    found = Counter((message.key, message.value) for message in copies)
    verdict.counts["copies: written by Spark"] += found.total()
    verdict.find("lost", "copies: not copied by Spark", sorted(wanted - found))
    verdict.find("twice", "copies: copied by Spark more than once", sorted(found - wanted))
