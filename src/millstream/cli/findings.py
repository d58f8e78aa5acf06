"""What a doctor found: as a table and what to do about it, or as JSON, and as an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

import typer
from rich.text import Text

from millstream.cli.output import print_facts, print_json, print_table, stdout

__all__ = ["print_findings", "report"]

Verdict = Literal["ok", "warn", "fail"]

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Finding(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def found(self) -> str: ...
    @property
    def next(self) -> str:
        """What to do; empty when there is nothing to do."""


def report(findings: Sequence[Finding], *, as_json: bool, summary: Callable[[Counter[str]], str]) -> None:
    """Print them all, with a sentence about how many there are of each verdict.  Ends with 1 if anything fails."""
    counts: Counter[str] = Counter(finding.verdict for finding in findings)
    if as_json:
        rows = [{"name": it.name, "verdict": it.verdict, "found": it.found, "next": it.next} for it in findings]
        print_json({"verdict": "fail" if counts["fail"] else "warn" if counts["warn"] else "ok", "checks": rows})
    else:
        told = [(it.name, Text(it.verdict, style=_STYLES[it.verdict]), it.found, it.next) for it in findings]
        print_findings("check", "", told)
        stdout.print(f"\n{summary(counts)}")
    if counts["fail"]:
        raise typer.Exit(1)


def print_findings(name: str, state: str, findings: Iterable[tuple[str, Text, str, str]]) -> None:
    """Name, state, what was found, and what to do about it: below the table, where it is read and leaves it room."""
    findings = list(findings)
    print_table((name, state, "what was found"), [finding[:3] for finding in findings])
    advised = [(subject, advice) for subject, _, _, advice in findings if advice]
    if advised:
        stdout.print("\n[bold]what to do[/]")
        print_facts(advised)
