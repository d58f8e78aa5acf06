"""Calls about keys, as both clients make them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from millstream.client.arguments import as_list
from millstream.durations import Duration, parse_ms
from millstream.wire.access_calls import CreateKey, NewKey

__all__ = ["NewKey", "create_call"]


def create_call(roles: Iterable[str], scopes: Iterable[str], name: str, expires_in: Duration | None) -> CreateKey:
    expires_ms = 0 if expires_in is None else int(time.time() * 1000) + parse_ms(expires_in, "expires_in")
    return CreateKey(roles=as_list("roles", roles), scopes=as_list("scopes", scopes), name=name, expires_ms=expires_ms)
