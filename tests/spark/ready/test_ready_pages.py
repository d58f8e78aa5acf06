"""Pages of ready pipelines about odd data.  No Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import TimestampType

from millstream.spark.pipelines.ready import dlq_report, key_skew, usage
from millstream.spark.pipelines.ready.catalogue import catalogue
from millstream.spark.pipelines.ready.replay import Replay
from millstream.spark.pipelines.ready.shelves import ParquetShelf


def test_an_archive_has_a_page_also_with_messages_of_the_year_58000(tmp_path: Path) -> None:
    for date in ("2026-11-16", "+58846-03-01"):
        (tmp_path / f"date={date}").mkdir()
        pq.write_table(pa.table({"offset": [1, 2]}), tmp_path / f"date={date}" / "0.parquet")
    page = catalogue("orders", ParquetShelf(str(tmp_path), 0, 1000)).html()
    assert "of 2 days" in page
    assert "<td>+58846-03-01</td>" in page
    assert "Messages by day, 2 in all" in page


def test_a_page_about_an_archive_looks_into_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    read = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda file: (looked.append(file.name), read(file))[1])
    shelf, counted = ParquetShelf(str(tmp_path), 0, 1000), dict[Path, int]()
    (tmp_path / "date=2026-11-16").mkdir()
    for name in ("a", "b", "c"):
        pq.write_table(pa.table({"offset": [1, 2]}), tmp_path / "date=2026-11-16" / f"{name}.parquet")
        page = catalogue("orders", shelf, counted).html()
    assert looked == ["a.parquet", "b.parquet", "c.parquet"]
    assert "Messages by day, 6 in all" in page
    (tmp_path / "date=2026-11-16" / "b.parquet").unlink()
    assert "Messages by day, 4 in all" in catalogue("orders", shelf, counted).html()
    assert len(counted) == 2


def test_usage_by_day_leaves_out_what_has_no_place_in_a_plot() -> None:
    def published(day: str, messages: int) -> dict[str, Any]:
        return {"day": day, "namespace": "default", "topic": "orders", "messages": messages}

    days = [published("+58846-03-01", 5), published("2026-11-14", 1), published("2026-11-16", 2)]
    times, series = usage._by_day(days, ["default"])
    assert (len(times), series) == (3, {"default": [1.0, 0.0, 2.0]})
    assert usage._by_day(days[:1], ["default"]) == ([], {})


def looked_at(counts: dict[bytes | None, int], limit: int = 10) -> dict[str, Any]:
    """A topic of four partitions that are filled alike."""
    total = sum(counts.values())
    row = {"topic": "orders", "messages": total, "bytes": total, "keys": len(counts.keys() - {None})}
    ordered = sorted(counts.items(), key=lambda each: -each[1])[: limit + 1]
    top = [{"topic": "orders", "key": key, "messages": n, "bytes": n, "partition": 0} for key, n in ordered]
    parts = [{"topic": "orders", "partition": number, "messages": total // 4} for number in range(4)]
    return key_skew._topic(row, top, parts, 4, limit)


def test_a_key_with_more_than_its_share_is_found_beside_more_messages_without_one() -> None:
    rest = {b"k%d" % n: 1 for n in range(260)}
    for limit in (1, 10):
        found = looked_at({None: 400, b"hot": 340, **rest}, limit)
        assert (found["hot"], found["largest"]["key"], len(found["top"])) == (True, "hot", limit)
        assert "key <code>hot</code> has 34%" in key_skew._findings([found])[0][1]
    found = looked_at({None: 400, b"a key": 600})
    assert (found["hot"], found["largest"]["key"]) == (True, "a key")


def test_messages_without_a_key_are_no_skew_and_neither_is_a_single_key() -> None:
    assert not looked_at({None: 400})["hot"]
    assert not looked_at({None: 900, **{b"k%d" % n: 1 for n in range(100)}})["hot"]
    assert not looked_at({b"the only one": 400})["hot"]
    assert looked_at({b"(no key)": 300, b"another": 100})["hot"]


def test_a_replay_has_a_page_although_the_clock_was_set_back_meanwhile() -> None:
    made: Any = SimpleNamespace(
        checked=SimpleNamespace(definition=SimpleNamespace(name="again")), now=datetime.now(UTC)
    )
    plan: Any = SimpleNamespace(sent=[(0, 100, 1794787200.0), (1, 100, 1794787201.0), (2, 50, 1794783600.0)])
    page = Replay.model_validate({"topics": "orders", "to": "again", "rate": 100})._page(made, plan).html()
    assert "Messages sent over time, 250 in all" in page


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
def test_letters_died_when_they_did_wherever_the_report_is_made() -> None:
    moment = datetime(2026, 11, 16, 8, tzinfo=UTC)
    collected = TimestampType().fromInternal(int(moment.timestamp()) * 1_000_000)
    assert dlq_report._utc(collected) == moment
