"""The address of a broker as people write it."""

from __future__ import annotations

import ipaddress
from typing import Final

from millstream.errors import InvalidArgument

__all__ = ["DEFAULT_ADDRESS", "TLS_SCHEME", "parse_address"]

DEFAULT_ADDRESS: Final = "localhost:9092"
_DEFAULT_PORT: Final = 9092
#: In front of an address: the connection is encrypted, and the broker has a certificate.
TLS_SCHEME: Final = "tls://"


def parse_address(address: str) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port`, with `tls://` in front or not."""
    if not isinstance(address, str):
        raise InvalidArgument(f"{address!r} is not an address: write host:port, for example {DEFAULT_ADDRESS!r}")
    given, address = address, address.removeprefix(TLS_SCHEME)
    host, port = address, str(_DEFAULT_PORT)
    if address.startswith("["):
        host, closed, rest = address[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else port if closed and not rest else ""
    elif address.count(":") == 1:
        host, port = address.split(":")
    # Several colons without brackets can only be an IPv6 address without a port.
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not _is_ipv6(host)):
        raise InvalidArgument(f"{given!r} is not an address: write host:port, for example {DEFAULT_ADDRESS!r}")
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
