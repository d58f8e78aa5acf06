"""Pipelines from a shell, as far as they need no Spark: `millstream pipeline`, against a real broker."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.cli.main import main
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests
from millstream.wire.pipeline_calls import PipelineWish, ReportPipeline

Run = Callable[..., str]
GOOD = "name: copy\nsources: {a: {topic: orders}}\nsinks: [{topic: copies}]\ncheckpoint: here\n"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests() as running:
        set_up_logs(LogSettings(), io.StringIO())  # it shares this process and would log into the output
        yield running


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `millstream pipeline ARGUMENTS...` and returns what it says; fails unless it ends with the code expected."""
    monkeypatch.setenv("MILLSTREAM_BROKER", broker.address)

    def invoke(*arguments: str, code: int = 0, errors: bool = False) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["pipeline", *arguments])
        shown = capsys.readouterr()
        assert caught.value.code == code, shown
        return shown.err if errors else shown.out

    return invoke


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


def test_a_pipeline_that_reports_is_listed_looked_at_stopped_and_forgotten(run: Run, broker: BrokerForTests) -> None:
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


def test_files_are_validated_without_spark_and_without_a_broker(run: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("topic: copies", "topik: copies").replace("{a:", "{'a b':"))
    assert run("validate", str(good)).strip() == f"{good}: copy reads orders and writes copies (topics)"
    shown = run("validate", str(good), str(bad), code=2)
    assert f"{bad} line 3, sink 1, topik: there is no key 'topik' here; did you mean 'topic'?" in shown
    (first, second) = json.loads(run("validate", str(good), str(bad), "--json", code=2))
    assert (first["valid"], second["valid"], len(second["mistakes"])) == (True, False, 1)
    assert "cannot be read: No such file" in run("validate", str(tmp_path / "none.yaml"), code=2, errors=True)


def test_a_file_with_a_mistake_is_not_run(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("sinks:", "snks:"))
    said = run("run", str(bad), code=2, errors=True)
    assert "has 2 mistakes" in said
    assert "there is no key 'snks' here; did you mean 'sinks'?" in said
    bad.write_text(GOOD)
    assert "exclude each other" in run("run", str(bad), "--once", "--available-now", code=2, errors=True)
