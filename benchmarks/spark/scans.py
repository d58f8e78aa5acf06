"""The same rows three ways, and a job that reads them: `python -m benchmarks.spark.scans WAY DIRECTORY PORT TIMES`.

A job has a session of its own, as most have, and says as JSON how many seconds each of its scans took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from pyspark.sql import functions as F  # noqa: N812

import millstream.spark

__all__ = ["SCANNED", "Way", "frame", "open_session", "scan"]

Way: TypeAlias = Literal["broker", "segments", "parquet"]
#: The topic.
SCANNED: Final = "scanned"
#: Only these are in the Parquet files as well, so that nobody reads what nobody asked for.
_COLUMNS: Final = "key binary, value binary, offset bigint not null, timestamp timestamp not null"


def open_session(directory: Path) -> Any:
    spark = millstream.spark.session(
        "millstream-benchmark",
        master="local[2]",
        conf={
            "spark.driver.memory": "2g",
            "spark.local.dir": str(directory / "spark"),
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def frame(spark: Any, way: Way, directory: Path, port: int) -> Any:
    if way == "parquet":
        return spark.read.parquet(str(directory / "parquet"))
    place = {"bootstrap.servers": f"127.0.0.1:{port}"} if way == "broker" else {"path": str(directory / "broker")}
    return spark.read.format("millstream").schema(_COLUMNS).options(subscribe=SCANNED, **place).load()


def scan(rows: Any) -> int:
    """Look at the key, value, offset and time of every row, and say how many there are."""
    (found,) = rows.agg(
        F.count("*"), F.sum(F.length("key")), F.sum(F.length("value")), F.max("offset"), F.max("timestamp")
    ).collect()
    return int(found[0])


def main() -> None:
    way, directory, port, times = cast("Way", sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    spark = open_session(directory)
    took = []
    for _ in range(times):
        started = time.perf_counter()
        rows = scan(frame(spark, way, directory, port))
        took.append(time.perf_counter() - started)
    spark.stop()
    print(json.dumps({"rows": rows, "seconds": took}))


if __name__ == "__main__":
    main()
