"""Pipelines from a shell, as far as they need no Spark: `millstream pipeline`, against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests
from millstream.wire.pipeline_calls import PipelineWish, ReportPipeline
from millstream.wire.stage_calls import stage_address
from tests.e2e.command_line import CommandLine, keep_logs_out
from tests.native import NativeClient

GOOD = "name: copy\nsources: {a: {topic: orders}}\nsinks: [{topic: copies}]\ncheckpoint: here\n"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests() as running:
        keep_logs_out()
        yield running


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch, broker.address, "pipeline")


def report(broker: BrokerForTests, state: str, name: str = "clean-orders", **more: object) -> PipelineWish:
    told = ReportPipeline(
        name=name,
        run="run-1",
        state=state,
        sources=["orders"],
        sinks=["clean"],
        rows=1234,
        rows_per_s=56.4,
        lag=7,
        **more,
    )  # type: ignore[arg-type]
    wish: PipelineWish = broker.connect().call(told, PipelineWish)
    return wish


def test_a_pipeline_that_reports_is_listed_looked_at_stopped_and_forgotten(
    run: CommandLine, broker: BrokerForTests
) -> None:
    assert "no pipeline has reported" in run("list", errors=True)
    report(broker, "running", batch=3, batch_ms=250, host="spark-1", pid=17, definition={"description": "Cleans."})
    shown = run("list")
    for word in ("clean-orders", "running", "orders", "1,234", "56", "7"):
        assert word in shown
    assert json.loads(run("list", "--json"))[0]["sinks"] == ["clean"]
    shown = run("status", "clean-orders")
    assert "3, took 250 ms" in shown
    assert "spark-1, process 17" in shown
    assert "stops after the batch" in run("stop", "clean-orders")
    assert "told to stop" in run("status", "clean-orders")
    assert report(broker, "running").stop
    assert "is running: stop it first" in run("forget", "clean-orders", "--yes", code=1, errors=True)
    report(broker, "failed", error="a row fails in step 1")
    assert "a row fails in step 1" in run("list")
    assert "does not run: it is failed" in run("stop", "clean-orders")
    assert "forgot" in run("forget", "clean-orders", "--yes")
    assert "no pipeline 'clean-orders' has reported" in run("status", "clean-orders", code=1, errors=True)


def test_what_is_staged_can_be_seen_and_thrown_away(run: CommandLine, broker: BrokerForTests) -> None:
    assert "nothing is staged" in run("stages", errors=True)
    with NativeClient(broker.address) as spark:
        spark.call("topic.create", name="reports")
        stage = spark.call("stage.open", query="q-1", batch=3)["stage"]
        spark.publish(stage_address(stage, "reports"), [b"a", b"b"])
        part = {"stage": spark.call("stage.open", query="done", batch=0)["stage"], "batches": 0, "messages": 0}
        spark.call("stage.publish", query="done", batch=0, stages=[part])
    shown = run("stages")
    for word in ("q-1", "reports"):
        assert word in shown
    assert "done" not in shown
    (query,) = json.loads(run("stages", "q-1", "--json"))
    assert (query["query"], query["stages"][0]["batch"], query["stages"][0]["messages"]) == ("q-1", 3, 2)
    assert "Add --yes" in run("abort", "q-1", "3", code=2, errors=True)
    assert run("abort", "q-1", "3", "--yes").strip() == "forgot 1 stage of batch 3"
    assert "is published, and stays so" in run("abort", "done", "0", "--yes")
    answer = json.loads(run("abort", "q-1", "3", "--yes", "--json"))
    assert answer == {"query": "q-1", "batch": 3, "aborted": 0, "published": False}
    assert "nothing is staged" in run("stages", errors=True)


def test_what_a_pipeline_says_about_itself_is_shown_and_not_obeyed(run: CommandLine, broker: BrokerForTests) -> None:
    report(broker, "finished", "loud", definition={"description": "a[/b]\x1b[2Jc"})
    assert r"a[/b]\x1b[2Jc" in run("status", "loud", errors=True)
    run("forget", "loud", "--yes")


def test_files_are_validated_without_spark_and_without_a_broker(run: CommandLine, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("topic: copies", "topik: copies").replace("{a:", "{'a b':"))
    assert run("validate", str(good)).strip() == f"{good}: copy reads orders and writes copies (topics)"
    report = tmp_path / "report.yaml"
    report.write_text("name: why\nready: dlq-report\noptions: {report: why.html}\n")
    assert run("validate", str(report)).strip().endswith(f" and writes {tmp_path / 'why.html'}")
    shown = run("validate", str(good), str(bad), code=2)
    assert f"{bad} line 3, sink 1, topik: there is no key 'topik' here; did you mean 'topic'?" in shown
    (first, second) = json.loads(run("validate", str(good), str(bad), "--json", code=2))
    assert (first["valid"], second["valid"], len(second["mistakes"])) == (True, False, 1)
    assert "cannot be read: No such file" in run("validate", str(tmp_path / "none.yaml"), code=2, errors=True)


def test_a_file_with_a_mistake_is_not_run(run: CommandLine, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("sinks:", "snks:"))
    said = run("run", str(bad), code=2, errors=True)
    assert "has 2 mistakes" in said
    assert "there is no key 'snks' here; did you mean 'sinks'?" in said
    bad.write_text(GOOD)
    assert "exclude each other" in run("run", str(bad), "--once", "--available-now", code=2, errors=True)


def test_who_has_not_installed_what_spark_needs_is_told_how(tmp_path: Path) -> None:
    file = tmp_path / "copy.yaml"
    file.write_text(GOOD)
    program = f"""
import sys
sys.modules.update(pyspark=None, pyarrow=None, numpy=None)  # as if they were not there
from millstream.cli.main import main
for words in (["doctor"], ["run", {str(file)!r}], ["validate", {str(file)!r}]):
    try:
        main(["pipeline", *words])
    except SystemExit as end:
        print(end.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split()[-3:] == ["1", "1", "1"], done.stdout + done.stderr
    assert "PySpark is not installed: `pip install" in done.stdout
    assert done.stderr.count("pip install 'millstream[spark,jdk]'") == 2
