"""A broker that asks for keys, and keys for it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import msgspec

from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from millstream.wire.access_calls import CreateKey, NewKey

ROLES = ("read", "produce", "consume", "admin")


def guarded(http: bool = False, **sections: dict[str, Any]) -> BrokerForTests:
    """A broker that asks for keys although only this machine can connect."""
    settings = {
        "server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100},
        **sections,
        "access": {"mode": "keys", **sections.get("access", {})},
    }
    return BrokerForTests(settings=Settings.model_validate(settings), http=http)


def new_key(broker: BrokerForTests, *roles: str, scopes: Iterable[str] = (), **options: Any) -> NewKey:
    call = CreateKey(roles=list(roles), scopes=list(scopes), **options)
    made = broker.run(broker.broker.access.create(call))
    assert isinstance(made, NewKey)
    return made


def key_for(broker: BrokerForTests, *roles: str, scopes: Iterable[str] = ()) -> str:
    return new_key(broker, *roles, scopes=scopes).key


def sample(kind: Any) -> Any:
    """The smallest JSON value that fits a type, so that a request gets as far as its meaning."""
    origin = get_origin(kind)
    if origin is Literal:
        return get_args(kind)[0]
    if origin in (typing.Union, types.UnionType):
        return sample(get_args(kind)[0])
    if origin is list:
        return [sample(get_args(kind)[0])]
    if origin is dict or kind is dict:
        return {}
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return {field.encode_name: sample(field.type) for field in fields if field.required}
    return {str: "x", int: 1, float: 1.0, bool: False, bytes: "", Any: "x"}.get(kind, "x")
