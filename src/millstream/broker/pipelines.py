"""Pipelines that run elsewhere, as far as the broker knows of them: what they reported, and what is wished of them.

Reports come every few seconds.  The last one is in memory; it is written down when the pipeline's state changes, and
now and then, so that a restart of the broker shows everybody again and forgets no wish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.broker.patience import PatientClock
from millstream.broker.state import StateLog
from millstream.clock import Clock
from millstream.errors import InvalidArgument, PipelineNotFound, QuotaExceeded
from millstream.names import check_group
from millstream.sections import PipelineSettings
from millstream.wire import pipeline_calls as calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["PipelineRow", "Pipelines"]

_DEFINITION_BYTES_MAX: Final = 16 * 1024
_TEXT_MAX: Final = 2_000
_TOPICS_MAX: Final = 100
#: Of one pipeline, of which there should be one.
_RUNS_MAX: Final = 10
#: A run that was told to stop may be silent for long and come back.
_WISHES_MAX: Final = 100
#: How old what is on disk may be while nothing but numbers changes.
_NOTE_MS: Final = 30_000
#: In these states there is nobody who will report again.
_OVER: Final = frozenset(("stopped", "finished", "failed"))
#: What is written down at once.
_TELLING: Final = ("run", "state", "error", "restarts", "definition", "sources", "sinks")


class _Pipeline(msgspec.Struct, kw_only=True):
    """What is remembered of one pipeline."""

    namespace: str
    report: calls.ReportPipeline
    reported_ms: int
    #: When each of its runs reported last that is not over: somebody may have started it twice.
    runs: dict[str, int] = {}
    #: Runs that are to stop.
    wished: list[str] = []
    noted_ms: int = 0

    @property
    def stop_wished(self) -> bool:
        return self.report.run in self.wished

    @property
    def live(self) -> set[str]:
        """The runs that may report again."""
        return {*self.runs} if self.report.state in _OVER else {*self.runs, self.report.run}

    @property
    def key(self) -> str:
        return f"pipeline/{self.namespace}/{self.report.name}"


class PipelineRow(msgspec.Struct, frozen=True):
    """One pipeline as its metrics show it."""

    namespace: str
    pipeline: str
    up: int
    rows: int
    rows_per_s: float
    lag: int
    batch: int
    batch_ms: int
    restarts: int
    silent_ms: int


class Pipelines:
    """All pipelines of the broker."""

    def __init__(self, log: StateLog, settings: PipelineSettings, *, clock: Clock, patience: PatientClock) -> None:
        self._log = log
        self._settings = settings
        self._clock = clock
        self._patience = patience
        self._pipelines: dict[str, _Pipeline] = {}
        self._changing = asyncio.Lock()

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            calls.ReportPipeline: self._report,
            calls.ListPipelines: self._list,
            calls.ShowPipeline: self._show,
            calls.StopPipeline: self._stop,
            calls.ForgetPipeline: self._forget,
        }

    def replay(self) -> None:
        for key, document in self._log.replay().items():
            self._pipelines[key] = pipeline = msgspec.convert(document, _Pipeline)
            if document.get("stop_wished"):  # as it was written down for the last run alone
                pipeline.wished = [pipeline.report.run]

    # --- reports -------------------------------------------------------------------------------------------------

    async def _report(self, session: Session, call: calls.ReportPipeline) -> calls.PipelineWish:
        _check(call)
        async with self._changing:
            known = self._pipelines.get(f"pipeline/{session.namespace}/{call.name}")
            if known is None and len(self._pipelines) >= self._settings.pipelines_max:
                raise QuotaExceeded(
                    f"{len(self._pipelines)} pipelines are known, as many as pipelines.pipelines_max allows"
                )
            now_ms = self._now_ms()
            pipeline = _Pipeline(
                namespace=session.namespace,
                report=call,
                reported_ms=now_ms,
                runs=self._runs(known, call, now_ms),
                wished=known.wished if known is not None else [],  # which is for the runs that there were
                noted_ms=known.noted_ms if known is not None else 0,
            )
            is_news = known is None or any(getattr(known.report, name) != getattr(call, name) for name in _TELLING)
            if is_news or now_ms - pipeline.noted_ms >= _NOTE_MS:
                pipeline.noted_ms = now_ms
                await self._record({pipeline.key: pipeline})
            self._pipelines[pipeline.key] = pipeline
        return calls.PipelineWish(stop=pipeline.stop_wished)

    def _runs(self, known: _Pipeline | None, call: calls.ReportPipeline, now_ms: int) -> dict[str, int]:
        runs = {} if known is None else {run: at for run, at in known.runs.items() if run != call.run}
        if call.state not in _OVER:
            runs[call.run] = now_ms
        live = [(run, at) for run, at in runs.items() if now_ms - at <= self._settings.lost_ms]
        return dict(live[-_RUNS_MAX:])

    # --- looking -------------------------------------------------------------------------------------------------

    async def _list(self, session: Session, _: calls.ListPipelines) -> list[calls.PipelineInfo]:
        mine = [pipeline for pipeline in self._pipelines.values() if pipeline.namespace == session.namespace]
        return [self._info(pipeline, {}) for pipeline in sorted(mine, key=lambda pipeline: pipeline.report.name)]

    async def _show(self, session: Session, call: calls.ShowPipeline) -> calls.PipelineInfo:
        pipeline = self._get(session.namespace, call.name)
        return self._info(pipeline, pipeline.report.definition)

    def rows(self) -> list[PipelineRow]:
        """All of them, for metrics; the oldest first."""
        now_ms = self._now_ms()
        return [
            PipelineRow(
                namespace=pipeline.namespace,
                pipeline=pipeline.report.name,
                up=int(self._state(pipeline) not in _OVER | {"lost"}),
                rows=pipeline.report.rows,
                rows_per_s=pipeline.report.rows_per_s,
                lag=max(pipeline.report.lag, 0),
                batch=max(pipeline.report.batch, 0),
                batch_ms=pipeline.report.batch_ms,
                restarts=pipeline.report.restarts,
                silent_ms=now_ms - pipeline.reported_ms,
            )
            for pipeline in self._pipelines.values()
        ]

    def _get(self, namespace: str, name: str) -> _Pipeline:
        pipeline = self._pipelines.get(f"pipeline/{namespace}/{name}")
        if pipeline is None:
            raise PipelineNotFound(f"no pipeline {name!r} has reported in namespace {namespace!r}")
        return pipeline

    def _state(self, pipeline: _Pipeline) -> calls.ShownState:
        state = pipeline.report.state
        silent_ms = self._now_ms() - pipeline.reported_ms
        return "lost" if state not in _OVER and silent_ms > self._settings.lost_ms else state

    def _info(self, pipeline: _Pipeline, definition: dict[str, Any]) -> calls.PipelineInfo:
        told = {name: getattr(pipeline.report, name) for name in pipeline.report.__struct_fields__}
        return calls.PipelineInfo(
            **told
            | {
                "state": self._state(pipeline),
                "definition": definition,
                "reported_ms": pipeline.reported_ms,
                "stop_wished": pipeline.stop_wished,
            }
        )

    # --- wishes --------------------------------------------------------------------------------------------------

    async def _stop(self, session: Session, call: calls.StopPipeline) -> calls.PipelineInfo:
        async with self._changing:
            pipeline = self._get(session.namespace, call.name)
            if untold := pipeline.live - set(pipeline.wished):
                wishes = [*pipeline.wished, *sorted(untold)]
                wished = msgspec.structs.replace(pipeline, wished=wishes[-_WISHES_MAX:])
                await self._record({wished.key: wished})
                self._pipelines[wished.key] = pipeline = wished
        return self._info(pipeline, pipeline.report.definition)

    async def _forget(self, session: Session, call: calls.ForgetPipeline) -> None:
        async with self._changing:
            pipeline = self._get(session.namespace, call.name)
            state = self._state(pipeline)
            if state not in _OVER | {"lost"} and not call.force:
                raise InvalidArgument(f"pipeline {call.name!r} is {state}: stop it first, or use force")
            await self._remove([pipeline])

    async def sweep(self) -> None:
        """Forget those that have been silent for long."""
        before_ms = self._patience.now_us() // 1000 - self._settings.forget_ms
        async with self._changing:
            await self._remove([pipeline for pipeline in self._pipelines.values() if pipeline.reported_ms < before_ms])

    async def forget_namespace(self, namespace: str) -> None:
        async with self._changing:
            await self._remove([pipeline for pipeline in self._pipelines.values() if pipeline.namespace == namespace])

    async def _remove(self, pipelines: list[_Pipeline]) -> None:
        if pipelines:
            await self._record({pipeline.key: None for pipeline in pipelines})
            for pipeline in pipelines:
                del self._pipelines[pipeline.key]

    async def _record(self, facts: Mapping[str, _Pipeline | None]) -> None:
        await self._log.record(facts, now_us=self._clock.now_us())

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000


def _check(call: calls.ReportPipeline) -> None:
    check_group(call.name, "pipeline")
    check_group(call.run, "run")
    for name in ("sources", "sinks"):
        if len(getattr(call, name)) > _TOPICS_MAX:
            raise InvalidArgument(f"a report names {_TOPICS_MAX} {name} at most")
    for name in ("error", "host"):
        if len(getattr(call, name)) > _TEXT_MAX:
            raise InvalidArgument(f"{name} has {_TEXT_MAX} characters at most")
    if len(msgspec.json.encode(call.definition)) > _DEFINITION_BYTES_MAX:
        raise InvalidArgument(f"the definition has {_DEFINITION_BYTES_MAX} bytes at most, as JSON")
