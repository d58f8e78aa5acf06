"""A Spark job that was written for Kafka and now uses Millstream.

The lines that changed are marked; everything else is as it was.  The job counts page views by minute, and writes the
counts of minutes that are over to a topic.

Usage: python examples/kafka_job_moved.py [HOST:PORT]
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812


def views_by_minute(views: DataFrame) -> DataFrame:
    page = F.get_json_object(F.col("value").cast("string"), "$.page")
    return (
        views.select(page.alias("page"), "timestamp")
        .withWatermark("timestamp", "1 minute")
        .groupBy(F.window("timestamp", "1 minute"), "page")
        .count()
    )


def main(server: str, checkpoint: str = "build/kafka-job-moved") -> None:
    # was: SparkSession.builder.config("spark.jars.packages", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.3.0")
    spark = SparkSession.builder.appName("views").getOrCreate()
    views = (
        spark.readStream.format("millstream")  # was: format("kafka")
        .option("bootstrap.servers", server)  # was: option("kafka.bootstrap.servers", server)
        .option("subscribe", "views")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 100_000)
        .load()
    )
    counts = views_by_minute(views).select(
        F.col("page").cast("binary").alias("key"),
        F.to_json(F.struct("window.start", "page", "count")).cast("binary").alias("value"),
    )
    query = (
        counts.writeStream.format("millstream")  # was: format("kafka"), at least once; this is exactly once
        .option("bootstrap.servers", server)  # was: option("kafka.bootstrap.servers", server)
        .option("topic", "views-by-minute")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")
