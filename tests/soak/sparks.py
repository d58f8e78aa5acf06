"""A pipeline of Spark that copies a topic into another one all the time, exactly once, and can be killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from tests.soak.traffic.streams import COPIES, TOPIC
from tests.spark.processes import PipelineProcess, kill

__all__ = ["SparkCopy", "can_start"]

_PIPELINE: Final = """
name: soak
broker: {address}
checkpoint: checkpoint
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest, maxOffsetsPerTrigger: 5000}}}}}}
sinks: [{{topic: {target}}}]
restart: {{attempts: 100000, pause: 100ms, longest: 2s}}
"""


def can_start() -> str:
    """Why Spark cannot start here; nothing when it can."""
    try:
        import pyspark  # noqa: F401

        from millstream.spark.java import find_java

        find_java()
    except Exception as problem:
        return str(problem)
    return ""


class SparkCopy:
    """One pipeline, again and again."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder / "spark"
        self._folder.mkdir()
        self._file = self._folder / "copy.yaml"
        self._file.write_text(_PIPELINE.format(address=address, source=TOPIC, target=COPIES))
        self._process: PipelineProcess | None = None
        #: Batches of pipelines that are gone.
        self._batches = 0

    def start(self) -> None:
        self._process = PipelineProcess(
            self._file,
            master="local[1]",
            conf={
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.driver.memory": "768m",
            },
            directory=self._folder,
        )

    @property
    def process(self) -> PipelineProcess:
        assert self._process is not None
        return self._process

    @property
    def batches(self) -> int:
        return self._batches + (len(self._process.done) if self._process is not None else 0)

    @property
    def ended(self) -> bool:
        return self.process.ended

    @property
    def last_words(self) -> str:
        return " ".join(line.strip() for line in self.process.said[-3:])

    def kill_worker(self, rng: random.Random) -> str:
        """A process of Python that has a part in every batch."""
        workers = sorted(self.process.workers())
        if not workers:
            return "there was none"
        kill(rng.choice(workers))
        return ""

    def restart(self) -> None:
        """kill -9 of the driver, and another one."""
        self.kill()
        self.start()

    def kill(self) -> None:
        if self._process is not None:
            if not self._process.ended:
                self._process.kill()
            self._batches += len(self._process.done)
            self._process = None

    def end(self) -> None:
        self.kill()
