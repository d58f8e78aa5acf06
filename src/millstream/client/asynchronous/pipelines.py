"""`client.pipelines`: pipelines that report to the broker, and what is wished of them."""

from __future__ import annotations

from typing import TypeAlias

from millstream.client.asking import AsyncAsk
from millstream.client.pipelines import QUERIES_MAX, PipelineInfo, QueryInfo, StagesAborted
from millstream.wire import pipeline_calls as calls
from millstream.wire import stage_calls

__all__ = ["AsyncPipelines"]

_Infos: TypeAlias = list[PipelineInfo]
_Queries: TypeAlias = list[QueryInfo]


class AsyncPipelines:
    """The pipelines of one namespace.  They run outside the broker, and report to it how they are."""

    def __init__(self, call: AsyncAsk) -> None:
        self._call = call

    async def list(self) -> _Infos:
        """All pipelines, in the order of their names, without their definitions."""
        return await self._call(calls.ListPipelines(), _Infos)

    async def show(self, name: str) -> PipelineInfo:
        """One pipeline: what it does, how far it is, and what went wrong.  Raises PipelineNotFound."""
        return await self._call(calls.ShowPipeline(name=name), PipelineInfo)

    async def stop(self, name: str) -> PipelineInfo:
        """Ask a pipeline to stop after the batch it is at; it learns this when it reports next.

        Raises PipelineNotFound.
        """
        return await self._call(calls.StopPipeline(name=name), PipelineInfo)

    async def forget(self, name: str, *, force: bool = False) -> None:
        """Remove a pipeline that is not running from the list; with `force`, also one that says it is running."""
        await self._call(calls.ForgetPipeline(name=name, force=force), object)

    async def stages(self, query: str = "") -> _Queries:
        """What is staged and not published, of one query or of all that have anything staged."""
        call = stage_calls.ListStages(query=query, limit=QUERIES_MAX)
        found = await self._call(call, _Queries)
        return [one for one in found if one.stages]

    async def abort(self, query: str, batch: int) -> StagesAborted:
        """Discard what is staged for a batch of a query.  A batch that is published stays as it is."""
        return await self._call(stage_calls.AbortStages(query=query, batch=batch), StagesAborted)
