"""Pages of ready pipelines about odd data.  No Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.spark.pipelines.ready import usage
from millstream.spark.pipelines.ready.catalogue import catalogue
from millstream.spark.pipelines.ready.shelves import ParquetShelf


def test_an_archive_has_a_page_also_with_messages_of_the_year_58000(tmp_path: Path) -> None:
    for date in ("2026-11-16", "+58846-03-01"):
        (tmp_path / f"date={date}").mkdir()
        pq.write_table(pa.table({"offset": [1, 2]}), tmp_path / f"date={date}" / "0.parquet")
    page = catalogue("orders", ParquetShelf(str(tmp_path), 0, 1000)).html()
    assert "of 2 days" in page
    assert "<td>+58846-03-01</td>" in page
    assert "Messages by day, 2 in all" in page


def test_usage_by_day_leaves_out_what_has_no_place_in_a_plot() -> None:
    def published(day: str, messages: int) -> dict[str, Any]:
        return {"day": day, "namespace": "default", "topic": "orders", "messages": messages}

    days = [published("+58846-03-01", 5), published("2026-11-14", 1), published("2026-11-16", 2)]
    times, series = usage._by_day(days, ["default"])
    assert (len(times), series) == (3, {"default": [1.0, 0.0, 2.0]})
    assert usage._by_day(days[:1], ["default"]) == ([], {})
