"""A report as one HTML file that stands on its own: it can be mailed, opened anywhere, read in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Any, Literal

from millstream.spark.pipelines.ready.plots import short
from millstream.spark.pipelines.ready.style import STYLE

__all__ = ["Figure", "Html", "Page", "Tone", "ago", "card", "shown_bytes", "shown_time", "table"]

Tone = Literal["", "good", "warn", "bad"]


class Html(str):
    """Text that is HTML already."""


@dataclass(frozen=True)
class Figure:
    """A number that matters, large."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass
class Page:
    """What a report says, from top to bottom."""

    title: str
    lead: str
    made: datetime
    parts: list[str] = field(default_factory=list)

    def figures(self, figures: Iterable[Figure]) -> None:
        drawn = "".join(
            f"<div class='card figure {each.tone}'><div class='label'>{escape(each.label)}</div>"
            f"<div class='value'>{escape(each.value)}</div><div class='note'>{escape(each.note)}</div></div>"
            for each in figures
        )
        self.parts.append(f"<div class='figures'>{drawn}</div>")

    def findings(self, sentences: Sequence[tuple[Tone, str]]) -> None:
        """What a reader in a hurry should know."""
        drawn = "".join(f"<li class='{tone}'>{_html(sentence)}</li>" for tone, sentence in sentences)
        if drawn:
            self.parts.append(f"<ul class='findings'>{drawn}</ul>")

    def section(self, title: str, *content: str, note: str = "") -> None:
        said = f"<p class='soft'>{_html(note)}</p>" if note else ""
        self.parts.append(f"<section><h2>{escape(title)}</h2>{said}{''.join(content)}</section>")

    def beside(self, *sections: tuple[str, str]) -> None:
        """Sections next to each other where there is room."""
        drawn = "".join(
            f"<section><h2>{escape(title)}</h2><div class='card'>{body}</div></section>" for title, body in sections
        )
        self.parts.append(f"<div class='beside'>{drawn}</div>")

    def html(self) -> str:
        made = f"Made {shown_time(self.made)} UTC by a Millstream pipeline."
        return (
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<meta name='color-scheme' content='light dark'><title>{escape(self.title)}</title>"
            f"<style>{STYLE}</style></head><body><main><header><h1>{escape(self.title)}</h1>"
            f"<p class='lead'>{_html(self.lead)}</p></header>{''.join(self.parts)}"
            f"<footer>{made} Times are UTC.</footer></main></body></html>\n"
        )


def card(content: str) -> Html:
    return Html(f"<div class='card'>{content}</div>")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str = "There is nothing to show.") -> Html:
    """Numbers to the right, everything else to the left."""
    if not rows:
        return Html(f"<div class='card empty'>{escape(empty)}</div>")
    right = [all(isinstance(row[at], int | float) or row[at] is None for row in rows) for at in range(len(heads))]
    head = "".join(
        f"<th{' class=num' if number else ''}>{escape(name)}</th>" for name, number in zip(heads, right, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(value, number) for value, number in zip(row, right, strict=True)) + "</tr>"
        for row in rows
    )
    return Html(f"<div class='table'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def _cell(value: Any, number: bool) -> str:
    if number:
        return f"<td class='num'>{'' if value is None else short(value)}</td>"
    if isinstance(value, datetime):
        return f"<td class='time'>{shown_time(value)}</td>"
    return f"<td>{_html(value if isinstance(value, str) else str(value))}</td>"


def _html(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def shown_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def shown_bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def ago(now: datetime, then: datetime) -> str:
    """How long ago something was, in one unit."""
    seconds = max(0, (now - then).total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{round(seconds / size)} {unit} ago"
    return f"{round(seconds)} s ago"
