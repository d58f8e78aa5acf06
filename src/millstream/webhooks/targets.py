"""Where a webhook goes: a URL that is checked once, and addresses that may be forbidden.

A broker often stands inside a network that its users cannot reach.  Where they may register webhooks, a URL must not
become a way in: with `webhooks.allow_private = false` only addresses of the public internet are connected to, whatever
a name resolves to at the moment.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from millstream.errors import InvalidArgument

__all__ = ["URL_LENGTH_MAX", "Target", "is_public", "parse_target"]

URL_LENGTH_MAX: Final = 2048
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
#: A space or a line break in a URL would end up in the request line.
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9a-fA-F:.]{2,45}")
#: Not public although `ipaddress` takes them for it: assigned to protocols, relays of 6to4, and the metadata service of
#: a cloud that has an ordinary number.
_NOT_PUBLIC: Final = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"), IPv4Network("168.63.129.16"))
_NAT64: Final = IPv6Network("64:ff9b::/96")
_UNICAST: Final = IPv6Network("2000::/3")


class Target(NamedTuple):
    """A URL, taken apart."""

    is_tls: bool
    host: str
    port: int
    #: What the request line names: the path and the query.
    path: str
    #: The Host header.
    authority: str
    #: For people, without the query: that is where services have tokens.
    shown: str


def parse_target(url: str) -> Target:
    """Raises InvalidArgument with a sentence about what is wrong."""
    if len(url) > URL_LENGTH_MAX:
        raise InvalidArgument(f"a URL has {URL_LENGTH_MAX} characters at most, not {len(url)}")
    if not _PRINTABLE.fullmatch(url):
        raise InvalidArgument("a URL consists of printable ASCII characters without spaces; percent-encode the others")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"{_cut(url)!r} is not a URL: its host or port cannot be read") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise InvalidArgument("a webhook needs a URL that starts with http:// or https://")
    if "@" in parts.netloc:
        raise InvalidArgument("a URL with a user or password is not taken; put credentials into a header instead")
    host = (parts.hostname or "").rstrip(".")
    if not _HOST.fullmatch(host) or port == 0:
        raise InvalidArgument(f"{_cut(parts.netloc)!r} is not a host that can be connected to")
    default = _DEFAULT_PORTS[parts.scheme]
    bracketed = f"[{host}]" if ":" in host else host
    authority = bracketed if port in (None, default) else f"{bracketed}:{port}"
    path = parts.path or "/"
    return Target(
        is_tls=parts.scheme == "https",
        host=host,
        port=port or default,
        path=f"{path}?{parts.query}" if parts.query else path,
        authority=authority,
        shown=f"{parts.scheme}://{authority}{path}{'?...' if parts.query else ''}",
    )


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet: not private, loopback, link-local, multicast, reserved, ..."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner = _carried(found)
        if inner is None:
            return found in _UNICAST and found.is_global and found.teredo is None
        found = inner
    unusual = found.is_multicast or found.is_reserved or any(found in network for network in _NOT_PUBLIC)
    return found.is_global and not unusual


def _carried(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to: mapped, by 6to4 or through NAT64."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."
