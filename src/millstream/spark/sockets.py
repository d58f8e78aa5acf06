"""How a socket to a broker is opened: by an address as people write it, with TLS or without."""

from __future__ import annotations

import socket
import ssl
import time

from millstream.addresses import TLS_SCHEME, parse_address
from millstream.errors import ConnectionLost, InvalidArgument
from millstream.spark.options import Target

__all__ = ["open_socket"]


def open_socket(target: Target, address: str, deadline_s: float) -> socket.socket:
    """Raises ConnectionLost where nobody answers, and InvalidArgument where that cannot change."""
    host, port = parse_address(address)
    try:
        sock = socket.create_connection((host, port), max(0.001, deadline_s - time.monotonic()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        context = _context(target.ca) if target.ca or address.startswith(TLS_SCHEME) else None
        if context is None:
            return sock
        try:
            return context.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
    except ConnectionRefusedError:
        raise ConnectionLost(
            f"nobody listens at {address}: start a broker with `millstream serve`, or check the address"
        ) from None
    except ssl.SSLCertVerificationError as problem:
        raise InvalidArgument(f"the certificate of {address} is not trusted: {problem.verify_message}") from None
    except ssl.SSLError as problem:
        raise InvalidArgument(f"{address} does not speak TLS, or not with us: {problem.reason or problem}") from None
    except OSError as problem:
        raise ConnectionLost(f"cannot connect to {address}: {problem.strerror or problem}") from None


def _context(ca: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InvalidArgument(f"the authorities in option tls.ca={ca!r} cannot be used: {reason}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
