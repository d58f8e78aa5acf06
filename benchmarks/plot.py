"""Draws the outcomes of a run: one picture for each workload and size, and how near to the machine's limits it came."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.limits import Limit

if TYPE_CHECKING:
    from benchmarks.report import Results
    from benchmarks.workloads import Workload

__all__ = ["plot_results"]

_OURS, _PEER, _LIMIT = "tab:orange", "tab:gray", "tab:red"
_NEAR = 2.0  # a limit further away than so many times the longest bar is written down, not drawn


def plot_results(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    workloads = [w for w in results.workloads if any(e.workload == w.name and e.outcomes for e in results.entries)]
    if not workloads:
        return
    columns = len(results.sizes)
    shares = 1 if results.limits else 0
    figure, rows = pyplot.subplots(
        len(workloads) + shares,
        columns,
        figsize=(6.5 * columns, 2.8 * (len(workloads) + 1.6 * shares)),
        squeeze=False,
        height_ratios=[1.0] * len(workloads) + [1.6] * shares,
    )
    for workload, axes_of_row in zip(workloads, rows, strict=False):
        for size, axes in zip(results.sizes, axes_of_row, strict=True):
            _bars(axes, results, workload, size)
    if shares:
        for size, axes in zip(results.sizes, rows[-1], strict=True):
            _shares(axes, results, workloads, size)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, results: Results, workload: Workload, size: int) -> None:
    entries = [e for e in results.entries_of(workload, size) if e.outcomes]
    if not entries:
        axes.set_axis_off()
        return
    latency = workload.name == "W4"
    values = [e.latency_us("p99") if latency else e.per_second for e in entries]
    axes.barh([e.contestant for e in entries], values, color=[_OURS if e.ours else _PEER for e in entries])
    axes.bar_label(axes.containers[0], labels=[f"{value:,.0f}" for value in values], padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    unit = "p99 us, lower is better" if latency else "msg/s"
    axes.set_title(f"{workload.name} {workload.title}, {size} B ({unit})", fontsize=9)
    axes.tick_params(labelsize=8)
    limits = results.limits_of(workload, size)
    if not latency and limits:
        _mark(axes, limits[0], max(values))


def _mark(axes: Any, limit: Limit, longest: float) -> None:
    axes.set_xlabel(f"limit: {limit}", fontsize=7, color=_LIMIT)
    if limit.value <= _NEAR * longest:
        axes.axvline(limit.value, color=_LIMIT, linestyle="--", linewidth=1)


def _shares(axes: Any, results: Results, workloads: list[Workload], size: int) -> None:
    """How much of its nearest limit each workload reached: ours and the best peer's."""
    names, ours, peers = [], [], []
    for workload in workloads:
        limits = results.limits_of(workload, size)
        if workload.name == "W4" or not limits:
            continue
        rates = {True: 0.0, False: 0.0}
        for entry in results.entries_of(workload, size):
            if entry.outcomes:
                rates[entry.ours] = max(rates[entry.ours], entry.per_second)
        names.append(f"{workload.name} {limits[0].column}")
        ours.append(100 * rates[True] / limits[0].value)
        peers.append(100 * rates[False] / limits[0].value)
    places = range(len(names))
    for offset, values, color, label in ((-0.2, ours, _OURS, "Millstream"), (0.2, peers, _PEER, "best peer")):
        bars = axes.barh([place + offset for place in places], values, height=0.38, color=color, label=label)
        axes.bar_label(bars, labels=[f"{value:.1f} %" if value else "" for value in values], padding=3, fontsize=7)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(f"Share of what the machine can do, {size} B (%)", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)
