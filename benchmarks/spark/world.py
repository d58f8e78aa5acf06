"""A broker with data, a Spark session on two threads, and what each of their processes has worked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import millstream
from benchmarks.contestants import Level, Millstream
from benchmarks.servers import Server, family
from benchmarks.spark.feed import fill
from benchmarks.spark.report import Measured
from benchmarks.spark.scans import SCANNED, Way, frame, open_session

__all__ = ["World", "running"]

_TICK_US: Final = 1_000_000 / os.sysconf("SC_CLK_TCK")
_PARTITIONS: Final = 4


@dataclass(slots=True)
class World:
    directory: Path
    server: Server
    client: Any
    spark: Any
    rows: int
    jvm: int

    @property
    def address(self) -> dict[str, str]:
        return {"bootstrap.servers": f"127.0.0.1:{self.server.port}"}

    def read(self, way: Way) -> Any:
        return frame(self.spark, way, self.directory, self.server.port)

    def measure(self, rows: int, work: Callable[[], object]) -> Measured:
        """How long some work takes, and how many microseconds each kind of process works per row."""
        before, started = self._worked(), time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        jvm, python, broker = ((now - then) / rows for now, then in zip(self._worked(), before, strict=True))
        return Measured(rows / seconds, jvm, python, broker)

    def _worked(self) -> tuple[float, float, float]:
        """Microseconds: the JVM, the Python workers that it has started, the broker."""
        jvm, reaped = _processor_us(self.jvm)
        workers = sum(sum(_processor_us(pid)) for pid in family(self.jvm) if pid != self.jvm)
        return jvm, reaped + workers, self.server.usage().cpu_ns / 1000


def _processor_us(pid: int) -> tuple[float, float]:
    """Of a process, and of its children that are gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    user, system, reaped_user, reaped_system = map(int, fields[11:15])
    return _TICK_US * (user + system), _TICK_US * (reaped_user + reaped_system)


@contextmanager
def running(directory: Path, rows: int) -> Iterator[World]:
    """Everything that is measured, with `rows` messages in the broker and the same rows in uncompressed Parquet."""
    (directory / "broker").mkdir()
    server = Millstream("interval").start(directory / "broker", Level.NORMAL)
    try:
        with millstream.connect(f"127.0.0.1:{server.port}", timeout_s=120) as client:
            client.create_topic(SCANNED, _PARTITIONS, config={"fsync": "interval"})
            fill(client, SCANNED, rows)
            spark = open_session(directory)
            try:
                jvm = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
                world = World(directory, server, client, spark, rows, jvm)
                world.read("broker").write.option("compression", "none").parquet(str(directory / "parquet"))
                yield world
            finally:
                spark.stop()
    finally:
        server.stop()
