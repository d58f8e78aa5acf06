"""Ten million rows, out of Spark and back: as many as came, each of them once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark.world import World

ROWS = 10_000_000
#: The sum of all numbers, and of their squares: together they leave no room for one that is missing and another twice.
SUM = ROWS * (ROWS - 1) // 2
SQUARES = (ROWS - 1) * ROWS * (2 * ROWS - 1) // 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_million_rows_are_written_exactly_once_and_read_both_ways(spark: Any, world: World) -> None:
    topic = world.topic(4)
    frame = spark.range(0, ROWS, 1, 8).selectExpr(
        "concat('customer-', id % 5000) as key", "concat(lpad(id, 10, '0'), repeat('.', 90)) as value"
    )
    sink = {"bootstrap.servers": world.broker.address, "topic": topic}
    frame.write.format("millstream").mode("append").options(**sink).save()
    assert sum(part.high_watermark for part in world.client.topic(topic).partitions) == ROWS
    try:
        for options in (world.options(topic), world.in_files(topic)):
            rows = spark.read.format("millstream").options(**options).load()
            numbers = rows.selectExpr("cast(substr(cast(value as string), 1, 10) as decimal(38, 0)) as n")
            (found,) = numbers.selectExpr("count(*)", "sum(n)", "sum(n * n)").collect()
            assert tuple(map(int, found)) == (ROWS, SUM, SQUARES)
    finally:
        world.client.delete_topic(topic)
