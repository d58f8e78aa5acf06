"""Running a pipeline: its queries are started, watched, restarted after failures and stopped between two batches.

Spark's checkpoint says where to go on, so a restart is a start, and it does not matter where a run came to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from millstream.errors import ConfigInvalid, MillstreamError, RequestError
from millstream.spark.pipelines.definition import AVAILABLE_NOW
from millstream.spark.pipelines.failures import sentence_of
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.progress import BatchDone, Standing, batch_of, lag_of
from millstream.spark.pipelines.settling import settle_last
from millstream.wire.pipeline_calls import PipelineState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from millstream.spark.pipelines.compiling import CompiledQuery

__all__ = ["Runner", "Watcher"]

_REPORT_S: Final = 2.0
_LOOK_S: Final = 0.25
#: How long a batch may take to its end when the pipeline is to stop; what is cut off is done again next time.
_DRAIN_S: Final = 60.0
_DRAIN_LOOK_S: Final = 0.02


class Watcher(Protocol):
    """Who wants to know what happens."""

    def changed(self, standing: Standing) -> None: ...

    def batch(self, standing: Standing, done: BatchDone) -> None: ...


class _Failed(Exception):
    """A query came to an end that nobody wanted; says why."""

    def __init__(self, sentence: str, *, final: bool = False, worked: bool | None = None) -> None:
        super().__init__(sentence)
        #: It would end like this again.
        self.final = final
        #: Whether it has done a batch since its start; None: it was no query of its own that failed.
        self.worked = worked


@dataclass
class _Running:
    """A query that has been started."""

    name: str
    query: StreamingQuery
    reads: int = 1
    seen: int = -1


class Runner:
    """One run of one pipeline."""

    def __init__(
        self,
        checked: Checked,
        standing: Standing,
        *,
        session: Callable[[], SparkSession],
        report: Callable[[Standing], bool],
        watcher: Watcher,
        until: Literal["stopped", "available-now", "once"] = "stopped",
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checked = checked
        self._standing = standing
        self._start_session = session
        self._report = report
        self._watcher = watcher
        self._until = until
        self._sleep = sleep
        self._monotonic = monotonic
        self._spark: SparkSession | None = None
        self._reported_s: float | None = None
        self._stop = False
        #: Batches that were done since the last start.
        self._done = 0
        #: Queries that are no streams and have been written: nothing else remembers it.
        self._written: set[str] = set()

    def stop(self) -> None:
        """End after the batch that is under way.  May be called by a signal handler."""
        self._stop = True

    def run(self) -> Standing:
        """Until the end: stopped, finished or failed.  Raises ConfigInvalid where Spark finds a mistake in the file."""
        failures = 0
        self._now("starting")
        while True:
            try:
                self._attempt()
            except ConfigInvalid as problem:
                self._standing.error = str(problem)
                self._now("failed")
                raise
            except _Failed as problem:
                if self._stop:
                    self._now("stopped")
                    return self._standing
                worked = self._done > 0 if problem.worked is None else problem.worked
                failures = 1 if worked else failures + 1
                self._standing.error = str(problem)
                if problem.final or failures > self._checked.definition.restart.attempts:
                    self._now("failed")
                    return self._standing
                self._standing.restarts += 1
                self._now("restarting")
                self._pause(self._checked.definition.restart.pause_ms(failures) / 1000)
            if self._stop or self._standing.state == "finished":
                self._now("stopped" if self._stop else "finished")
                return self._standing

    # --- one attempt -------------------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        from millstream.spark.pipelines.compiling import compile_pipeline

        self._done = 0
        running: list[_Running] = []
        try:
            queries = compile_pipeline(self._session(), self._checked)
            if not any(query.query.is_stream for query in queries):
                self._once(queries)
                return
            trigger = self._trigger()
            for query in queries:
                running.append(_Running(query.name, query.start(trigger), query.query.reads(self._checked.graph)))
            self._now("running")
            self._watch(running)
            for each in running:
                if latest := each.query.lastProgress:
                    settle_last(self._checked, latest)
        except (ConfigInvalid, _Failed):
            raise
        except MillstreamError as problem:
            raise _Failed(str(problem), final=isinstance(problem, RequestError)) from problem
        except Exception as problem:  # of Spark, or of Py4J when the JVM is gone
            raise _Failed(sentence_of(problem)) from problem
        finally:
            for each in running:
                with suppress(Exception):  # it has failed, or its JVM has
                    each.query.stop()

    def _trigger(self) -> dict[str, Any]:
        definition = self._checked.definition
        if self._until == "once":
            return {"once": True}
        if self._until == AVAILABLE_NOW or definition.trigger == AVAILABLE_NOW:
            return {"availableNow": True}
        interval_ms = definition.interval_ms
        return {} if interval_ms is None else {"processingTime": f"{interval_ms} milliseconds"}

    def _once(self, queries: list[CompiledQuery]) -> None:
        """What is no stream is written from beginning to end; after a failure, what was not written before."""
        self._now("running")
        for number, query in enumerate(queries):
            if self._stop:
                return
            if query.name in self._written:
                continue
            began_s = self._monotonic()
            rows = query.run_once(self._standing.run, lambda: self._stop)
            self._written.add(query.name)
            took_ms = round((self._monotonic() - began_s) * 1000)
            rate = round(rows * 1000 / took_ms, 1) if took_ms else 0.0
            self._take(BatchDone(query.name, number, rows, rate, 0, took_ms, ""))
        self._standing.state = "finished"

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self, running: list[_Running]) -> None:
        while True:
            for each in running:
                self._look(each)
            for each in running:
                problem = None if each.query.isActive else each.query.exception()
                if problem is not None:
                    self._look(each)  # what came between the look and the end
                    raise _Failed(sentence_of(problem), worked=each.seen >= 0) from problem
            if not any(each.query.isActive for each in running):
                for each in running:
                    self._look(each)  # what came between the look and the end
                self._standing.state = "finished"
                return
            if self._stop:
                self._drain(running)
                return
            self._tell(self._state_of(running))
            self._sleep(_LOOK_S)

    def _look(self, each: _Running) -> None:
        """Take in the batches that are done since the last look."""
        for progress in each.query.recentProgress:
            done = batch_of(each.name, progress, reads=each.reads)
            if done is None:
                lag = lag_of(progress)
                if lag >= 0:
                    self._standing.lags[each.name] = lag
            elif done.batch > each.seen:
                each.seen = done.batch
                self._take(done)
        status = each.query.status if each.query.isActive else {}
        (self._standing.idle.discard if status.get("isDataAvailable") else self._standing.idle.add)(each.name)

    def _take(self, done: BatchDone) -> None:
        self._done += 1
        self._standing.take(done)
        self._watcher.batch(self._standing, done)

    def _state_of(self, running: list[_Running]) -> Literal["running", "waiting"]:
        return "waiting" if len(self._standing.idle) >= len(running) else "running"

    def _drain(self, running: list[_Running]) -> None:
        """Let each query come to the end of its batch."""
        self._now("stopping")
        deadline_s = self._monotonic() + _DRAIN_S
        for each in running:
            before = each.seen
            while self._monotonic() < deadline_s and each.query.isActive and each.seen == before:
                status = each.query.status
                if not (status.get("isTriggerActive") and status.get("isDataAvailable")):
                    break
                self._sleep(_DRAIN_LOOK_S)
                self._look(each)
            with suppress(Exception):
                each.query.stop()
            self._look(each)

    # --- telling -----------------------------------------------------------------------------------------------------

    def _now(self, state: PipelineState) -> None:
        """A state that everybody should know at once."""
        self._tell(state, at_once=True)

    def _tell(self, state: PipelineState, *, at_once: bool = False) -> None:
        now_s = self._monotonic()
        self._standing.state = state
        if at_once or self._reported_s is None or now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._watcher.changed(self._standing)
            if self._report(self._standing):
                self._stop = True

    def _pause(self, seconds: float) -> None:
        until_s = self._monotonic() + seconds
        while not self._stop and (left_s := until_s - self._monotonic()) > 0:
            self._sleep(min(left_s, _LOOK_S))
            self._tell("restarting")

    # --- the session -------------------------------------------------------------------------------------------------

    def _session(self) -> SparkSession:
        if self._spark is not None and not _is_alive(self._spark):
            _forget(self._spark)
            self._spark = None
        if self._spark is None:
            self._spark = self._start_session()
        return self._spark


def _is_alive(spark: SparkSession) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def _forget(spark: SparkSession) -> None:
    """PySpark holds on to a JVM that is gone; without this no other would be started."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as Sessions

    with suppress(Exception):
        spark.stop()
    context: Any = SparkContext
    sessions: Any = Sessions
    with suppress(Exception):
        context._gateway.shutdown()
    context._active_spark_context = context._gateway = context._jvm = None
    sessions._instantiatedSession = None
