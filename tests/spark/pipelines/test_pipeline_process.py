"""`millstream pipeline run` as a process of its own: it survives its JVM, and ends in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.spark.world import World

pytestmark = pytest.mark.slow

#: For a machine that has other things to do, too.
PATIENCE_S = 180.0


class Process:
    """A pipeline that runs, and the batches that it tells of."""

    def __init__(self, file: Path) -> None:
        self._batches: Queue[dict[str, Any] | None] = Queue()
        self.said: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millstream", "pipeline", "run", str(file), "--json", "--master", "local[2]"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._hear, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._batches.put(json.loads(line))
        self._batches.put(None)

    def _hear(self) -> None:
        assert self._process.stderr is not None
        self.said.extend(self._process.stderr)

    def batch(self) -> dict[str, Any]:
        done = self._batches.get(timeout=PATIENCE_S)
        assert done is not None, self.said
        return done

    def java(self) -> int:
        """The process of Spark itself."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        (found,) = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "java"]
        return found

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.mark.timeout(600)
def test_a_pipeline_survives_its_jvm_and_ends_in_order(world: World, tmp_path: Path) -> None:
    source = world.topic()
    file = tmp_path / "copy.yaml"
    file.write_text(f"""
name: copy
broker: {world.broker.address}
sources: {{orders: {{topic: {source}, options: {{startingOffsets: earliest}}}}}}
sinks: [{{topic: {source}.copy}}]
checkpoint: checkpoint
restart: {{pause: 100ms}}
""")
    world.publish(source, [b"1", b"2"])
    process = Process(file)
    try:
        assert process.batch()["rows"] == 2
        os.kill(process.java(), signal.SIGKILL)
        world.publish(source, [b"3"])
        assert process.batch()["batch"] == 1
        told = world.client.pipelines.show("copy")
        assert told.restarts == 1
        assert told.error
        assert process.end(signal.SIGTERM) == 0
    finally:
        process.close()
    assert world.client.pipelines.show("copy").state == "stopped"
    assert [message.value for message in world.client.browse(f"{source}.copy")] == [b"1", b"2", b"3"]
    assert any("copy: stopped" in line for line in process.said), process.said
