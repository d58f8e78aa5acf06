"""Signatures: that a request comes from this broker, is what it sent, and is not an old one sent again.

    Millstream-Signature: t=1767225600,v1=5257a869...

`v1` is HMAC-SHA256, in hex, over `<t>.<body>` with the secret as the key.  While a secret is being replaced there is a
`v1` for each, and a receiver accepts the request if any of them is right.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

__all__ = ["signature"]


def signature(secrets: Iterable[str], time_s: int, body: bytes) -> str:
    """The value of the header Millstream-Signature."""
    signed = b"%d.%b" % (time_s, body)
    digests = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in secrets]
    return ",".join([f"t={time_s}", *(f"v1={digest}" for digest in digests)])
