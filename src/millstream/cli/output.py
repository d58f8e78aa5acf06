"""What people and programs see: tables and plain words on a terminal, JSON when asked for.

Standard output carries the result and nothing else; progress, hints and errors go to standard error.
"""

from __future__ import annotations

import datetime
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from millstream.cli.terminal import terminal_safe

__all__ = [
    "JsonLinesOption",
    "JsonOption",
    "bytes_text",
    "count_text",
    "document_of",
    "duration_text",
    "examples",
    "plural",
    "print_done",
    "print_facts",
    "print_json",
    "print_json_line",
    "print_table",
    "prose",
    "stderr",
    "stdout",
    "time_text",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]

# A stream that the shell has closed is None in Python; what is opened first takes its number, as it should.
for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, _mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run
# Letters that a terminal does not have are shown as numbers, as Python does on standard error.
if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
    sys.stdout.reconfigure(errors="backslashreplace")

# Wide enough for any table: what is piped into grep must not be cut to the 80 columns of an imagined terminal.
_PIPE_WIDTH: Final = 100_000
#: What is between two columns; of a folded text, how many letters a line shows at least, and how many lines there are.
_BETWEEN: Final = 3
_FOLDED_LEAST: Final = 8
_FOLDED_LINES: Final = 4
#: Ids, receipts and times, which are copied or compared.  Names and texts may be folded.
_COPIED: Final = re.compile(r"[0-9A-Z]{26}|(wh-)?[0-9a-f]{12}|[\w.-]{1,48}(:\d+){3}:[0-9a-f]{16}|[\d-]{10}T[\d:]{8}Z")


stdout: Final = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
stderr: Final = Console(stderr=True, highlight=False, emoji=False, width=None if sys.stderr.isatty() else _PIPE_WIDTH)


def print_json(document: object) -> None:
    """One JSON document, laid out for reading."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=_lacks_letters()) + "\n")


def print_json_line(document: object) -> None:
    """One JSON document on a line of its own, for results that come one after the other."""
    sys.stdout.write(json.dumps(document, ensure_ascii=_lacks_letters()) + "\n")


def print_done(sentence: str, *, as_json: bool, **facts: object) -> None:
    """What a command has changed: a sentence in markup for people, the facts of it for programs."""
    if as_json:
        print_json(facts)
    else:
        stdout.print(sentence)


def _lacks_letters() -> bool:
    """Whether the output has fewer letters than there are: JSON has a way to write the others."""
    return not (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str = "nothing to show",
    numbers: str = "",
    console: Console | None = None,
) -> None:
    """Rows under a header; `numbers` names the columns to align on the right, separated by `|`.

    An empty table says so on standard error: a program that reads the output then sees no rows, not a sentence.  On a
    terminal too narrow for it, each row is a paragraph of its own: half a number is a wrong number, and half a receipt
    is none.
    """
    console = console or stdout
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        stderr.print(f"[dim]{escape(empty)}[/]")
        return
    aligned = set(numbers.split("|"))
    widths = _widths(columns, cells, aligned, console.width)
    if widths is None:
        _print_paragraphs(columns, cells, console)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        right = column in aligned
        table.add_column(
            column, justify="right" if right else "left", no_wrap=right, overflow="fold", width=width or None
        )
    for row in cells:
        table.add_row(*row)
    _print_grid(table, console)


def _widths(
    columns: Sequence[str], cells: Sequence[Sequence[str | Text]], aligned: set[str], room: int
) -> list[int] | None:
    """How wide each column is, the widest giving way first; None where there is not enough room for that."""
    widths, least = [], []
    for number, column in enumerate(columns):
        texts = [column, *(_plain(row[number]) for row in cells)]
        widths.append(max(map(cell_len, texts)))
        least.append(widths[-1] if column in aligned else max(map(_least_width, texts)))
    room -= _BETWEEN * (len(columns) - 1)
    if sum(least) > room:
        return None
    folded = [min(width, room) for width in widths]
    for _ in range(sum(folded) - room):
        _, widest = max((width, number) for number, width in enumerate(folded) if width > least[number])
        folded[widest] -= 1
    towers = any(width > _FOLDED_LINES * narrow for width, narrow in zip(widths, folded, strict=True))
    return None if towers else folded


def _least_width(text: str) -> int:
    """Numbers and what people copy are never cut, and of a text that is folded a line shows a few letters."""
    return max(
        (cell_len(word) if _COPIED.fullmatch(word) else min(cell_len(word), _FOLDED_LEAST) for word in text.split()),
        default=0,
    )


def _plain(cell: str | Text) -> str:
    return (cell if isinstance(cell, Text) else Text.from_markup(cell)).plain


def _print_paragraphs(columns: Sequence[str], cells: Sequence[Sequence[str | Text]], console: Console) -> None:
    for number, row in enumerate(cells):
        if number:
            console.print()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for column, cell in zip(columns, row, strict=True):
            grid.add_row(Text(column), cell)
        _print_grid(grid, console)


def _print_grid(grid: Table, console: Console) -> None:
    """Without the blanks that make all lines as long as the longest, where nobody sees them."""
    if console.is_terminal:
        console.print(grid)
        return
    with console.capture() as capture:
        console.print(grid)
    console.file.writelines(line.rstrip() + "\n" for line in capture.get().splitlines())


def _cell(value: object) -> str | Text:
    """Text of a cell.  Strings are shown as they are, without acting on the terminal; only a rich Text has a style."""
    if isinstance(value, Text):
        return value
    if value is None or value == "":
        return "[dim]-[/]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(terminal_safe(str(value)))


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """A few named values, one per line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_cell(name), _cell(value))
    _print_grid(table, stdout)


def examples(*lines: str) -> str:
    """The end of a command's help: lines to copy.  A line that starts with `#` explains the one below it."""
    shown = [f"[dim]{escape(line)}[/dim]" if line.startswith("#") else f"[dim]$[/dim] {escape(line)}" for line in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown])


def prose(docstring: str | None) -> str:
    """A docstring as help: each paragraph on one line, so that the terminal's width decides where it breaks."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(escape(" ".join(paragraph.split())) for paragraph in paragraphs)


def bytes_text(size: int) -> str:
    """`1.5 MiB`; exact below 1 KiB."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{size:,} B" if unit == "B" else f"{amount:,.{0 if amount == int(amount) else 1}f} {unit}"


def duration_text(duration_ms: int) -> str:
    """`7 d`, `1 h 30 m`, `250 ms`: the two largest units, which is as exact as anyone reads."""
    if duration_ms < 1000:
        return f"{duration_ms} ms"
    if duration_ms < 60_000:
        seconds = duration_ms / 1000
        return f"{seconds:.{0 if seconds == int(seconds) else 1}f} s"
    rest, parts = duration_ms // 1000, []
    for unit, seconds_in_unit in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, rest = divmod(rest, seconds_in_unit)
        if amount:
            parts.append(f"{amount:,} {unit}")
    return " ".join(parts[:2])


def time_text(time_ms: int) -> str:
    """A point in time in UTC, to the second, in the form that every command accepts as well."""
    try:
        moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return f"{time_ms} ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def count_text(number: float) -> str:
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def document_of(answer: Any) -> Any:
    """An SDK answer as plain JSON values."""
    import msgspec  # only commands that talk to a broker pay for it

    return msgspec.to_builtins(answer)
