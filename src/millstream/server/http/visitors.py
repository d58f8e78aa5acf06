"""Who is asking over HTTP: its key, its address, and whether a page of another site is behind it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from millstream.errors import Forbidden

__all__ = ["RequestHeaders", "check_origin", "key_in"]

#: As long as the name of a host can be, and a port.
_HOST_MAX: Final = 260
#: What browsers say of a request that a page of the same origin makes, and of one that a person makes.
_OWN_SITES: Final = frozenset((b"same-origin", b"none"))


class RequestHeaders:
    """The headers of a request by name: a dictionary, because every request is asked for half a dozen of them."""

    __slots__ = ("raw",)

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.raw: dict[bytes, bytes] = dict(scope["headers"])

    def get(self, name: str, default: str = "") -> str:
        value = self.raw.get(name.encode())
        return default if value is None else value.decode("latin-1")


def key_in(headers: RequestHeaders) -> str | None:
    """The key that a request carries: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""
    scheme, _, key = headers.get("authorization").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def check_origin(headers: RequestHeaders) -> None:
    """For a broker that trusts this machine: its browser's other pages are not trusted.

    A page from anywhere can send requests to 127.0.0.1, and can give its own name that address.  Raises Forbidden.
    """
    host = headers.get("host")
    if len(host) > _HOST_MAX or not _is_here(host):
        raise Forbidden(f"this broker is reached as localhost or by its address, not as {host[:100]!r}")
    if b"origin" in headers.raw:
        origin = headers.get("origin")
        if _place_of(origin) != host:
            raise Forbidden(f"a page of {origin[:100]!r} may not use this broker")
    # Images are fetched and links are followed without an origin, and there is a GET that leases and acks.
    if headers.raw.get(b"sec-fetch-site", b"none") not in _OWN_SITES:
        raise Forbidden(
            "a page of another site may not use this broker; if you followed a link, enter its address yourself"
        )


def _place_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


@lru_cache(maxsize=256)
def _is_here(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
