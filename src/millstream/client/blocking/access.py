"""`client.keys`: who may use the broker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from millstream.client.access import create_call
from millstream.client.asking import Ask
from millstream.durations import Duration, parse_ms
from millstream.wire.access_calls import KeyInfo, ListKeys, NewKey, RevokeKey, RotateKey

__all__ = ["Keys"]

_Keys: TypeAlias = list[KeyInfo]


class Keys:
    """All API keys of a broker."""

    def __init__(self, call: Ask) -> None:
        self._call = call

    def create(
        self, *roles: str, scopes: Iterable[str] = (), name: str = "", expires_in: Duration | None = None
    ) -> NewKey:
        """Create an API key.  The answer has its text, which is not stored anywhere."""
        return self._call(create_call(roles, scopes, name, expires_in), NewKey)

    def list(self) -> _Keys:
        return self._call(ListKeys(), _Keys)

    def rotate(self, key_id: str, grace: Duration = "24h") -> NewKey:
        """Give a key a new secret; the old one stays valid for `grace`."""
        return self._call(RotateKey(id=key_id, grace_ms=parse_ms(grace, "grace")), NewKey)

    def revoke(self, key_id: str) -> None:
        """Revoke a key, and end the connections of those who use it."""
        self._call(RevokeKey(id=key_id), object)
