"""Reads orders into a table, and writes the large ones to a topic."""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

BROKER = os.environ.get("MILLSTREAM_BROKER", "localhost:9092")
spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """One row for each order.  Every run adds to it."""
    text = F.col("value").cast("string")
    return (
        spark.readStream.format("millstream")
        .option("bootstrap.servers", BROKER)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
        .select(
            F.get_json_object(text, "$.customer").alias("customer"),
            F.get_json_object(text, "$.amount").cast("double").alias("amount"),
            "timestamp",
        )
    )


@dp.materialized_view
def totals() -> DataFrame:
    """What each customer has ordered.  Every run computes it anew."""
    return spark.read.table("orders").groupBy("customer").agg(F.sum("amount").alias("total"))


dp.create_sink("large", "millstream", {"bootstrap.servers": BROKER, "topic": "large-orders"})


@dp.append_flow(target="large")
def large_orders() -> DataFrame:
    rows = spark.readStream.table("orders").filter("amount >= 100")
    return rows.select(F.col("customer").alias("key"), F.to_json(F.struct("customer", "amount")).alias("value"))
