"""Spark on Millstream: `python -m benchmarks.spark [--quick] [--runs N] [--publish]`.

How fast Spark reads messages through the broker, from the broker's files and from Parquet, how fast it writes, what a
micro-batch costs, and how late a stream of 50,000 rows a second is.  One session (`local[2]`), one broker, one run; the
scans take turns, so that whatever else the machine does hits all of them.  On a busy machine look at the processor time
per row and at the shares: they depend least on what the others do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.machine import describe_machine, settle_machine
from benchmarks.servers import StartFailed, end_on_sigterm
from benchmarks.spark.cases import job, micro_batches, scan, steady_stream, write
from benchmarks.spark.report import BROKER, EXACTLY_ONCE, PARQUET, SEGMENTS, Measured, Results
from benchmarks.spark.scans import Way
from benchmarks.spark.world import World, running

_RESULTS: Final = Path(__file__).resolve().parent.parent / "results"
_PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs/benchmarks.md"
_RATE: Final = 50_000
_WAYS: Final[dict[str, Way]] = {BROKER: "broker", SEGMENTS: "segments", PARQUET: "parquet"}
#: Until the JVM has compiled what it does again and again.
_WARM_UPS: Final = 3


def main() -> None:
    end_on_sigterm()
    options = _parse_options()
    console = Console(soft_wrap=True, width=130)
    _RESULTS.mkdir(exist_ok=True)
    results = Results(
        machine=describe_machine(_RESULTS),
        versions={
            "Spark": importlib.metadata.version("pyspark"),
            "Millstream": importlib.metadata.version("millstream"),
        },
        runs=options.runs,
        rows=options.rows,
        rate=_RATE,
    )
    settle_machine()
    # On a disk, and not in the system's temporary directory, which may be memory.
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data, running(Path(data), options.rows) as world:
        _measure(world, results, options, console)
    results.print(console)
    results.write(_RESULTS)
    console.print(f"written to {_RESULTS}")
    if options.publish:
        results.publish(_RESULTS, _PAGE)


def _measure(world: World, results: Results, options: argparse.Namespace, console: Console) -> None:
    for number in range(options.runs):
        for name, way in _WAYS.items():
            rates = job(world, way, options.scans)
            console.print(f"{number + 1:>3} {name:50} {' '.join(f'{rate / 1e6:.2f}' for rate in rates)} M rows/s")
            results.jobs.setdefault(name, []).append(rates)
    for number in range(-_WARM_UPS if not options.quick else -1, options.runs):
        works: dict[str, Callable[[], Measured]] = {
            **{name: partial(scan, world, way) for name, way in _WAYS.items()},
            EXACTLY_ONCE: partial(write, world, options.written, number, "exactly_once"),
            "Write, at least once": partial(write, world, options.written, number, "at_least_once"),
            "Write to nowhere, for comparison": partial(write, world, options.written, number, None),
        }
        for name, work in works.items():
            measured = work()
            console.print(f"{number + 1:>3} {name:50} {measured.per_second / 1e6:.2f} M rows/s")
            if number >= 0:
                results.add(name, measured)
    for number in range(1 if options.quick else options.runs):
        results.micro_batches += micro_batches(world, options.micro_batches, number)
        results.streams.append(steady_stream(world, _RATE, options.seconds, number))
        console.print(f"{number + 1:>3} stream: {results.streams[-1].p95:.2f} s for 95 of 100")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, once")
    parser.add_argument("--runs", type=int, help="rounds; the median is reported (default 5)")
    parser.add_argument("--publish", action="store_true", help="also copy tables and plot into docs/benchmarks.md")
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 5)
    options.rows = 1_000_000 if options.quick else 8_000_000
    options.written = options.rows // 4
    options.scans = 3 if options.quick else 10
    options.micro_batches = 5 if options.quick else 20
    options.seconds = 5.0 if options.quick else 20.0
    return options


if __name__ == "__main__":
    try:
        main()
    except StartFailed as error:
        raise SystemExit(str(error)) from None
