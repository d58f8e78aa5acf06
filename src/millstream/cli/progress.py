"""A progress bar, or a word, for work long enough to wonder about; silent in pipes and for short work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from millstream.cli.output import stderr

__all__ = ["Meter", "told_of_a_wait"]

_WAIT_S: Final = 3.0


class Meter:
    """Shows how far something has come.  `total` is None when nobody knows how much there will be.

    Drawn on standard error and gone when the work is done.  The bar redraws itself ten times a second from its own
    thread, so `advance` only adds up numbers; still, call it per batch and not per message.
    """

    def __init__(self, what: str, total: int | None, *, shown: bool = True, console: Console = stderr) -> None:
        columns = (
            (BarColumn(bar_width=30), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
            if total is not None
            else (SpinnerColumn(), TimeElapsedColumn())
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            *columns,
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task: TaskID = self._progress.add_task(what, total=total, note="")

    def advance(self, amount: int, note: str | None = None) -> None:
        if note is None:
            self._progress.advance(self._task, amount)
        else:
            self._progress.update(self._task, advance=amount, note=note)

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


@contextmanager
def told_of_a_wait(sentence: str, *, console: Console = stderr, after_s: float = _WAIT_S) -> Iterator[None]:
    """Whoever sits at a terminal reads the sentence if the block is not over in time."""
    timer = threading.Timer(after_s, lambda: console.print(sentence, style="dim", markup=False))
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
