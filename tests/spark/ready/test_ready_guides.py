"""What docs/guide/spark.md and the examples say to Spark, said to Spark."""

from __future__ import annotations

import importlib.util
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream.client import Outgoing
from millstream.spark.pipelines.definition import STEP_KINDS
from millstream.spark.pipelines.loading import check_pipeline
from millstream.spark.pipelines.ready.kinds import KINDS
from tests.e2e.docs.pages import ROOT, steps
from tests.spark.world import World

MOMENT = datetime(2026, 11, 16, 8, tzinfo=UTC)


def orders(world: World) -> None:
    messages = [
        Outgoing(json={"customer": f"c-{n}", "amount": n, "page": f"/{n % 2}"}, timestamp=MOMENT + timedelta(minutes=n))
        for n in range(180)
    ]
    for topic in ("orders", "views"):
        world.client.create_topic(topic, 2)
        world.publish(topic, messages)


def test_the_guide_to_spark_can_be_followed(
    spark: Any, own_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders(own_world)
    monkeypatch.setattr("millstream.spark.session", lambda: spark)
    names: dict[str, Any] = {}
    for step in steps("docs/guide/spark.md"):
        if step.language == "python":
            text = step.text.replace("localhost:9092", own_world.broker.address)
            text = text.replace("checkpoints/", f"{tmp_path}/checkpoints/")
            exec(compile(text, step.place, "exec"), names)
    names["query"].stop()
    assert names["orders"].count() == 180
    totals = spark.read.format("millstream").options(**own_world.options("hourly-totals")).load()
    assert [json.loads(row["value"])["total"] for row in totals.collect()] == [1770.0]  # the others may have late ones
    assert sum(row["committed"] for row in table(spark, own_world, "groups").collect()) == 180
    assert names["claimed"].isStreaming


def table(spark: Any, world: World, name: str) -> Any:
    return spark.read.format("millstream").options(**world.options(table=name)).load()


@pytest.mark.slow
def test_the_job_that_was_moved_from_kafka_counts(spark: Any, own_world: World, tmp_path: Path) -> None:
    orders(own_world)
    spec = importlib.util.spec_from_file_location("kafka_job_moved", ROOT / "examples/kafka_job_moved.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(own_world.broker.address, str(tmp_path / "checkpoint"))
    counts = spark.read.format("millstream").options(**own_world.options("views-by-minute")).load().collect()
    assert len(counts) == 178  # the last minutes may have late ones
    assert {bytes(row["key"]) for row in counts} == {b"/0", b"/1"}


def around(given: list[dict[str, Any]]) -> str:
    """A file with these steps."""
    sink = {"topic_column": "route"} if "route" in given[-1] else {"topic": "made"}
    sources = {"orders": {"topic": "orders"}, "customers": {"parquet": "customers"}}
    file = {"name": "shown", "checkpoint": "c", "sources": sources, "steps": given, "sinks": [sink]}
    return yaml.safe_dump(file, sort_keys=False)  # the first step reads the first source


def test_every_file_that_the_guide_to_pipelines_shows_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/guide/pipelines.md").read_text()
    (tmp_path / "customers").mkdir()
    shown = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("ORDERS_SALT", "secret")
    (tmp_path / "shop.py").write_text("def enriched(orders, customers, *, currency): ...")
    (tmp_path / "order.avsc").write_text('{"type": "record", "name": "Order", "fields": []}')
    files = [each for each in shown if not each.startswith("- ")]
    for each in [*files, *(around(yaml.safe_load(each)) for each in shown if each not in files)]:
        checked, mistakes = check_pipeline(each, tmp_path)
        assert checked is not None, (each, mistakes)
    assert {yaml.safe_load(each).get("ready") for each in files} == {None, *KINDS}
    for kind in KINDS:
        assert f"### {kind}\n" in text
        assert f"pipeline-{kind}.png" in text


def test_the_guide_to_pipelines_shows_every_step() -> None:
    text = (ROOT / "docs/guide/pipelines.md").read_text()
    shown = re.findall(r"^```yaml\n(- .*?)^```", text, re.MULTILINE | re.DOTALL)
    keys = {key for each in shown for step in yaml.safe_load(each) for key in step}
    assert {"dead_letter", *STEP_KINDS} <= keys
