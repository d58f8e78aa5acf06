"""What an axis is: something that grows, and what is measured at each point of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bodies import make_bodies
from benchmarks.scale.link import batch_of
from benchmarks.scale.world import Cost

__all__ = ["BATCH", "Axis", "Effort", "Figures", "each", "standard_batch"]

BATCH = 100
_BODY_BYTES = 100
_FEW = 10

#: What was measured at one point, by name.  The name ends with the unit: us (should not grow), MB and s (may grow with
#: what is there, so that the growth of each is of interest), or anything else.
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to do at each point."""

    requests: int = 5_000  # at least, so that a point takes about a second
    messages: int = 300_000
    payload_bytes: int = 200_000_000
    rounds: int = 300  # of requests that wait for one another


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    title: str
    points: tuple[int, ...]
    quick_points: tuple[int, ...]
    measure: Callable[[Path, int, Effort], Figures]


def each(what: str, cost: Cost, count: int) -> Figures:
    """Processor time of broker and client for each of so many; a few of them say nothing."""
    share = 1 / count / 1000 if count >= _FEW else math.nan
    return {f"{what}, broker us": cost.broker_ns * share, f"{what}, client us": cost.client_ns * share}


def standard_batch() -> bytes:
    return batch_of(make_bodies(BATCH, _BODY_BYTES))
