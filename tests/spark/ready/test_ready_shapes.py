"""Error texts without what differs each time."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.spark.pipelines.ready.shapes import NO_TEXT, families, shape, shape_column

TEXTS = {
    "order 17: no such customer": "order <n>: no such customer",
    "took 3,000.5 ms at 2026-11-16T08:00:00.123Z": "took <n> ms at <time>",
    "on 2026-11-16 08:00 it was late": "on <time> it was late",
    "message 01M7HMWVTM48B90X000000000V is gone": "message <id> is gone",
    "6f1ae7b2-1111-2222-3333-444455556666 exists": "<uuid> exists",
    "cannot reach 10.1.2.3:8443": "cannot reach <address>",
    "550 no mailbox anna.b@example.org": "550 no mailbox <email>",
    "HTTP 503 from shard 3": "HTTP 503 from shard <n>",
    "HTTP 404 from shard 4": "HTTP 404 from shard <n>",
    "[Errno 111] refused": "[Errno 111] refused",
    "at 0x7f3a and deadbeef01": "at <hex> and <hex>",
    "KeyError: 'amount'": "KeyError: 'amount'",
    "several\n   lines\tof it ": "several lines of it",
    "added facade": "added facade",
    "": NO_TEXT,
    "x" * 500: "x" * 300,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_a_shape(text: str) -> None:
    assert shape(text) == TEXTS[text]


def test_spark_sees_the_same_shapes(spark: Any) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    rows = spark.createDataFrame([(text,) for text in TEXTS], "text string")
    found = rows.select("text", shape_column(F.col("text")).alias("shape")).collect()
    assert {row["text"]: row["shape"] for row in found} == TEXTS


def test_a_word_that_is_different_in_many_texts_is_a_name() -> None:
    cities = [f"no address in {city} for <n>" for city in ("Rome", "Oslo", "Lima", "Bern", "Kyiv", "Bonn")]
    tables = ["table users is missing", "table orders is missing"]
    found = families([*cities, *tables, "disk full"])
    assert {found[each] for each in cities} == {"no address in <…> for <n>"}
    assert [found[each] for each in tables] == tables
    assert found["disk full"] == "disk full"


def test_short_texts_are_never_made_into_one() -> None:
    errors = [f"KeyError: '{name}'" for name in "abcdefgh"]
    assert set(families(errors).values()) == set(errors)
