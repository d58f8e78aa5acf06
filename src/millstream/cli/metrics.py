"""`millstream metrics`: what Prometheus would read, for those who look themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple

import typer

from millstream.cli.connection import BrokerOptions
from millstream.cli.output import examples, print_json, print_table, stderr

__all__ = ["EPILOG", "metrics"]

EPILOG: Final = examples(
    "millstream metrics",
    "# only what has to do with lag, as a table",
    "millstream metrics --match lag --table",
)

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def metrics(
    match: Annotated[
        str, typer.Option("--match", "-m", metavar="TEXT", help="Only metrics with this text in their name.")
    ] = "",
    as_table: Annotated[bool, typer.Option("--table", help="Print a table instead of Prometheus' format.")] = False,
    *,
    given: BrokerOptions,
) -> None:
    """Show the broker's metrics.

    These are the metrics that Prometheus reads at `/metrics`; `docs/reference/metrics.md` says what each of them means.
    """
    with given.client() as client:
        text = client.metrics()
    if given.as_json:
        print_json([sample._asdict() for sample in _samples(text) if match in sample.name])
    elif as_table:
        rows = [
            (sample.name, ", ".join(f"{name}={value}" for name, value in sample.labels.items()), _number(sample.value))
            for sample in _samples(text)
            if match in sample.name and not sample.name.endswith("_bucket")
        ]
        print_table(("metric", "labels", "value"), rows, numbers="value", empty="no metric matches")
    else:
        lines = [line for line in text.splitlines(keepends=True) if match in _name(line)]
        sys.stdout.writelines(lines)
        if not lines:
            stderr.print("[dim]no metric matches[/]")


def _name(line: str) -> str:
    return (line.split()[2] if line.startswith("#") else line).partition("{")[0]


def _samples(text: str) -> Iterator[_Sample]:
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is not None:
            labels = {name: value.encode().decode("unicode_escape") for name, value in _LABEL.findall(found[2] or "")}
            yield _Sample(found[1], labels, float(found[3]))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"
