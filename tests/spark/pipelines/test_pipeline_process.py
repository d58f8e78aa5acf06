"""`millstream pipeline run` as a process of its own: it survives its JVM, and ends in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.spark.processes import PipelineProcess
from tests.spark.world import World

pytestmark = pytest.mark.slow


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
    with PipelineProcess(file) as process:
        assert process.batch()["rows"] == 2
        os.kill(process.java(), signal.SIGKILL)
        world.publish(source, [b"3"])
        assert process.batch()["batch"] == 1
        told = world.client.pipelines.show("copy")
        assert told.restarts == 1
        assert told.error
        assert process.end(signal.SIGTERM) == 0
    assert world.client.pipelines.show("copy").state == "stopped"
    assert [message.value for message in world.client.browse(f"{source}.copy")] == [b"1", b"2", b"3"]
    assert any("copy: stopped" in line for line in process.said), process.said
