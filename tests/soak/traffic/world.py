"""What every worker is told: where the broker is, and how fast to go."""

from __future__ import annotations

import json
import random
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from tests.soak.ledger import Ledger

__all__ = ["Worker", "World"]


@dataclass(frozen=True)
class World:
    """Written down once, for all workers."""

    folder: str
    seed: int
    #: Addresses of the proxy's doors.
    native: str
    http: str
    mqtt: str
    #: How many times a second each producer sends something.
    pace: float = 5.0
    #: How long members of a group may be silent.
    session_ms: int = 3000

    def save(self) -> None:
        Path(self.folder, "world.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / "world.json").read_text()))

    @property
    def ledgers(self) -> Path:
        return Path(self.folder, "ledgers")


class Worker:
    """One process: its name, its ledger, and whether it is told to end."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.ledger = Ledger(world.ledgers / f"{name}.tsv")
        self.rng = random.Random(f"{world.seed} {name}")
        self.over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.over.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever has started all of this

    def pause(self, times: float = 1.0) -> bool:
        """Wait for the next turn; True when it is over."""
        return self.over.wait(times * self.rng.uniform(0.5, 1.5) / self.world.pace)
