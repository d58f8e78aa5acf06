"""What people and programs see of a soak while it runs."""

from __future__ import annotations

import time
from collections import Counter
from io import StringIO
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from tests.soak.faults import Happened
from tests.soak.progress import Progress
from tests.soak.run import Sample


def a_run() -> Any:
    counts = Counter({("orders", "confirmed"): 12_345, ("readers", "received"): 12_000})
    return SimpleNamespace(
        seed=7,
        seconds=600.0,
        begin_s=time.monotonic() - 60,
        phase="rough",
        tally=SimpleNamespace(
            counts=counts, total=lambda what: sum(n for (_, each), n in counts.items() if each == what)
        ),
        faults=[Happened("kill broker", "", "kill broker", 1, 2), Happened("clock", "", "clock -20 s", 3, 3)],
        samples=[Sample(1, 1, 1, 81.4, 0, 0, 0, 0)],
        findings=["the broker ended by itself, with -11"],
        broker=SimpleNamespace(starts=3),
    )


def test_a_line_says_how_far_it_is_what_happened_last_and_what_is_wrong() -> None:
    line = Progress(a_run())._line()
    assert "60 of 600 s (rough): 12,345 confirmed, 12,000 received, broker 81 MB, 2 faults" in line
    assert "last: clock -20 s" in line
    assert "1 FINDINGS" in line


def test_a_terminal_shows_traffic_beside_faults() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100, color_system=None)
    console.print(Progress(a_run(), console)._table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "soak, seed 7: 60 of 600 s, rough" in shown
    assert "orders" in shown
    assert "12,345" in shown
    assert "kill broker" in shown
    assert "findings: 1" in shown
