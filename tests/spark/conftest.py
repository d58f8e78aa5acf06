"""One Spark session and one broker for all tests of this room: starting them takes longer than most tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from millstream.errors import StartFailed
from millstream.spark import session
from millstream.spark.faults import VARIABLE
from millstream.spark.java import find_java
from millstream.testing.broker import BrokerForTests
from tests.spark.world import World

if TYPE_CHECKING:
    from tests.spark.claimed import Query

#: Spark starts in the first test, and what becomes of that becomes of all: a busy machine has time for it.
PATIENCE_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a session can be chosen, or left out, by their marker.

    They go first, because together they take longest: where there are several processes, they share one.  See
    tests/scheduling.py.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PATIENCE_S))
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory in which a file makes Spark's own processes fail; see millstream.spark.faults."""
    directory = tmp_path_factory.mktemp("faults")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(directory)
    yield directory
    os.environ.pop(VARIABLE)
    if before is not None:
        os.environ[VARIABLE] = before


#: Most of what Spark does here it does once, for a few rows: what makes it fast in the long run only takes time.
BRIEFLY = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.default.parallelism": "1",
}
#: The same for Java, which looks through all classes that it loads, and for garbage each time that there are more.
JAVA_BRIEFLY = (
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xms512m", "-Xmn256m", "-XX:MetaspaceSize=256m"),
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, faults: Path, pytestconfig: pytest.Config) -> Iterator[Any]:
    """`local[2]`, as `millstream.spark.session` makes it.  Skips without Java; MILLSTREAM_NEEDS_SPARK=1 insists.

    In the slow suite Spark compiles and adapts its queries as it does for everybody.
    """
    try:
        pytest.importorskip("pyspark")
        find_java()
    except (StartFailed, pytest.skip.Exception) as problem:
        if os.environ.get("MILLSTREAM_NEEDS_SPARK"):
            raise AssertionError(f"MILLSTREAM_NEEDS_SPARK is set, but: {problem}") from None
        pytest.skip(f"tests with Spark need PySpark and Java: {problem}")
    scratch = tmp_path_factory.mktemp("spark")
    # Once a query has failed there are loggers of PySpark's own kind to which pytest gives its handler, too, for all
    # tests that follow in this process, and they would have it write JSON.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("pyspark.logger.PySparkLogger.addHandler", logging.Logger.addHandler)
    started = session(
        "millstream-tests",
        master="local[2]",
        conf={
            "spark.driver.extraJavaOptions": " ".join((*JAVA_BRIEFLY, f"-Dderby.system.home={scratch}")),
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.local.dir": str(scratch / "local"),
            "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
            **(BRIEFLY if pytestconfig.option.markexpr == "not slow" else {}),
        },
    )
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()
    monkeypatch.undo()


@pytest.fixture(scope="session")
def _shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("broker") / "data"
    with BrokerForTests(data) as broker:
        yield World(broker, data)


@pytest.fixture
def world(_shared_world: World) -> World:
    """In which nothing is logged, as long as the test takes: others in this process want to see what is."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return _shared_world


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Query]]:
    """Of those that claim, which wait for nobody; they are stopped in the end."""
    monkeypatch.setattr("millstream.spark.claiming._POLL_S", 0.0)
    monkeypatch.setattr("millstream.spark.claiming._PATIENCE_S", 0.0)
    made: list[Query] = []
    yield made
    for query in made:
        query.reader.stop()
