"""Pipelines over HTTP: how those are that report to the broker, and the wish that one stops."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire import pipeline_calls as calls

__all__ = ["family"]

family = Family("pipelines", "Pipelines that run outside of the broker and report to it.")


class Forgetting(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Remove it even if it says that it runs.
    force: bool = False


@family.get("/pipelines", answer=list[calls.PipelineInfo])
async def list_pipelines(exchange: Exchange[NoQuery, None]) -> Any:
    """List all pipelines, in the order of their names, without their definitions."""
    return await exchange.call(calls.ListPipelines())


@family.get("/pipelines/{name}", answer=calls.PipelineInfo)
async def show_pipeline(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a pipeline: what it does, how far it is, and what went wrong."""
    return await exchange.call(calls.ShowPipeline(name=exchange.path["name"]))


@family.post("/pipelines/{name}/stop", answer=calls.PipelineInfo)
async def stop_pipeline(exchange: Exchange[NoQuery, None]) -> Any:
    """Stop a pipeline after the batch that is under way; it learns of this with its next report."""
    return await exchange.call(calls.StopPipeline(name=exchange.path["name"]))


@family.delete("/pipelines/{name}", query=Forgetting)
async def forget_pipeline(exchange: Exchange[Forgetting, None]) -> None:
    """Remove a pipeline that does not run from the list."""
    await exchange.call(calls.ForgetPipeline(name=exchange.path["name"], force=exchange.query.force))
