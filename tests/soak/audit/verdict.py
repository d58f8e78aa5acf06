"""What an audit found: what is wrong, what came twice and why, and how much there was of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.soak.faults import Happened

__all__ = ["Finding", "Verdict"]

#: How many of a kind are named.
_NAMED: Final = 5
#: How long a fault is felt: until everybody is connected again, and the group is complete.
AFTER_S: Final = 5.0
_OF_BROKER: Final = frozenset({"kill broker", "stop broker", "failed sync", "full disk", "clock", "silent network"})


def _concerns(fault: Happened, who: str, door: str) -> bool:
    if fault.kind == "cut connections":
        return fault.victim == door
    return fault.kind in _OF_BROKER or fault.victim.partition("-")[0] == who


@dataclass(frozen=True)
class Finding:
    """A promise that was not kept."""

    rule: str
    text: str
    count: int = 1


@dataclass
class Verdict:
    """Of one run; `faults` in the order in which they began."""

    faults: Sequence[Happened] = ()
    findings: list[Finding] = field(default_factory=list)
    #: What came more than once, by what and why.
    explained: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def find(self, rule: str, what: str, examples: Iterable[object]) -> None:
        """One finding for all of a kind; none where there are no examples."""
        found = list(examples)
        if found:
            named = ", ".join(map(str, found[:_NAMED])) + (", ..." if len(found) > _NAMED else "")
            self.findings.append(Finding(rule, f"{what}: {named}", len(found)))

    def explain(self, what: str, who: str, door: str, before_s: float, again_s: float, count: int = 1) -> bool:
        """Whether something happened between two moments to the broker, to this door or to workers of this kind."""
        for fault in reversed(self.faults):
            # A fault is felt until a little after it is over.
            if fault.begin_s <= again_s and fault.end_s + AFTER_S >= before_s and _concerns(fault, who, door):
                self.explained[what, fault.kind] += count
                return True
        return False

    def lost(self) -> int:
        return sum(finding.count for finding in self.findings if finding.rule == "lost")
