"""Where the broker is, and how a client introduces itself."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from typing import Final

from millstream.addresses import TLS_SCHEME, parse_address
from millstream.client.tls import client_context
from millstream.client.values import encode_call, key_bytes
from millstream.durations import is_span
from millstream.errors import ConnectionLost, InvalidArgument
from millstream.names import DEFAULT_NAMESPACE, check_namespace
from millstream.version import VERSION
from millstream.wire.frames import PROTOCOL_VERSION, FrameType, encode_frame
from millstream.wire.messages import Hello

__all__ = ["Target"]

#: Where a key comes from that is given nowhere else.
KEY_VARIABLE: Final = "MILLSTREAM_KEY"
#: Eleven days.  The system waits in milliseconds, which it counts with 31 bits.
_TIMEOUT_S_MAX: Final = 1_000_000
SOFTWARE: Final = f"millstream-python/{VERSION}"


@dataclass(frozen=True, slots=True)
class Target:
    """Everything a connection needs to be opened, and opened again."""

    address: str
    host: str
    port: int
    namespace: str
    client_id: str
    #: Never shown: this object ends up in tracebacks.
    key: str | None = field(repr=False)
    timeout_s: float
    tls: ssl.SSLContext | None = None
    stay_awake: bool = True

    @classmethod
    def of(
        cls,
        address: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        client_id: str | None,
        key: str | None,
        timeout_s: float,
        tls: bool | ssl.SSLContext | None = None,
        ca: str | None = None,
        stay_awake: bool = True,
    ) -> Target:
        host, port = parse_address(address)
        if not is_span(timeout_s) or not 0 < timeout_s <= _TIMEOUT_S_MAX:
            raise InvalidArgument(
                f"timeout_s must be a number of seconds, and more than 0 (at most {_TIMEOUT_S_MAX}), not {timeout_s!r}"
            )
        name = client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        key = os.environ.get(KEY_VARIABLE) if key is None else key
        key_bytes(key)  # a text, and said here, where nobody repeats it
        context = client_context(tls, ca, wanted=address.startswith(TLS_SCHEME))
        namespace = check_namespace(namespace)
        return cls(address, host, port, namespace, name, key or None, timeout_s, context, stay_awake)

    def hello(self, correlation: int) -> bytes:
        hello = Hello(
            versions=[PROTOCOL_VERSION],
            client_id=self.client_id,
            namespace=self.namespace,
            token=self.key,
            software=SOFTWARE,
            extensions=True,
        )
        return encode_frame(FrameType.HELLO, encode_call(hello), correlation)

    def hung_up(self, problem: ConnectionLost) -> ConnectionLost:
        """What to say when the connection ended before the broker had said a word."""
        if self.tls is not None:
            return problem
        return ConnectionLost(
            f"{problem}: if it speaks TLS, write tls:// in front of the address; if not, is it the native port, "
            "9092 unless set otherwise?"
        )

    def unreachable(self, problem: OSError) -> ConnectionLost:
        """A sentence that says what to do."""
        if isinstance(problem, ConnectionRefusedError):
            return ConnectionLost(
                f"nobody listens at {self.address}: start a broker with `millstream serve`, or check the address"
            )
        if isinstance(problem, ssl.SSLCertVerificationError):
            return ConnectionLost(
                f"the certificate of {self.address} is not trusted: {problem.verify_message}; say who has signed it: "
                "--ca FILE, connect(ca=...)"
            )
        if isinstance(problem, ssl.SSLError):
            return ConnectionLost(f"{self.address} does not speak TLS, or not with us: {problem.reason or problem}")
        if isinstance(problem, socket.gaierror):
            return ConnectionLost(f"the host name in {self.address!r} cannot be resolved: {problem.strerror}")
        if isinstance(problem, TimeoutError):
            return ConnectionLost(f"no answer from {self.address}: check the address, and firewalls on the way")
        return ConnectionLost(f"cannot connect to {self.address}: {problem.strerror or problem}")
