"""What is in an archive, as a page: from the ends of its files, without reading them."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from millstream.spark.pipelines.ready.page import Figure, Page, card, shown_bytes, table
from millstream.spark.pipelines.ready.plots import midnight, short, stacked
from millstream.spark.pipelines.ready.shelves import Shelf, date_of

__all__ = ["catalogue"]

_DATES_SHOWN: Final = 60


def catalogue(name: str, shelf: Shelf, counted: dict[Path, int] | None = None) -> Page:
    """How much there is of each day, and how far it goes.

    `counted` remembers from one page to the next how many rows a file has: once it is there it never changes.
    """
    now = datetime.now(UTC)
    page = Page(f"Archive: {name}", "Messages by the day of their time, one row for each offset.", now)
    days: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    known = {} if counted is None else counted
    there = shelf.files()
    for gone in known.keys() - set(there):
        del known[gone]
    for file in there:
        if file not in known:
            known[file] = pq.read_metadata(file).num_rows
        days[date_of(file)].append((known[file], file.stat().st_size))
    rows = {day: sum(count for count, _ in files) for day, files in days.items()}
    sizes = {day: sum(size for _, size in files) for day, files in days.items()}
    files = sum(map(len, days.values()))
    page.figures(
        [
            Figure("Messages", short(sum(rows.values())), f"of {len(days)} days"),
            Figure("Size", shown_bytes(sum(sizes.values())), "as Parquet"),
            Figure("Files", short(files), f"{shown_bytes(sum(sizes.values()) / files)} each" if files else ""),
        ]
    )
    shown = sorted(days)[-_DATES_SHOWN:]
    drawn = {time: float(rows[name]) for name in shown if (time := midnight(name)) is not None}
    if drawn:
        plot = stacked(list(drawn), {"messages": list(drawn.values())}, what="Messages by day")
        page.section("Messages by day", card(plot))
    page.section(
        "Days",
        table(
            ("day", "messages", "files", "size"),
            [(day, rows[day], len(days[day]), shown_bytes(sizes[day])) for day in reversed(shown)],
            empty="Nothing is archived yet.",
        ),
    )
    kept = sorted((topic, partition, until) for until, topic, partition in shelf.kept().values())
    page.section("How far it is", table(("topic", "partition", "next offset"), [(t, str(p), u) for t, p, u in kept]))
    return page
