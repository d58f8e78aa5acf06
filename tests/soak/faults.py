"""Which fault comes when: chosen from a seed, so that the same seed means the same faults.

Faults come from a deck: every kind occurs before the deck is shuffled again.  A run has *rough* times, in which
anything happens, and *steady* times, in which everything happens that a broker can live through: only a process that
lives for a while can show whether its memory grows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "Fault", "Happened", "Plan"]

#: What happens, and how often in one deck.
KINDS: Final = {
    "kill broker": 4,
    "kill consumer": 4,
    "kill producer": 3,
    "stop broker": 2,
    "stop consumer": 3,
    "full disk": 2,
    "failed sync": 3,
    "clock": 3,
    "cut connections": 4,
    "silent network": 2,
}
SPARK_KINDS: Final = {"kill Spark worker": 2, "kill Spark driver": 1}
#: After these the broker is another process than before.
ENDS_BROKER: Final = frozenset({"kill broker", "failed sync"})
PRODUCERS: Final = ("orders", "jobs", "later", "web", "sensors")
CONSUMERS: Final = ("readers", "sync", "keyed", "pages", "screens")
DOORS: Final = ("native", "http", "mqtt")
#: Whose sync fails: the files whose paths contain this.
SYNCS: Final = (
    "/orders/",
    "/jobs/",
    ".state/",
    ".schedules/",
    "/web/",
    "state/mqtt",
    "state/groups",
    "state/stages",
    "/",
)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: whom it happens to, for how long, and how long there is quiet before it."""

    kind: str
    victim: str = ""
    seconds: float = 0.0
    pause_s: float = 0.0

    def __str__(self) -> str:
        words = [self.kind, self.victim, f"for {self.seconds:.1f} s" if self.seconds and self.kind != "clock" else ""]
        if self.kind == "clock":
            words[1] = f"{self.seconds:+.0f} s"
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Happened:
    """When a fault began and was over, on the clock of the ledgers."""

    kind: str
    victim: str
    text: str
    begin_s: float
    end_s: float


class Plan:
    """The faults of a run, one after the other."""

    def __init__(self, seed: int, slots: Sequence[str], *, pause_s: float, spark: bool = False) -> None:
        """`slots` are the workers by name, such as `orders-0`; `pause_s` is how long it is quiet, on average."""
        self._rng = random.Random(seed)
        self._slots = slots
        self._pause_s = pause_s
        self._kinds = KINDS | (SPARK_KINDS if spark else {})

    def deal(self, *, brief: bool = False) -> Iterator[Fault]:
        """One deck; a brief one has each kind once, and short faults."""
        deck = list(self._kinds) if brief else [kind for kind, count in self._kinds.items() for _ in range(count)]
        self._rng.shuffle(deck)
        for kind in deck:
            yield self._fault(kind, 0.3 if brief else 1.0)

    def _fault(self, kind: str, scale: float) -> Fault:
        rng = self._rng
        pause_s = self._pause_s * rng.uniform(0.3, 1.7)
        victim, seconds = "", 0.0
        match kind:
            case "kill consumer" | "stop consumer":
                victim = self._choose(CONSUMERS)
                seconds = rng.choice((1.0, 3.0, 9.0)) * scale if kind == "stop consumer" else 0.0
            case "kill producer":
                victim = self._choose(PRODUCERS)
            case "stop broker":
                seconds = rng.uniform(0.5, 5.0) * scale
            case "full disk":
                seconds = rng.uniform(1.0, 6.0) * scale
            case "failed sync":
                victim = rng.choice(SYNCS) if scale == 1.0 else SYNCS[-1]
            case "clock":
                seconds = rng.choice((-1, 1)) * rng.choice((2.0, 20.0, 60.0)) * scale
            case "cut connections":
                victim = rng.choice(DOORS)
            case "silent network":
                seconds = rng.uniform(0.5, 4.0) * scale
        return Fault(kind, victim, seconds, pause_s)

    def _choose(self, kinds: Sequence[str]) -> str:
        return self._rng.choice([slot for slot in self._slots if slot.partition("-")[0] in kinds])
