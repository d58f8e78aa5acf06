"""How cost grows: `python -m benchmarks.scale [--quick] [--runs N] [--only topics ...] [--publish]`.

Topics, partitions, connections, groups, backlog and the size of messages are made larger and larger, and what one
batch, message, delivery or request costs is measured at each point: processor time of the broker and of the client,
memory, and time where somebody waits.  What costs more although the work is the same is marked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.machine import describe_machine, settle_machine
from benchmarks.scale.axis import Axis, Effort
from benchmarks.scale.backlog import BACKLOG
from benchmarks.scale.connections import CONNECTIONS
from benchmarks.scale.groups import GROUPS
from benchmarks.scale.report import Measured, print_tables, publish, write
from benchmarks.scale.sizes import SIZES
from benchmarks.scale.topics import PARTITIONS, TOPICS
from benchmarks.servers import end_on_sigterm

_AXES = (TOPICS, PARTITIONS, CONNECTIONS, GROUPS, BACKLOG, SIZES)
_RESULTS = Path(__file__).resolve().parent.parent / "results"
_PAGE = Path(__file__).resolve().parent.parent.parent / "docs/scale.md"
_QUICK = Effort(requests=1_000, messages=50_000, payload_bytes=30_000_000, rounds=100)


def main() -> None:
    end_on_sigterm()
    options = _parse_options()
    console = Console() if sys.stdout.isatty() else Console(width=200)
    axes = [axis for axis in _AXES if axis.name in options.only]
    options.data.mkdir(parents=True, exist_ok=True)
    steps = [(axis, point) for _ in range(options.runs) for axis in axes for point in _points(axis, options)]
    measured = Measured(describe_machine(options.data), options.runs, axes)
    with _progress(console) as progress:
        task = progress.add_task("", total=len(steps))
        for axis, point in steps:
            progress.update(task, description=f"{axis.name} {point:,}")
            settle_machine()
            with tempfile.TemporaryDirectory(prefix="data-", dir=options.data) as data:
                measured.add(axis, point, axis.measure(Path(data), point, _QUICK if options.quick else Effort()))
            write(measured, options.output)  # what is there, should the run be ended early
            progress.advance(task)
    print_tables(measured, console)
    console.print(f"written to {options.output}")
    if options.publish:
        publish(options.output, _PAGE)


def _points(axis: Axis, options: argparse.Namespace) -> list[int]:
    return list(options.points or (axis.quick_points if options.quick else axis.points))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _parse_options() -> argparse.Namespace:
    names = [axis.name for axis in _AXES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points and less of everything, once")
    parser.add_argument("--runs", type=int, help="how often each point is measured; the median counts (default 3)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these axes")
    parser.add_argument("--points", type=int, nargs="+", help="these points instead of those of the axes")
    parser.add_argument("--data", type=Path, default=_RESULTS, help="where the brokers keep their data meanwhile")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="where table, JSON and plot go")
    parser.add_argument("--publish", action="store_true", help="also copy this complete run into docs/scale.md")
    options = parser.parse_args()
    if options.publish and (options.quick or options.points or options.only != names):
        parser.error("the page shows complete runs: --publish goes with no other choice than --runs")
    options.runs = options.runs or (1 if options.quick else 3)
    return options


if __name__ == "__main__":
    main()
