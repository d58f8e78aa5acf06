"""Dead letters, their statistics and replays on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from millstream.cli.output import (
    bytes_text,
    count_text,
    document_of,
    duration_text,
    plural,
    print_facts,
    print_table,
    stderr,
    stdout,
    time_text,
)
from millstream.cli.rendering import json_content
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.dead_letters import DeadLetter, LetterStatistics, ReplayInfo, ReplayPlan

__all__ = [
    "letter_document",
    "print_letter",
    "print_letters",
    "print_plan",
    "print_replay",
    "print_replays",
    "print_statistics",
]

_ERROR_SHOWN = 60
_COUNTS_SHOWN = 10
_STATUS_STYLES = {"running": "cyan", "paused": "yellow", "completed": "green", "failed": "red", "aborted": "yellow"}


def letter_document(letter: DeadLetter) -> dict[str, Any]:
    """A letter as JSON values; bytes that are not UTF-8 travel as base 64 under a name that says so."""
    document: dict[str, Any] = document_of(letter)
    del document["key"], document["value"]
    return {**document, **json_content(letter.key, letter.headers, letter.value)}


def print_letters(letters: Sequence[DeadLetter]) -> None:
    print_table(
        ("id", "topic", "key", "group", "reason", "tries", "last error", "died"),
        [
            (
                letter.id,
                letter.original_topic,
                _shown(letter.key),
                letter.group,
                letter.reason,
                letter.deliveries,
                _short(letter.error),
                time_text(letter.dead_ms),
            )
            for letter in letters
        ],
        empty="no dead letters",
        numbers="tries",
    )


def print_letter(letter: DeadLetter) -> None:
    origin = f"{letter.original_topic}/{letter.original_partition} @{letter.original_offset}, id {letter.original_id}"
    facts: list[tuple[str, object]] = [
        ("dead letter", Text(letter.id, style="bold")),
        ("lies in", f"{letter.topic}/{letter.partition} @{letter.offset}"),
        ("came from", origin),
        ("made", time_text(letter.timestamp_us // 1000)),
        ("died", time_text(letter.dead_ms)),
        ("kept until", time_text(letter.kept_until_ms) if letter.kept_until_ms else "it is removed"),
        ("group", letter.group),
        ("reason", letter.reason),
        ("last error", terminal_safe(letter.error)),
        ("key", _shown(letter.key)),
    ]
    facts += [
        (f"header {terminal_safe(name)}", terminal_safe(content.decode("utf-8", "surrogateescape")))
        for name, content in letter.headers
    ]
    print_facts(facts)
    stdout.print()
    print_table(
        ("attempt", "at", "took", "consumer", "ended by", "reason"),
        [
            (
                number,
                time_text(attempt.delivered_ms),
                duration_text(attempt.ended_ms - attempt.delivered_ms),
                attempt.consumer,
                attempt.kind,
                terminal_safe(attempt.reason),
            )
            for number, attempt in enumerate(letter.attempts, letter.deliveries - len(letter.attempts) + 1)
        ],
        empty="it was never delivered",
        numbers="attempt|took",
    )
    stdout.print()
    if letter.value is None:
        stdout.print("[dim]no value (a deletion marker)[/]")
    else:
        stdout.print(f"[dim]value, {bytes_text(letter.value_bytes)}[/]")
        stdout.print(Text(terminal_safe(letter.value.decode("utf-8", "surrogateescape"))), soft_wrap=True)


def print_statistics(statistics: LetterStatistics) -> None:
    if not statistics.total:
        stderr.print("[dim]no dead letters[/]")
        return
    print_facts(
        [
            ("dead letters", Text(count_text(statistics.total), style="bold")),
            ("size", bytes_text(statistics.bytes)),
            ("first died", time_text(statistics.oldest_ms)),
            ("last died", time_text(statistics.newest_ms)),
        ]
    )
    for name, counts in (
        ("reason", statistics.by_reason),
        ("topic", statistics.by_topic),
        ("group", statistics.by_group),
        ("last error", statistics.by_error),
        ("age", statistics.by_age),
    ):
        stdout.print()
        _print_counts(name, counts, statistics.total)


def _print_counts(name: str, counts: Mapping[str, int], total: int) -> None:
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    rows = [(_short(what) or "(none)", number, f"{number / total:.0%}") for what, number in ranked[:_COUNTS_SHOWN]]
    if len(ranked) > _COUNTS_SHOWN:
        rest = sum(number for _, number in ranked[_COUNTS_SHOWN:])
        rows.append((f"({len(ranked) - _COUNTS_SHOWN} more)", rest, f"{rest / total:.0%}"))
    if rows:
        print_table((name, "letters", "share"), rows, numbers="letters|share")


def print_plan(plan: ReplayPlan) -> None:
    print_facts(
        [
            ("would send", f"{plural(plan.total, 'message')}, {bytes_text(plan.bytes)}"),
            *((f"to {topic}", plural(count, "message")) for topic, count in plan.targets.items()),
            *([("would stay", plural(plan.stuck, "message"))] if plan.stuck else []),
            *([("made from", time_text(plan.oldest_ms)), ("to", time_text(plan.newest_ms))] if plan.total else []),
            *([("takes", duration_text(plan.duration_ms))] if plan.duration_ms else []),
            *([("first", ", ".join(plan.first))] if plan.first else []),
        ]
    )
    for warning in plan.warnings:
        stdout.print(Text(f"warning: {warning}", style="yellow"))


def print_replays(infos: Sequence[ReplayInfo]) -> None:
    print_table(
        ("replay", "status", "sent", "of", "failed", "dead again", "to", "began", "ended"),
        [
            (
                info.id,
                _status(info),
                info.replayed,
                info.total,
                info.failed,
                info.relapsed,
                info.target or "where they came from",
                time_text(info.created_ms),
                time_text(info.finished_ms) if info.finished_ms else None,
            )
            for info in infos
        ],
        empty="no replays",
        numbers="sent|of|failed|dead again",
    )


def print_replay(info: ReplayInfo) -> None:
    print_facts(
        [
            ("replay", Text(info.id, style="bold")),
            ("status", _status(info)),
            *([("because", info.reason)] if info.reason else []),
            ("sent", f"{info.replayed:,} of {plural(info.total, 'message')}"),
            *([("failed", plural(info.failed, "message"))] if info.failed else []),
            *([("dead again", plural(info.relapsed, "message"))] if info.relapsed else []),
            ("to", info.target or "where they came from"),
            *([("rate", f"{info.rate:g} per second")] if info.rate else []),
            ("began", time_text(info.created_ms)),
            *([("ended", time_text(info.finished_ms))] if info.finished_ms else []),
        ]
    )
    if info.failures:
        stdout.print()
        print_table(
            ("dead letter", "why it stays", "try again"),
            [(failure.id, failure.reason, failure.retriable) for failure in info.failures],
        )


def _status(info: ReplayInfo) -> Text:
    return Text(info.status, style=_STATUS_STYLES.get(info.status, ""))


def _shown(key: bytes | None) -> str | None:
    return None if key is None else terminal_safe(key.decode("utf-8", "surrogateescape"))


def _short(text: str) -> str:
    line = terminal_safe(" ".join(text.split()))
    return line if len(line) <= _ERROR_SHOWN else f"{line[: _ERROR_SHOWN - 1]}…"
