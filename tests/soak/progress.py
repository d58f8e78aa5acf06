"""How far a soak is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from tests.soak.run import Soak

__all__ = ["Progress"]

#: Between two plain lines.
LINES_S: Final = 30.0


class Progress:
    """Shows a run for as long as it is entered."""

    def __init__(self, run: Soak, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console()
        self._over = threading.Event()
        self._live: Live | None = None
        self._thread = threading.Thread(target=self._say_lines, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()

    # --- for programs --------------------------------------------------------------------------------------------

    def _say_lines(self) -> None:
        while not self._over.wait(LINES_S):
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _line(self) -> str:
        run = self._run
        passed_s = time.monotonic() - run.begin_s
        last = f", last: {run.faults[-1].text}" if run.faults else ""
        memory = f", broker {run.samples[-1].resident_mb:.0f} MB" if run.samples else ""
        return (
            f"{passed_s:5.0f} of {run.seconds:.0f} s ({run.phase}): {run.tally.total('confirmed'):,} confirmed, "
            f"{run.tally.total('received'):,} received{memory}, {len(run.faults)} faults{last}"
            + (f", {len(run.findings)} FINDINGS" if run.findings else "")
        )

    # --- for people ----------------------------------------------------------------------------------------------

    def _table(self) -> RenderableType:
        run = self._run
        passed_s = min(max(time.monotonic() - run.begin_s, 0), run.seconds)
        traffic = Table(title=f"soak, seed {run.seed}: {passed_s:.0f} of {run.seconds:.0f} s, {run.phase}", expand=True)
        traffic.add_column("traffic")
        traffic.add_column("confirmed", justify="right")
        traffic.add_column("received", justify="right")
        traffic.add_column("faults")
        traffic.add_column("", justify="right")
        counts = dict(run.tally.counts)
        kinds = sorted({kind for kind, _ in counts})
        faults = Counter(fault.kind for fault in list(run.faults)).most_common()
        for at in range(max(len(kinds), len(faults))):
            kind = kinds[at] if at < len(kinds) else ""
            words = [kind, *(f"{counts[kind, what]:,}" if (kind, what) in counts else "" for what in _WHATS)]
            traffic.add_row(*words, *((faults[at][0], str(faults[at][1])) if at < len(faults) else ("", "")))
        last = run.faults[-1].text if run.faults else "none yet"
        memory = f"{run.samples[-1].resident_mb:.0f} MB" if run.samples else "?"
        state = f"broker {memory}, start {run.broker.starts}; last fault: {last}; findings: {len(run.findings)}"
        return Group(traffic, state, ProgressBar(total=run.seconds, completed=passed_s))


_WHATS: Final = ("confirmed", "received")
