"""API keys: `ms_<id>_<secret>`.  The id says which key it is; only the hash of the secret is kept.

A secret is 256 random bits, so a fast hash is enough: there is nothing to guess.  A key that was rotated has two
secrets for a while, so that clients can be moved one after the other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from millstream.access.rights import PERMISSIONS_OF, Scope, parse_scope
from millstream.errors import InvalidArgument

__all__ = ["NAME_LETTERS_MAX", "SCOPES_MAX", "Key", "Secret", "draw_id", "draw_secret", "key_text", "parse_key"]

SCOPES_MAX: Final = 100
NAME_LETTERS_MAX: Final = 200
_TEXT: Final = re.compile(r"ms_([0-9a-f]{12})_([0-9a-f]{64})")


class Secret(msgspec.Struct, kw_only=True, frozen=True):
    """A secret as it is kept."""

    sha256: str
    #: 0 = as long as its key.
    until_ms: int = 0

    @classmethod
    def of(cls, secret: str) -> Secret:
        return cls(sha256=hashlib.sha256(secret.encode()).hexdigest())

    def matches(self, secret: str) -> bool:
        return hmac.compare_digest(hashlib.sha256(secret.encode()).hexdigest(), self.sha256)


class Key(msgspec.Struct, kw_only=True, frozen=True):
    """A key as it is remembered."""

    id: str
    name: str
    roles: list[str]
    scopes: list[str]
    created_ms: int
    #: 0 = never.
    expires_ms: int = 0
    rotated_ms: int = 0
    #: The newest first.
    secrets: list[Secret]

    def __post_init__(self) -> None:
        unknown = [role for role in self.roles if role not in PERMISSIONS_OF]
        if unknown or not self.roles:
            given = f"not {unknown[0][:80]!r}" if unknown else "and a key has at least one"
            raise InvalidArgument(f"a role is one of {', '.join(PERMISSIONS_OF)}, {given}")
        if len(self.scopes) > SCOPES_MAX:
            raise InvalidArgument(f"a key has {SCOPES_MAX} scopes at most, not {len(self.scopes)}")
        if len(self.name) > NAME_LETTERS_MAX:
            raise InvalidArgument(f"the name of a key has {NAME_LETTERS_MAX} letters at most, not {len(self.name)}")
        self.parsed_scopes()

    def parsed_scopes(self) -> list[Scope]:
        return [parse_scope(scope) for scope in self.scopes]

    def valid_secrets(self, now_ms: int) -> Iterator[Secret]:
        if self.expires_ms and self.expires_ms <= now_ms:
            return
        for secret in self.secrets:
            if not secret.until_ms or secret.until_ms > now_ms:
                yield secret


def key_text(key_id: str, secret: str) -> str:
    """What its holder is given, once."""
    return f"ms_{key_id}_{secret}"


def parse_key(text: str) -> tuple[str, str] | None:
    """The id and the secret; None when this cannot be a key."""
    match = _TEXT.fullmatch(text)
    return (match[1], match[2]) if match else None


def draw_secret(draw_bits: Callable[[int], int]) -> str:
    return f"{draw_bits(256):064x}"


def draw_id(draw_bits: Callable[[int], int]) -> str:
    return f"{draw_bits(48):012x}"
