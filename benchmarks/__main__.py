"""Runs the benchmark: `python -m benchmarks [--quick] [--runs N] [--only NAME ...] [--workloads W1 ...]`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.contestants import CONTESTANTS, Contestant, Level
from benchmarks.install import install_peers
from benchmarks.limits import Limits, measure_limits
from benchmarks.machine import describe_machine
from benchmarks.measure import WorkerFailed
from benchmarks.report import Entry, Results, print_tables, publish_results, write_results
from benchmarks.servers import StartFailed, end_on_sigterm
from benchmarks.workloads import WORKLOADS, Outcome, Placement, Scale, Workload, measure_workload

_RESULTS = Path(__file__).with_name("results")
_PAGE = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"
#: Short, because there are many rounds: the median of five seconds apart says more than ten seconds at a stretch.
_FULL = Scale(seconds=1.0, latency_seconds=3.0)
_QUICK = Scale(seconds=0.4, latency_seconds=1.0, trial_share=0.2)


def main() -> None:
    end_on_sigterm()
    options = _parse_options()
    # Tables are wider than the 80 columns rich assumes of a file or a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    if options.install_peers:
        install_peers()
        return
    chosen = [c for c in CONTESTANTS if not options.only or any(word in c.name.lower() for word in options.only)]
    missing = {contestant.name: why for contestant in chosen if (why := contestant.missing()) is not None}
    for name, how in missing.items():
        console.print(f"skipping {name}: {how}")
    present = [contestant for contestant in chosen if contestant.name not in missing]
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    # Beside the results and not in the system's temporary directory, which may be memory.
    _RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        bench = _Bench(Path(data), workloads, options, console)
        results = Results(
            machine=describe_machine(Path(data)),
            workloads=workloads,
            sizes=options.sizes,
            runs=options.runs,
            versions={contestant.name: contestant.version() for contestant in present},
            skipped=missing,
        )
        for _ in bench.run(present):
            results.runs, results.limits, results.entries = bench.rounds, bench.limits, bench.entries(present)
            write_results(results, options.output)  # what is there, should the run be ended early
    print_tables(results, console)
    console.print(f"written to {options.output}")
    if options.publish:
        publish_results(options.output, _PAGE)


class _Bench:
    """All rounds; each round starts every contestant anew, so drift of the machine hits all alike."""

    def __init__(
        self, data: Path, workloads: Sequence[Workload], options: argparse.Namespace, console: Console
    ) -> None:
        self._data = data
        self._workloads = workloads
        self._sizes: list[int] = options.sizes
        self._runs: int = options.runs
        self._scale = _QUICK if options.quick else _FULL
        self._console = console
        self._outcomes: dict[tuple[str, str, int], list[Outcome]] = {}
        self._problems: dict[tuple[str, str, int], str] = {}
        self.rounds = 0
        self.limits: list[Limits] = []

    def run(self, contestants: Sequence[Contestant]) -> Iterator[int]:
        """Run all rounds; yields the number of each that is through."""
        started, turns = time.monotonic(), self._runs * len(contestants)
        for round_number in range(self._runs):
            self._console.print(f"round {round_number + 1} of {self._runs}: what the machine can do")
            self.limits.append(measure_limits(self._data, self._scale.seconds / 2))
            for place, contestant in enumerate(contestants):
                done = round_number * len(contestants) + place
                left = (time.monotonic() - started) / done * (turns - done) if done else 0.0
                remaining = f", about {left / 60:.0f} min left" if left else ""
                self._console.print(f"round {round_number + 1} of {self._runs}: {contestant.name}{remaining}")
                for level in Level:
                    self._run_level(contestant, level)
            self.rounds = round_number + 1
            yield self.rounds

    def entries(self, contestants: Sequence[Contestant]) -> list[Entry]:
        """What has been measured so far."""
        return [
            self._entry(contestant, workload, size)
            for workload in self._workloads
            for size in self._sizes_of(workload)
            for contestant in contestants
            if contestant.leases or not workload.leases
        ]

    def _run_level(self, contestant: Contestant, level: Level) -> None:
        workloads = [w for w in self._workloads if w.level is level and (contestant.leases or not w.leases)]
        if not workloads or contestant.promise(level) is None:
            return
        directory = self._data / "broker"
        directory.mkdir()
        try:
            server = contestant.start(directory, level)
        except StartFailed as error:
            self._console.print(f"  {error}")
            shutil.rmtree(directory)
            return
        try:
            for workload in workloads:
                for size in self._sizes_of(workload):
                    key = (contestant.name, workload.name, size)
                    try:
                        outcome = measure_workload(workload, contestant, server, size, self._scale)
                    except WorkerFailed as error:
                        self._console.print(f"  {workload.name} {size} B failed: {error}")
                        self._problems[key] = "failed"
                        continue
                    self._outcomes.setdefault(key, []).append(outcome)
                    self._note(workload, size, outcome)
        finally:
            server.stop()
            shutil.rmtree(directory)

    def _sizes_of(self, workload: Workload) -> list[int]:
        """All, except for the pinned variants, which only explain W5."""
        return self._sizes if workload.placement is Placement.FREE else self._sizes[:1]

    def _note(self, workload: Workload, size: int, outcome: Outcome) -> None:
        latency = ", ".join(f"{point} {value:,.0f} us" for point, value in outcome.latency_us.items())
        warning = f", {outcome.disorder} chunks out of order" if outcome.disorder else ""
        self._console.print(f"  {workload.name} {size:>5} B {outcome.per_second:>12,.0f} msg/s {latency}{warning}")

    def _entry(self, contestant: Contestant, workload: Workload, size: int) -> Entry:
        key = (contestant.name, workload.name, size)
        promise = contestant.promise(workload.level)
        outcomes = self._outcomes.get(key, [])
        problem = "" if outcomes else self._problems.get(key, "not run" if promise else "cannot")
        return Entry(
            contestant.name,
            contestant.client,
            workload.name,
            size,
            promise or "no such setting",
            outcomes,
            problem,
        )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few minutes: one round, 100 B only")
    parser.add_argument("--runs", type=int, help="rounds; the median is reported (default 5)")
    parser.add_argument("--sizes", type=int, nargs="+", help="body sizes in bytes (default 100 1000)")
    parser.add_argument("--only", nargs="+", type=str.lower, help="contestants whose name contains one of these words")
    parser.add_argument("--workloads", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--output", type=Path, default=_RESULTS, help="where table, JSON and plot go")
    parser.add_argument("--publish", action="store_true", help="also copy this complete run into docs/benchmarks.md")
    parser.add_argument(
        "--install-peers", action="store_true", help="install the other brokers and their clients, then end"
    )
    options = parser.parse_args()
    if options.publish and (options.quick or options.only or options.workloads or options.sizes):
        parser.error("the page shows complete runs: --publish goes with no other choice than --runs")
    # A smoke run leaves out the pinned variants, which only explain W5.
    everything = [w.name for w in WORKLOADS if w.placement is Placement.FREE or not options.quick]
    options.workloads = options.workloads or everything
    options.runs = options.runs or (1 if options.quick else 5)
    options.sizes = options.sizes or ([100] if options.quick else [100, 1000])
    return options


if __name__ == "__main__":
    main()
