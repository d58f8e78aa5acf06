"""`client.pipelines`: pipelines that report to the broker, and what is wished of them."""

from __future__ import annotations

from typing import TypeAlias

from millstream.client.asking import Ask
from millstream.client.pipelines import QUERIES_MAX, PipelineInfo, QueryInfo, StagesAborted
from millstream.wire import pipeline_calls as calls
from millstream.wire import stage_calls

__all__ = ["Pipelines"]

_Infos: TypeAlias = list[PipelineInfo]
_Queries: TypeAlias = list[QueryInfo]


class Pipelines:
    """The pipelines of one namespace.  They run outside of the broker, and tell it how they are."""

    def __init__(self, call: Ask) -> None:
        self._call = call

    def list(self) -> _Infos:
        """All of them, in the order of their names, without what they do."""
        return self._call(calls.ListPipelines(), _Infos)

    def show(self, name: str) -> PipelineInfo:
        """One pipeline: what it does, how far it is, and what went wrong.  Raises PipelineNotFound."""
        return self._call(calls.ShowPipeline(name=name), PipelineInfo)

    def stop(self, name: str) -> PipelineInfo:
        """Have a pipeline stop after the batch it is at; it learns so when it reports next.

        Raises PipelineNotFound.
        """
        return self._call(calls.StopPipeline(name=name), PipelineInfo)

    def forget(self, name: str, *, force: bool = False) -> None:
        """Take a pipeline that does not run from the list; with `force` also one that says it does."""
        self._call(calls.ForgetPipeline(name=name, force=force), object)

    def stages(self, query: str = "") -> _Queries:
        """What is staged and not published: of one query, or of all that have anything staged."""
        call = stage_calls.ListStages(query=query, limit=QUERIES_MAX)
        found = self._call(call, _Queries)
        return [one for one in found if one.stages]

    def abort(self, query: str, batch: int) -> StagesAborted:
        """Forget what is staged for a batch of a query.  Nothing happens to one that is published."""
        return self._call(stage_calls.AbortStages(query=query, batch=batch), StagesAborted)
