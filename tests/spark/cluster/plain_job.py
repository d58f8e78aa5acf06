"""A job as anybody writes it: reads a topic on a cluster, copies it by a batch and once more by a stream."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

COLUMNS = ("key", "value", "headers")


def main(master: str, broker: str, source: str, target: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.driver.host", "127.0.0.1")
    spark = builder.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false").getOrCreate()
    server = {"bootstrap.servers": broker}
    reading = {**server, "subscribe": source, "includeHeaders": "true"}
    rows = spark.read.format("millstream").options(**reading).load()
    read = rows.count()
    rows.select(*COLUMNS).write.format("millstream").options(**server, topic=target).mode("append").save()
    stream = spark.readStream.format("millstream").options(**reading, startingOffsets="earliest").load()
    writing = stream.select(*COLUMNS).writeStream.format("millstream").options(**server, topic=target)
    query = writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    places = spark.sparkContext.parallelize(range(20), 20).mapPartitions(place).distinct().count()
    spark.stop()
    print(json.dumps({"read": read, "executors": places}))


def place(_numbers: Iterator[Any]) -> Iterator[str]:
    yield os.getcwd()


if __name__ == "__main__":
    main(*sys.argv[1:])
