"""The same pipeline on clusters of Spark: with what was shipped, and with an executor that is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.spark.faults import VARIABLE
from millstream.testing.broker import BrokerForTests
from tests.spark.cluster.shipping import SHIPPED, make_packages
from tests.spark.cluster.standalone import StandaloneCluster, executors_below
from tests.spark.copying import contents, message, needs_java, until
from tests.spark.processes import PATIENCE_S, PipelineProcess, command_of, descendants
from tests.spark.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROWS = 600
#: What a session that stays on this machine has by itself.
HERE = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.executor.memory": "512m"}
PIPELINE = """
name: marked
broker: {address}
checkpoint: checkpoint
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest, maxOffsetsPerTrigger: 100}}}}}}
steps: [{{python: "marking:mark"}}]
sinks: [{{topic: {target}}}]
"""
#: Beside the pipeline: its executors must get this, too.
MODULE = """
from pyspark.sql import functions as F

MARK = b" was here"

def append(value):
    return value and bytes(value) + MARK

def mark(rows):
    return rows.withColumn("value", F.udf(append, "binary")("value")).drop("partition", "timestamp")
"""


@pytest.fixture(autouse=True)
def _java() -> None:
    needs_java()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    needs_java()
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    with BrokerForTests(tmp_path / "data") as broker:
        yield World(broker, tmp_path / "data")


class Marking:
    """A pipeline whose tasks can be stopped, and the file of it."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.source, self.target = world.topic(4), world.topic(3)
        self.directory = directory / "pipeline"
        self.faults = directory / "faults"
        self.directory.mkdir()
        self.faults.mkdir()
        self._file = self.directory / "marked.yaml"
        (self.directory / "marking.py").write_text(MODULE)
        self._file.write_text(PIPELINE.format(address=world.broker.address, source=self.source, target=self.target))
        world.publish(self.source, [message(number) for number in range(ROWS)])

    def run(self, master: str, conf: dict[str, str], directory: Path) -> PipelineProcess:
        faults = {f"spark.executorEnv.{VARIABLE}": str(self.faults)}
        return PipelineProcess(
            self._file, "--available-now", master=master, conf={**HERE, **faults, **conf}, directory=directory
        )

    def kill_in_the_middle(self, executor: int) -> None:
        """A task kills an executor when it has staged its messages: its own one, or the one beside it."""
        armed = self.directory / "after_stage"
        armed.write_text(f"kill {executor}")
        armed.rename(self.faults / armed.name)
        until(lambda: not (self.faults / armed.name).exists(), "the kill")
        until(lambda: command_of(executor) in ([""], ["", ""]), f"the end of executor {executor}")

    def check(self) -> None:
        expected = Counter(
            (key, value and value + b" was here", headers)
            for key, value, headers in contents(self.world.broker.address, self.source)
        )
        assert expected.total() == ROWS
        assert contents(self.world.broker.address, self.target) == expected


def test_a_pipeline_on_a_standalone_cluster_uses_what_was_shipped_and_does_not_mind_a_lost_executor(
    cluster: StandaloneCluster, own_world: World, tmp_path: Path
) -> None:
    """As the guide ships it.  Nothing below an executor is run by the Python of the driver."""
    make_packages(tmp_path)
    marking = Marking(own_world, tmp_path)
    with marking.run(cluster.master, SHIPPED, tmp_path) as process:
        assert 0 < process.batch()["rows"] <= 100
        executors = cluster.executors()
        assert len(executors) == 2
        programs = {command_of(pid)[0] for executor in executors for pid in descendants(executor)}
        assert programs
        assert not any(program.startswith(sys.prefix) for program in programs), programs
        marking.kill_in_the_middle(executors[0])
        assert process.wait() == 0, process.said
        assert sum(batch["rows"] for batch in process.done) == ROWS
    marking.check()


def test_a_pipeline_on_a_local_cluster_does_not_mind_a_lost_executor(own_world: World, tmp_path: Path) -> None:
    marking = Marking(own_world, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with marking.run("local-cluster[2,1,1024]", {"spark.executor.memory": "1g"}, elsewhere) as process:
        assert 0 < process.batch()["rows"] <= 100
        executors = executors_below(process.pid)
        assert len(executors) == 2
        marking.kill_in_the_middle(executors[0])
        assert process.wait() == 0, process.said
    marking.check()


def test_any_session_reads_and_writes_on_a_cluster_that_has_the_package(
    cluster: StandaloneCluster, own_world: World, tmp_path: Path
) -> None:
    """A batch and a stream of a session that is none of ours; the Python that it names has the package installed."""
    source, target = own_world.topic(4), own_world.topic(2)
    own_world.publish(source, [message(number) for number in range(ROWS)])
    job = Path(__file__).with_name("plain_job.py")
    variables = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    ended = subprocess.run(
        [
            sys.executable,
            str(job),
            cluster.master,
            own_world.broker.address,
            source,
            target,
            str(tmp_path / "checkpoint"),
        ],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert told == {"read": ROWS, "executors": 2}
    once = contents(own_world.broker.address, source)
    assert contents(own_world.broker.address, target) == once + once
