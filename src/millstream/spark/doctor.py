"""Can Spark start here, and does it read?  Every question is answered by doing it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from millstream.errors import MillstreamError, StartFailed
from millstream.records import encode_batch
from millstream.spark.java import find_java
from millstream.spark.session import session
from millstream.wire import calls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.offsets import Extent, Place

__all__ = ["Finding", "examine"]

#: As in pyproject.toml; from the first on, and before the second.
_PACKAGES: Final = {"pyspark": ((4, 2), (4, 4)), "pyarrow": ((18,), (27,)), "numpy": ((1, 26), (3,))}
_TOPIC: Final = "doctor"
_MESSAGES: Final = 1000
_START_S: Final = 30
_INSTALL: Final = "pip install 'millstream[spark]'"


@dataclass(frozen=True)
class Finding:
    """What one question found, and what to do about it."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    next: str = ""


def examine(options: dict[str, str] | None = None) -> Iterator[Finding]:
    """Look at packages and Java, start Spark, and read a batch from the broker that the options of a read name.

    Without any from a broker that lives as long as that takes.  What needs something that failed is left out.
    """
    packages = [_package(name) for name in _PACKAGES]
    yield from packages
    java = _java()
    yield java
    if any(each.verdict == "fail" for each in (*packages, java)):
        return
    spark, started = _start()
    yield started
    if spark is None:
        return
    try:
        if options:
            yield _read(spark, options)
        else:
            yield _read_own(spark)
    finally:
        with _quiet():
            spark.stop()


def _package(name: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", "is not installed", _INSTALL)
    first, before = _PACKAGES[name]
    if first <= tuple(map(int, re.findall(r"\d+", version)[:2])) < before:
        return Finding(name, "ok", version)
    wanted = f"{'.'.join(map(str, first))} or newer, before {'.'.join(map(str, before))}"
    return Finding(name, "warn", f"{version} was not tried with this version", f"Install {wanted}.")


def _java() -> Finding:
    try:
        java = find_java()
    except StartFailed as problem:
        return Finding("java", "fail", str(problem), "Install Java, or pip install 'millstream[jdk]'.")
    return Finding("java", "ok", f"Java {java.version} from {java.origin}: {java.home}")


def _start() -> tuple[SparkSession | None, Finding]:
    began_s = time.monotonic()
    with _quiet() as heard:
        try:
            spark = session("millstream-doctor", master="local[2]")
        except Exception as problem:  # whatever Spark raises, the question is answered
            lines = [line for line in heard.read_text(errors="replace").splitlines() if line.strip()]
            return None, Finding("spark", "fail", _sentence(problem, lines), "See what Java says above.")
    return spark, Finding("spark", "ok", f"Spark {spark.version} started in {time.monotonic() - began_s:.1f} s")


def _sentence(problem: Exception, lines: list[str]) -> str:
    telling = [line for line in lines if re.search(r"error|exception|not found", line, re.IGNORECASE)]
    return (telling or lines or [str(problem)])[0].strip()[:300]


# --- reading -------------------------------------------------------------------------------------------------------


def _read(spark: SparkSession, options: dict[str, str]) -> Finding:
    """A batch of the fullest partition that can be read."""
    try:
        place, extent = _fullest(options)
    except MillstreamError as problem:
        return Finding("read", "fail", str(problem), problem.remedy)
    if place is None or extent is None:
        return Finding("read", "warn", "the broker answers, but has no messages to read", "Publish some.")
    first = max(extent.start, extent.end - _MESSAGES)
    chosen = {
        **options,
        "assign": json.dumps({place.topic: [place.partition]}),
        "startingOffsets": json.dumps({place.topic: {str(place.partition): first}}),
        "endingOffsets": json.dumps({place.topic: {str(place.partition): extent.end}}),
        "failOnDataLoss": "false",
    }
    began_s = time.monotonic()
    with _quiet():
        try:
            rows = spark.read.format("millstream").options(**chosen).load().count()
        except Exception as problem:
            return Finding("read", "fail", str(problem).splitlines()[0][:300], "See the error of the read.")
    took_s = time.monotonic() - began_s
    return Finding("read", "ok", f"{rows} messages of {place} in {took_s:.1f} s")


def _fullest(options: dict[str, str]) -> tuple[Place | None, Extent | None]:
    from millstream.spark.log_reader import open_log  # here: packages that are missing are something to be told
    from millstream.spark.options import SourceOptions

    extents = open_log(SourceOptions.of({**options, "subscribePattern": ".*"}, streaming=False)).survey()
    place = max(extents, key=lambda each: extents[each].end - extents[each].start, default=None)
    if place is None or extents[place].end == extents[place].start:
        return None, None
    return place, extents[place]


def _read_own(spark: SparkSession) -> Finding:
    with tempfile.TemporaryDirectory(prefix="millstream-doctor-") as directory:
        try:
            with _broker(Path(directory)) as address:
                options = {"bootstrap.servers": address}
                _publish(options)
                return _read(spark, options)
        except MillstreamError as problem:
            return Finding("read", "fail", f"a broker of our own: {problem}", "Look at `millstream doctor`.")


@contextmanager
def _broker(directory: Path) -> Iterator[str]:
    """A broker as a process of its own, on any free port."""
    command = [sys.executable, "-m", "millstream", "serve", "--data", str(directory / "data"), "--log-level", "error"]
    for door in ("--port", "--http-port", "--mqtt-port"):
        command += [door, "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening on "):
                yield line.split()[2]
                return
        raise StartFailed(f"it ended with {process.wait()} before it listened")
    finally:
        process.terminate()
        process.wait(_START_S)


def _publish(options: dict[str, str]) -> None:
    from millstream.spark.connection import connect, published
    from millstream.spark.options import SourceOptions

    connection = connect(SourceOptions.of({**options, "subscribe": _TOPIC}, streaming=False).target)
    connection.call(calls.CreateTopic(name=_TOPIC, if_missing=True))
    batch = encode_batch([b"%d" % number for number in range(_MESSAGES)], base_timestamp_us=time.time_ns() // 1000)
    published(connection.begin_publish(_TOPIC, 0, bytes(batch)).wait(time.monotonic() + _START_S))


@contextmanager
def _quiet() -> Iterator[Path]:
    """What Java and Spark's workers say goes to a file: it is for when something fails."""
    handle, name = tempfile.mkstemp(prefix="millstream-doctor-")
    path, standard = Path(name), 2
    sys.stderr.flush()
    kept = os.dup(standard)
    os.dup2(handle, standard)
    try:
        yield path
    finally:
        sys.stderr.flush()
        os.dup2(kept, standard)
        os.close(kept)
        os.close(handle)
        with suppress(OSError):
            path.unlink()
