"""Namespaces over HTTP."""

from __future__ import annotations

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire import calls

__all__ = ["family"]

family = Family("namespaces", "Separate worlds, each with names, quotas and keys of its own.", namespaced=False)


class NewNamespace(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Forced(msgspec.Struct, forbid_unknown_fields=True):
    #: Delete it even if it is not empty.
    force: bool = False


@family.get("/namespaces", permission="any", answer=list[str])
async def list_namespaces(exchange: Exchange[NoQuery, None]) -> list[str]:
    """List the names of all namespaces."""
    names: list[str] = await exchange.call(calls.ListNamespaces())
    return names


@family.post("/namespaces", body=NewNamespace, answer=NewNamespace, status=201)
async def create_namespace(exchange: Exchange[NoQuery, NewNamespace]) -> NewNamespace:
    """Create a namespace."""
    await exchange.call(calls.CreateNamespace(name=exchange.body.name))
    return exchange.body


@family.delete("/namespaces/{namespace}", query=Forced)
async def delete_namespace(exchange: Exchange[Forced, None]) -> None:
    """Delete a namespace; with `force` even if it holds topics, with everything in them."""
    name = exchange.path["namespace"]
    await exchange.call(calls.DeleteNamespace(name=name, force=exchange.query.force))
