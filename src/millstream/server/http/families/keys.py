"""Keys, quotas and the audit log over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.wire import access_calls

__all__ = ["family"]

family = Family("access", "API keys, quotas of namespaces, and what administrators did.", namespaced=False)


#: The broker refuses others, and says which ones there are.
Role = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["admin", "consume", "produce", "read"]})]


class KeyPage(msgspec.Struct, forbid_unknown_fields=True):
    limit: int = 50
    offset: int = 0


class KeyOrder(msgspec.Struct, forbid_unknown_fields=True):
    roles: list[Role]
    #: `NAMESPACE:TOPIC` with patterns, such as `default:orders.#`; none = everywhere.
    scopes: list[str] = []
    #: A name for people.
    name: str = ""
    #: 0 = until it is revoked.
    expires_ms: int = 0


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    #: How long the previous secret stays valid.
    grace_ms: int = 24 * 3_600_000


class QuotaOrder(msgspec.Struct, forbid_unknown_fields=True):
    """The limits of a namespace; 0 = no limit."""

    topics: int = 0
    partitions: int = 0
    storage_bytes: int = 0
    publish_messages_per_s: int = 0
    publish_bytes_per_s: int = 0
    connections: int = 0


class AuditQuery(msgspec.Struct, forbid_unknown_fields=True):
    key: str = ""
    call: str = ""
    from_ms: int = 0
    until_ms: int = 0
    limit: int = 50
    after: str = ""


@family.get("/keys", permission="admin", query=KeyPage, answer=list[access_calls.KeyInfo])
async def list_keys(exchange: Exchange[KeyPage, None]) -> Any:
    """List all API keys, without their secrets."""
    keys = await exchange.call(access_calls.ListKeys())
    return page(exchange, keys, limit=exchange.query.limit, offset=exchange.query.offset)


@family.post("/keys", body=KeyOrder, answer=access_calls.NewKey, status=201)
async def create_key(exchange: Exchange[NoQuery, KeyOrder]) -> Any:
    """Create an API key.

    The answer has the text of the key, `ms_<id>_<secret>`. It is not stored anywhere: keep it now.
    """
    body = exchange.body
    call = access_calls.CreateKey(roles=body.roles, scopes=body.scopes, name=body.name, expires_ms=body.expires_ms)
    return await exchange.call(call)


@family.delete("/keys/{key}")
async def revoke_key(exchange: Exchange[NoQuery, None]) -> None:
    """Revoke a key; whoever is connected with it is disconnected."""
    await exchange.call(access_calls.RevokeKey(id=exchange.path["key"]))


@family.post("/keys/{key}/rotate", body=Rotation, answer=access_calls.NewKey)
async def rotate_key(exchange: Exchange[NoQuery, Rotation]) -> Any:
    """Give a key a new secret; the previous one stays valid for a while."""
    return await exchange.call(access_calls.RotateKey(id=exchange.path["key"], grace_ms=exchange.body.grace_ms))


@family.get("/namespaces/{namespace}/quota", answer=access_calls.QuotaInfo)
async def show_quota(exchange: Exchange[NoQuery, None]) -> Any:
    """Show the limits of a namespace, and how much of them is used."""
    return await exchange.call(access_calls.ShowQuota(namespace=exchange.path["namespace"]))


@family.put("/namespaces/{namespace}/quota", body=QuotaOrder, answer=access_calls.QuotaInfo)
async def set_quota(exchange: Exchange[NoQuery, QuotaOrder]) -> Any:
    """Limit what a namespace may have and do; what is left out has no limit."""
    limits = msgspec.structs.asdict(exchange.body)
    return await exchange.call(access_calls.SetQuota(namespace=exchange.path["namespace"], **limits))


@family.get("/admin/audit", permission="admin", query=AuditQuery, answer=access_calls.AuditPage)
async def list_audit(exchange: Exchange[AuditQuery, None]) -> Any:
    """List what administrators did or tried to do, newest first.

    Pass `after` of an answer to continue where it ended; it is empty at the end. A page before the last may be short,
    or empty.
    """
    return await exchange.call(access_calls.ListAudit(**msgspec.structs.asdict(exchange.query)))
