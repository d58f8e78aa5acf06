"""The control calls of pipelines and their answers.

A pipeline runs outside of the broker.  Whoever runs it reports every few seconds how it is, so that everybody can see
it where they see the rest; and learns from the answers whether it is to stop.
"""

from __future__ import annotations

from typing import Any, Literal

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "ForgetPipeline",
    "ListPipelines",
    "PipelineInfo",
    "PipelineState",
    "PipelineWish",
    "ReportPipeline",
    "ShowPipeline",
    "StopPipeline",
]

#: `lost` is never reported: nobody has reported for a while although it should be running.
PipelineState = Literal["starting", "running", "waiting", "restarting", "stopping", "stopped", "finished", "failed"]
ShownState = Literal[
    "starting", "running", "waiting", "restarting", "stopping", "stopped", "finished", "failed", "lost"
]


class ReportPipeline(CallForm, tag="pipeline.report"):
    """Says how a pipeline is.  Answers with PipelineWish."""

    name: str
    #: Of one run, from start to end; drawn by whoever runs it.
    run: str
    state: PipelineState
    #: What it reads and writes, by the names of topics.
    sources: list[str] = []
    sinks: list[str] = []
    #: The last micro-batch, and the rows since the run began.
    batch: int = -1
    rows: int = 0
    rows_per_s: float = 0.0
    #: Messages that are in its sources and not read yet; -1 = not known.
    lag: int = -1
    batch_ms: int = 0
    restarts: int = 0
    #: Of the failure that ended or restarted it, in one sentence.
    error: str = ""
    #: What it does, for people: anything that can be written as JSON, 16 KiB at most.
    definition: dict[str, Any] = {}
    host: str = ""
    pid: int = 0
    started_ms: int = 0


class PipelineWish(AnswerForm):
    """What is expected of a pipeline."""

    stop: bool


class ListPipelines(CallForm, tag="pipeline.list"):
    """Answers with a list of PipelineInfo without definitions, in the order of their names."""


class ShowPipeline(CallForm, tag="pipeline.show"):
    """Answers with PipelineInfo."""

    name: str


class StopPipeline(CallForm, tag="pipeline.stop"):
    """Wishes that a pipeline stops; its runner learns it with its next report.  Answers with PipelineInfo."""

    name: str


class ForgetPipeline(CallForm, tag="pipeline.forget"):
    """Removes a pipeline that is not running from the list; `force` also one that says it is."""

    name: str
    force: bool = False


class PipelineInfo(AnswerForm):
    name: str
    run: str
    state: ShownState
    sources: list[str]
    sinks: list[str]
    batch: int
    rows: int
    rows_per_s: float
    lag: int
    batch_ms: int
    restarts: int
    error: str
    host: str
    pid: int
    started_ms: int
    #: When the pipeline reported last.
    reported_ms: int
    #: Whether the pipeline was told to stop, or will be with its next report.
    stop_wished: bool
    definition: dict[str, Any] = {}
