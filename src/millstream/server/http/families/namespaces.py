"""Namespaces over HTTP."""

from __future__ import annotations

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire import calls

__all__ = ["family"]

family = Family("namespaces", "Worlds of their own: names, quotas and keys.", namespaced=False)


class NewNamespace(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Forced(msgspec.Struct, forbid_unknown_fields=True):
    #: Also when it is not empty.
    force: bool = False


@family.get("/namespaces", permission="any", answer=list[str])
async def list_namespaces(exchange: Exchange[NoQuery, None]) -> list[str]:
    """The names of all namespaces."""
    names: list[str] = await exchange.call(calls.ListNamespaces())
    return names


@family.post("/namespaces", body=NewNamespace, answer=NewNamespace, status=201)
async def create_namespace(exchange: Exchange[NoQuery, NewNamespace]) -> NewNamespace:
    """Make a namespace."""
    await exchange.call(calls.CreateNamespace(name=exchange.body.name))
    return exchange.body


@family.delete("/namespaces/{namespace}", query=Forced)
async def delete_namespace(exchange: Exchange[Forced, None]) -> None:
    """Delete a namespace; with `force` also when it holds topics, with everything in them."""
    name = exchange.path["namespace"]
    await exchange.call(calls.DeleteNamespace(name=name, force=exchange.query.force))
