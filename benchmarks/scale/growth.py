"""Says how a figure grows along an axis, and whether that is worse than the work itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GROWN", "Growth", "growth_of"]

#: So many times the cost of the cheapest point before it: less may be noise, or the caches of the processor.
GROWN = 2.0
_SMALL_US = 1.0  # what costs less than this has no meaning of its own


@dataclass(frozen=True, slots=True)
class Growth:
    text: str
    marked: bool = False


def growth_of(name: str, points: Sequence[int], values: Sequence[float]) -> Growth:
    """`values` at `points`.  Processor time of one thing should stay what it is; memory and time to start may grow by
    a little with each thing that is there."""
    known = [(point, value) for point, value in zip(points, values, strict=True) if not math.isnan(value)]
    if len(known) < 2:
        return Growth("")
    points, values = zip(*known, strict=True)
    span = points[-1] - points[0]
    added = values[-1] - values[0]
    if name.endswith("MB"):
        return Growth(f"{added * 1e6 / span:,.1f} B each" if span >= 1e6 else f"{added * 1e3 / span:,.2f} KB each")
    if name.endswith(" s"):
        each_us = added * 1e6 / span
        return Growth(f"{each_us:,.1f} us each" if abs(each_us) >= 1 else f"{each_us * 1000:,.0f} ns each")
    if not name.endswith(("us", "us a KB")):
        return Growth("")
    if name.endswith("us a KB"):
        # The smallest messages cost what a message costs, whatever is in it; bytes are compared from there on.
        values = values[len(values) // 2 - 1 :]
    ratio = values[-1] / min(values[:-1])
    return Growth(f"{ratio:.1f}x", marked=ratio >= GROWN and values[-1] >= _SMALL_US)
