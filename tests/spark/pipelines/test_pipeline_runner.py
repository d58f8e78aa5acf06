"""The life of a run, with queries that do what a test says.  No Spark, no waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.cli.pipeline_run import _standing
from millstream.errors import ConfigInvalid, ConnectionLost, InternalError, MessageNotFound, MillstreamError
from millstream.spark.options import Target
from millstream.spark.pipelines import compiling
from millstream.spark.pipelines.graph import queries_of
from millstream.spark.pipelines.loading import Checked, check_pipeline
from millstream.spark.pipelines.progress import BatchDone, Standing
from millstream.spark.pipelines.reporting import Heartbeat, Reporter
from millstream.spark.pipelines.runner import Runner
from millstream.testing.broker import BrokerForTests

FILE = """
name: clean
sources: {orders: {topic: orders}}
sinks: [{topic: clean}]
checkpoint: here
restart: {attempts: 2, pause: 1s, longest: 10s}
"""


def batch(number: int, rows: int = 10) -> dict[str, Any]:
    source = {"startOffset": {"o": {"0": 0}}, "endOffset": {"o": {"0": rows}}, "latestOffset": {"o": {"0": 99}}}
    return {"batchId": number, "sources": [source], "durationMs": {"addBatch": 1, "triggerExecution": 100}}


class FakeQuery:
    """A query that has done some batches, and is then active, over, or has failed."""

    def __init__(self, batches: int = 0, *, failure: str = "", over: bool = False) -> None:
        self.recentProgress = [batch(number) for number in range(batches)]
        self._failure = failure
        self.isActive = not (failure or over)
        self.busy = False
        self.stopped = 0

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        return self.recentProgress[-1] if self.recentProgress else None

    @property
    def status(self) -> dict[str, bool]:
        return {"isDataAvailable": self.busy, "isTriggerActive": self.busy}

    def exception(self) -> Exception | None:
        return RuntimeError(self._failure) if self._failure else None

    def stop(self) -> None:
        self.stopped += 1
        self.isActive = False


class FakeJob:
    """A query that is no stream: it writes its rows, or it fails."""

    query = SimpleNamespace(is_stream=False)

    def __init__(self, name: str, *failures: str | MillstreamError) -> None:
        self.name = name
        self._failures = list(failures)
        self.runs: list[str] = []
        self.on_run: Callable[[], None] = lambda: None
        self.was_stopped = False

    def run_once(self, run: str, stopped: Callable[[], bool]) -> int:
        self.runs.append(run)
        self.on_run()
        self.was_stopped = stopped()
        if self._failures:
            failure = self._failures.pop(0)
            raise RuntimeError(failure) if isinstance(failure, str) else failure
        return 5


class Stage:
    """Everything around a runner."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, attempts: Sequence[Sequence[FakeQuery | FakeJob] | Exception]
    ) -> None:
        checked, mistakes = check_pipeline(FILE, Path("/work"))
        assert not mistakes
        assert checked is not None
        self.checked: Checked = checked
        self.attempts = iter(attempts)
        self.triggers: list[dict[str, Any]] = []
        self.states: list[str] = []
        self.told = 0
        self.batches: list[BatchDone] = []
        self.reports: list[tuple[float, str]] = []
        self.wish = False
        self.now_s = 0.0
        self.each_sleep: Callable[[], None] = lambda: None
        monkeypatch.setattr(compiling, "compile_pipeline", self._compile)

    def _compile(self, _spark: Any, _checked: Any) -> list[Any]:
        attempt = next(self.attempts)
        if isinstance(attempt, Exception):
            raise attempt
        jobs = [each for each in attempt if isinstance(each, FakeJob)]
        if jobs:
            return jobs

        def start(query: FakeQuery) -> Callable[[dict[str, Any]], FakeQuery]:
            return lambda trigger: (self.triggers.append(trigger), query)[1]

        return [
            SimpleNamespace(
                name=f"q{number}", query=SimpleNamespace(is_stream=True, reads=lambda _: 1), start=start(query)
            )
            for number, query in enumerate(attempt)
            if isinstance(query, FakeQuery)
        ]

    def changed(self, standing: Standing) -> None:
        self.told += 1
        if self.states[-1:] != [standing.state]:
            self.states.append(standing.state)

    def batch(self, _standing: Standing, done: BatchDone) -> None:
        self.batches.append(done)

    def _report(self, standing: Standing) -> bool:
        self.reports.append((self.now_s, standing.state))
        return self.wish

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "it never ends"
        self.each_sleep()

    def runner(self, **more: Any) -> Runner:
        alive = SimpleNamespace(isStopped=lambda: False)
        session = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: alive)))
        return Runner(
            self.checked,
            Standing("clean", "run-1"),
            session=lambda: session,  # type: ignore[arg-type, return-value]
            report=self._report,
            watcher=self,
            sleep=self._sleep,
            monotonic=lambda: self.now_s,
            **more,
        )


def test_after_a_failure_only_what_was_not_written_before_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [FakeJob("topics-once"), FakeJob("parquet-rows", "the disk is full", "the disk is full")]
    stage = Stage(monkeypatch, [jobs, jobs, jobs])
    standing = stage.runner().run()
    assert (standing.state, standing.rows, standing.restarts) == ("finished", 10, 2)
    assert [job.runs for job in jobs] == [["run-1"], ["run-1"] * 3]


def test_what_is_no_stream_hears_that_it_is_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    job, next_job = FakeJob("replay"), FakeJob("another")
    runner = Stage(monkeypatch, [[job, next_job]]).runner()
    job.on_run = runner.stop
    assert runner.run().state == "stopped"
    assert job.was_stopped
    assert next_job.runs == []


def test_what_a_restart_cannot_mend_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, away = MessageNotFound("3 messages are not accounted for"), ConnectionLost("the broker is away")
    stage = Stage(monkeypatch, [[FakeJob("audit", lost)]])
    standing = stage.runner().run()
    assert (standing.state, standing.restarts, standing.error) == ("failed", 0, str(lost))
    for problem in (away, InternalError("the broker has stumbled")):
        job = FakeJob("audit", problem)
        standing = Stage(monkeypatch, [[job], [job]]).runner().run()
        assert (standing.state, standing.restarts) == ("finished", 1)


def test_a_run_to_the_end_takes_every_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query = FakeQuery(3, over=True)
    stage = Stage(monkeypatch, [[query]])
    standing = stage.runner(until="available-now").run()
    assert (standing.state, standing.rows, standing.lag) == ("finished", 30, 89)
    assert [done.batch for done in stage.batches] == [0, 1, 2]
    assert stage.triggers == [{"availableNow": True}]
    assert stage.states == ["starting", "running", "finished"]
    assert stage.told == 3, "once for each"


def test_after_a_failure_it_starts_again_and_gives_up_when_it_fails_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, last = FakeQuery(failure="one"), FakeQuery(), FakeQuery(failure="three")
    stage = Stage(monkeypatch, [[first, other], RuntimeError("two"), [last]])
    standing = stage.runner().run()
    assert (standing.state, standing.error, standing.restarts) == ("failed", "three", 2)
    assert other.stopped, "what has not failed is stopped, too"
    assert stage.states == ["starting", "running", "restarting", "running", "failed"]
    assert stage.now_s == pytest.approx(1 + 2), "the pause grows"


def test_a_batch_that_works_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: list[list[FakeQuery] | Exception] = [[FakeQuery(1, failure="again")] for _ in range(5)]
    stage = Stage(monkeypatch, [*failing, [FakeQuery(1, over=True)]])
    standing = stage.runner().run()
    assert (standing.state, standing.restarts) == ("finished", 5)
    assert stage.now_s == pytest.approx(5), "and the pauses"


def test_batches_of_another_query_do_not_start_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [[FakeQuery(3), FakeQuery(failure="again")] for _ in range(9)]
    standing = Stage(monkeypatch, failing).runner().run()
    assert (standing.state, standing.restarts) == ("failed", 2)


def test_a_mistake_that_only_spark_sees_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [ConfigInvalid("step 1: no such column")])
    runner = stage.runner()
    with pytest.raises(ConfigInvalid, match="no such column"):
        runner.run()
    assert stage.reports[-1][1] == "failed"


def test_it_reports_every_two_seconds_and_stops_when_the_broker_wishes_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [[query := FakeQuery(1)]])

    def wish() -> None:
        stage.wish = stage.now_s > 10

    stage.each_sleep = wish
    standing = stage.runner().run()
    assert standing.state == "stopped"
    assert query.stopped
    times = [at for at, state in stage.reports if state == "waiting"]
    assert [later - earlier for earlier, later in pairwise(times)] == [2.0] * (len(times) - 1)
    assert len(times) >= 5
    assert [state for _, state in stage.reports[-2:]] == ["stopping", "stopped"]


def test_a_stop_waits_for_the_batch_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [[query := FakeQuery(1)]])
    query.busy = True
    runner = stage.runner()

    def later() -> None:
        runner.stop()
        if stage.now_s > 5 and len(query.recentProgress) == 1:
            assert not query.stopped, "it was cut off"
            query.recentProgress.append(batch(1))

    stage.each_sleep = later
    assert runner.run().state == "stopped"
    assert [done.batch for done in stage.batches] == [0, 1]


def test_a_batch_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [[query := FakeQuery(1)]])
    query.busy = True
    runner = stage.runner()
    stage.each_sleep = runner.stop
    assert runner.run().state == "stopped"
    assert 59 < stage.now_s < 62


def test_a_stop_during_a_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [[FakeQuery(failure="one")]])
    runner = stage.runner()
    stage.each_sleep = runner.stop
    assert runner.run().state == "stopped"
    assert stage.now_s < 1


def test_what_fails_because_everything_is_ending_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [[FakeQuery(failure="a worker got the same signal")]])
    runner = stage.runner()
    runner.stop()
    standing = runner.run()
    assert (standing.state, standing.restarts) == ("stopped", 0)


@pytest.mark.parametrize(("letters", "reads"), [("", 2), (", dead_letter: true", 1)])
def test_rows_that_two_sinks_read_are_known_to_be_read_twice_unless_dead_letters_are_taken_out(
    letters: str, reads: int
) -> None:
    text = FILE.replace(
        "sinks: [{topic: clean}]",
        f"steps: [{{redact: {{fields: {{a: drop}}}}{letters}}}]\nsinks: [{{topic: a}}, {{topic: b}}, {{parquet: c}}]",
    )
    checked, mistakes = check_pipeline(text, Path("/work"))
    assert not mistakes
    assert checked is not None
    assert {query.name: query.reads(checked.graph) for query in queries_of(checked.graph)} == {
        "topics": reads,
        "parquet-step_1": 1,
    }


def test_a_pipeline_that_is_busy_elsewhere_reports_all_the_same_and_hears_the_wish() -> None:
    stopped = threading.Event()
    with BrokerForTests() as broker:
        client = broker.connect()
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), print)
        standing = Standing("busy", "run-1", state="running")
        assert not reporter.report(standing)
        client.pipelines.stop("busy")
        with Heartbeat(reporter, standing, stopped.set, silence_s=0.02):
            assert stopped.wait(20)
        reporter.close()


def test_a_definition_too_large_to_report_is_left_out_in_any_language() -> None:
    said: list[str] = []
    text = f"description: {'注文を整える。' * 1000}\n{FILE}"
    checked, mistakes = check_pipeline(text, Path("/work"))
    assert checked is not None, mistakes
    with BrokerForTests() as broker:
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), said.append)
        reporter.report(_standing(checked))
        reporter.close()
        assert said == []
        assert broker.connect().pipelines.show("clean").definition == {"description": ("注文を整える。" * 143)[:1000]}


def test_a_wish_to_stop_reaches_every_run_of_a_pipeline_that_was_started_twice_and_none_that_comes_later() -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), print)
        first, second = (Standing("clean", run, state="running") for run in ("run-1", "run-2"))
        assert not any(reporter.report(each) for each in (first, second))
        client.pipelines.stop("clean")
        assert client.pipelines.show("clean").stop_wished
        for each in (first, second, first):
            assert reporter.report(each)
        for each in (first, second):
            each.state = "stopped"
            reporter.report(each)
        assert not reporter.report(Standing("clean", "run-3", state="running"))
        assert not client.pipelines.show("clean").stop_wished
        reporter.close()


def test_a_wish_to_stop_reaches_a_run_although_another_one_reported_its_end_last() -> None:
    with BrokerForTests() as broker:
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), print)
        first, second = (Standing("clean", run, state="running") for run in ("run-1", "run-2"))
        assert not any(reporter.report(each) for each in (first, second))
        first.state = "failed"
        reporter.report(first)
        broker.connect().pipelines.stop("clean")
        assert reporter.report(second)
        reporter.close()


def test_a_second_wish_to_stop_reaches_the_run_that_was_started_while_the_first_is_slow_to_stop() -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), print)
        first, second = (Standing("clean", run, state="running") for run in ("run-1", "run-2"))
        reporter.report(first)
        client.pipelines.stop("clean")
        assert reporter.report(first)
        assert not reporter.report(second)
        assert reporter.report(first)
        client.pipelines.stop("clean")
        assert all(reporter.report(each) for each in (second, first))
        reporter.close()


def test_a_wish_to_stop_that_an_earlier_version_wrote_down_is_not_forgotten(tmp_path: Path) -> None:
    """It knew of one run, the last that had reported."""
    with BrokerForTests(tmp_path) as broker:
        pipelines = broker.broker.pipelines
        report = {"name": "clean", "run": "run-1", "state": "running"}
        document = {"namespace": "default", "report": report, "reported_ms": 1, "stop_wished": True}
        broker.run(pipelines._log.record({"pipeline/default/clean": document}, now_us=1))
    with BrokerForTests(tmp_path) as broker:
        reporter = Reporter(Target((broker.address,), timeout_s=2.0), print)
        assert reporter.report(Standing("clean", "run-1", state="running"))
        assert not reporter.report(Standing("clean", "run-2", state="running"))
        reporter.close()


def test_a_broker_that_is_away_is_complained_about_once() -> None:
    said: list[str] = []
    reporter = Reporter(Target(("127.0.0.1:1",), timeout_s=0.01), said.append)
    for _ in range(2):
        assert not reporter.report(Standing("alone", "run-1"))
    assert len(said) == 1
    assert said[0].startswith("the broker does not hear how the pipeline is: nobody listens at 127.0.0.1:1")
