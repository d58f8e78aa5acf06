"""A pipeline that copies one topic into another while things are killed: at the end both must hold the same."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from millstream import connect
from millstream.client import Outgoing
from millstream.errors import MillstreamError, StartFailed
from millstream.spark.faults import VARIABLE
from millstream.spark.java import find_java
from millstream.testing.broker import BrokerProcess
from tests.spark.processes import PATIENCE_S, PipelineProcess, kill
from tests.spark.reading import read
from tests.waiting import eventually

__all__ = ["Copying", "contents", "message", "needs_java", "until"]

PARTITIONS = 3
AHEAD_MAX = 500
SOURCE, TARGET = "orders", "copies"
PIPELINE = f"""
name: copy
broker: {{address}}
checkpoint: checkpoint
sources: {{{{orders: {{{{topic: {SOURCE}, options: {{{{startingOffsets: earliest, maxOffsetsPerTrigger: 100}}}}}}}}}}}}
sinks: [{{{{topic: {TARGET}}}}}]
restart: {{{{attempts: 1000, pause: 50ms, longest: 500ms}}}}
"""


def needs_java() -> None:
    """Skips where Spark cannot start."""
    pytest.importorskip("pyspark")
    try:
        find_java()
    except StartFailed as problem:
        pytest.skip(str(problem))


def message(number: int) -> Outgoing:
    """Each is different, and all kinds are there: without a key, without a value, with headers or not."""
    return Outgoing(
        key=None if number % 3 == 0 else b"key %d" % (number % 7),
        value=None if number % 5 == 0 else b"value %d" % number,
        headers={"n": str(number)} if number % 2 == 0 or number % 5 == 0 else None,
    )


def contents(address: str, topic: str) -> Counter[Any]:
    """How often each message is in a topic."""
    rows = read({"bootstrap.servers": address, "subscribe": topic, "includeHeaders": "true"})
    return Counter(
        (row["key"], row["value"], tuple((each["key"], each["value"]) for each in row["headers"] or ())) for row in rows
    )


def until(condition: Callable[[], object], what: str) -> None:
    """Spark takes its time."""
    eventually(condition, what, within_s=PATIENCE_S)


class Copying:
    """A broker and a pipeline as processes, and somebody who publishes all the time."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._file = directory / "copy.yaml"
        self.checkpoint = directory / "checkpoint"
        self.faults = directory / "faults"
        self.faults.mkdir()
        self.broker = BrokerProcess(self._data).start()
        self.address = self.broker.address
        with connect(self.address) as client:
            client.create_topic(SOURCE, PARTITIONS)
            client.create_topic(TARGET, PARTITIONS)
        self._file.write_text(PIPELINE.format(address=self.address))
        self.published = 0
        self._over = threading.Event()
        self._publisher = threading.Thread(target=self._publish, daemon=True)
        self._publisher.start()
        self.pipeline = self.start_pipeline()

    def start_pipeline(self) -> PipelineProcess:
        self.pipeline = PipelineProcess(
            self._file,
            conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
            variables={VARIABLE: str(self.faults)},
        )
        return self.pipeline

    # --- who publishes ---------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """A broker that is killed leaves it open whether the last ones are stored: then others follow.

        Never far ahead of the copies, so that the end comes soon after the last kill.
        """
        number = 0
        while not self._over.is_set():
            try:
                with connect(self.address) as client:
                    while not self._over.wait(0.1):
                        if sum(client.offsets(SOURCE).values()) > sum(client.offsets(TARGET).values()) + AHEAD_MAX:
                            continue
                        some = [message(each) for each in range(number, number + 10)]
                        number += len(some)
                        client.publish_many(SOURCE, some)
                        self.published += len(some)
            except (MillstreamError, OSError):
                self._over.wait(0.1)

    # --- who is killed ---------------------------------------------------------------------------------------------

    def kill_broker(self) -> None:
        self.broker.kill()
        port = int(self.address.rpartition(":")[2])
        self.broker = BrokerProcess(self._data, port=port).start()

    def kill_driver(self) -> None:
        self.pipeline.kill()
        self.start_pipeline()

    def kill_java(self) -> None:
        """The pipeline itself starts another one."""
        java = self.pipeline.java()
        assert java, "there is nothing to kill"
        kill(java)

    def kill_worker(self, rng: random.Random) -> None:
        workers = self.pipeline.workers()
        assert workers, "there is nothing to kill"
        kill(rng.choice(workers))

    # --- how far it is ---------------------------------------------------------------------------------------------

    def batches_begun(self) -> int:
        return _last(self.checkpoint / "topics" / "offsets")

    def batches_done(self) -> int:
        return _last(self.checkpoint / "topics" / "commits")

    def work_on(self) -> None:
        """Until another batch is done."""
        before = self.batches_done()
        until(lambda: self.batches_done() > before, f"a batch after {before}; {self.pipeline.said[-5:]}")

    def finish(self) -> None:
        """Nothing more is published; let the pipeline come to its end."""
        self._over.set()
        self._publisher.join(PATIENCE_S)
        with connect(self.address) as client:
            wanted = sum(client.offsets(SOURCE).values())
            until(lambda: sum(client.offsets(TARGET).values()) >= wanted, f"{wanted} copies; {self.pipeline.said[-5:]}")

    def check(self) -> int:
        """All that was published is there, once.  Returns how much that is."""
        source, target = contents(self.address, SOURCE), contents(self.address, TARGET)
        assert not source - target, "nothing is missing"
        assert not target - source, "nothing is there twice"
        assert source.total() >= self.published > 0
        return source.total()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if not self.pipeline.ended:
            self.pipeline.kill()
        self.broker.kill()


def _last(directory: Path) -> int:
    """The last batch of which a checkpoint has this."""
    names = [file.name for file in directory.iterdir()] if directory.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)
