"""What publishing costs as the number of partitions grows: `python -m benchmarks.partitions [--quick]`.

One producer, pipelined, keys spread over 1, 10, 100 and 1000 partitions of one topic.  More partitions mean
smaller batches and more files to sync; the cost should grow no faster than the disk makes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.contestants import Level, Millstream
from benchmarks.machine import describe_machine
from benchmarks.page import publish_plot
from benchmarks.servers import end_on_sigterm
from benchmarks.workloads import WORKLOADS, Outcome, Scale, measure_workload

_RESULTS = Path(__file__).with_name("results")
_PAGE = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"
_PARTITIONS = (1, 10, 100, 1000)
_POLICIES = ("group", "interval")
_KEYS_PER_PARTITION = 16  # enough that hashing leaves few partitions without any
_PIPELINED = next(workload for workload in WORKLOADS if workload.name == "W1")

_Measured = dict[str, dict[int, list[Outcome]]]  # by policy, then by number of partitions


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", type=int, default=100, help="body size in bytes")
    parser.add_argument("--publish", action="store_true", help="also copy table and plot into docs/benchmarks.md")
    options = parser.parse_args()
    runs, seconds = (1, 0.4) if options.quick else (options.runs, 2.0)
    console = Console()
    if (why := Millstream().missing()) is not None:
        raise SystemExit(f"Millstream cannot run: {why}")
    _RESULTS.mkdir(exist_ok=True)
    measured: _Measured = {policy: {number: [] for number in _PARTITIONS} for policy in _POLICIES}
    for _ in range(runs):
        for policy in _POLICIES:
            for number in _PARTITIONS:
                outcome = _measure(policy, number, options.size, seconds)
                measured[policy][number].append(outcome)
                console.print(f"{policy:>9} {number:>5} partitions {outcome.per_second:>12,.0f} msg/s")
    _write(measured, options.size)
    console.print(f"written to {_RESULTS}")
    if options.publish:
        publish_plot(_PAGE, "partitions", _RESULTS, "The same as a plot")


def _measure(policy: str, number: int, size: int, seconds: float) -> Outcome:
    keys = number * _KEYS_PER_PARTITION
    contestant = Millstream(policy, partitions=number, keys=keys)
    # Every key once or more, so that no partition's first write is measured.
    scale = Scale(seconds=seconds, warm_up=max(1000, keys))
    # A broker of its own for each number: a thousand open partitions would weigh on the next measurement.
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        directory = Path(data) / "broker"
        directory.mkdir()
        server = contestant.start(directory, Level.NORMAL)
        try:
            return measure_workload(_PIPELINED, contestant, server, size, scale)
        finally:
            server.stop()


def _write(measured: _Measured, size: int) -> None:
    raw = {
        "machine": describe_machine(_RESULTS),
        "size": size,
        "outcomes": {
            policy: {
                str(number): [
                    {
                        "per_second": outcome.per_second,
                        "producer_ns": (outcome.producer_cpu_ns or 0) / outcome.count,
                        "broker_ns": outcome.broker_cpu_ns / outcome.count,
                        "rss_bytes": outcome.rss_bytes,
                    }
                    for outcome in outcomes
                ]
                for number, outcomes in by_number.items()
            }
            for policy, by_number in measured.items()
        },
    }
    (_RESULTS / "partitions.json").write_text(json.dumps(raw, indent=1) + "\n")
    lines = [
        "| fsync | partitions | msg/s | producer ns/msg | broker ns/msg | broker RSS MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy, by_number in measured.items():
        for number, outcomes in by_number.items():
            cells = [
                f"{_rate(outcomes):,.0f}",
                f"{_producer_ns(outcomes):,.0f}",
                f"{_broker_ns(outcomes):,.0f}",
            ]
            rss = statistics.median(outcome.rss_bytes for outcome in outcomes) / 1e6
            lines.append(f"| {policy} | {number} | " + " | ".join(cells) + f" | {rss:,.0f} |")
    (_RESULTS / "partitions.md").write_text("\n".join(lines) + "\n")
    _plot(measured, size)


def _rate(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.per_second for outcome in outcomes)


def _producer_ns(outcomes: list[Outcome]) -> float:
    return statistics.median((outcome.producer_cpu_ns or 0) / outcome.count for outcome in outcomes)


def _broker_ns(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.broker_cpu_ns / outcome.count for outcome in outcomes)


def _plot(measured: _Measured, size: int) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (rates, costs) = pyplot.subplots(1, 2, figsize=(11, 4))
    for policy, by_number in measured.items():
        rates.plot(_PARTITIONS, [_rate(o) for o in by_number.values()], marker="o", label=f"fsync {policy}")
        costs.plot(_PARTITIONS, [_broker_ns(o) for o in by_number.values()], marker="o", label=f"broker, {policy}")
        costs.plot(
            _PARTITIONS,
            [_producer_ns(o) for o in by_number.values()],
            marker="s",
            linestyle="--",
            label=f"producer, {policy}",
        )
    for axes, title in ((rates, f"msg/s, {size} B"), (costs, "CPU ns per message")):
        axes.set(xscale="log", xlabel="partitions", title=title, ylim=(0, None))
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(_RESULTS / "partitions.svg")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
