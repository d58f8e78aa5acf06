"""The project in examples/declarative_pipeline, run by Spark's own program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.client import Outgoing
from millstream.spark.java import find_java
from tests.spark.world import World

EXAMPLE = Path(__file__).parents[3] / "examples/declarative_pipeline"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_declarative_pipeline_goes_on_where_it_was(own_world: World, tmp_path: Path) -> None:
    for package in ("grpc", "grpc_status", "pandas", "zstandard"):
        pytest.importorskip(package, reason="Spark's pipelines need `pip install 'pyspark[pipelines]'`")
    import pyspark

    home, project = Path(pyspark.__file__).parent, tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    definition = project / "spark-pipeline.yml"
    text = definition.read_text()
    assert "file:///tmp/millstream-declarative-pipeline" in text
    definition.write_text(text.replace("/tmp/millstream-declarative-pipeline", str(tmp_path / "storage")))
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "MILLSTREAM_BROKER": own_world.broker.address,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(project / "conf"),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    own_world.client.create_topic("orders", 2)
    own_world.client.create_topic("large-orders")
    for large in (100, 200):
        own_world.publish("orders", [Outgoing(json={"customer": f"c-{n % 5}", "amount": n}) for n in range(200)])
        command = [str(home / "bin/spark-pipelines"), "run"]
        ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stderr[-2000:]
        with own_world.client.stream("large-orders", timeout_s=2) as stream:
            assert len(list(stream)) == large
