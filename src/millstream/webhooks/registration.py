"""A webhook as it is remembered, with a sentence for everything that is not allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from millstream.errors import InvalidArgument
from millstream.webhooks.targets import parse_target

__all__ = ["Secret", "Webhook", "check_secret", "check_webhook", "held_ms_max", "rotated", "valid_secrets"]

CONCURRENCY_MAX: Final = 100
RATE_MAX: Final = 10_000
TIMEOUT_MS_MIN: Final = 100
TIMEOUT_MS_MAX: Final = 120_000
RETRIES_MAX: Final = 20
RETRY_DELAY_MS_MAX: Final = 24 * 3_600_000
HEADERS_MAX: Final = 50
HEADER_BYTES_MAX: Final = 4096
#: During a rotation: the new one and two that are on their way out.
SECRETS_MAX: Final = 3
SECRET_KEPT_MS_MAX: Final = 30 * 24 * 3_600_000
_SECRET: Final = re.compile(r"[\x21-\x7e]{16,256}")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE: Final = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
#: What the sender says itself.
_OURS: Final = frozenset(
    ["host", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "traceparent", "tracestate"]
)
_OUR_PREFIX: Final = "millstream-"

Payload = Literal["json", "raw"]


class Secret(msgspec.Struct, frozen=True):
    text: str
    #: When it stops signing; 0 = it does not.
    until_ms: int = 0

    def __repr__(self) -> str:
        return "Secret(...)"  # so that no log and no traceback ever has one


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """One registration."""

    id: str
    namespace: str
    topic: str
    group: str
    url: str
    created_ms: int
    #: The newest first; requests are signed with all that are valid.
    secrets: list[Secret]
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    #: Requests under way at a time.
    concurrency: int = 1
    #: Requests per second; 0 = no limit.
    rate: float = 0
    timeout_ms: int = 10_000
    #: How long to wait before each further attempt; after the last one the message is a dead letter.
    retry_delays_ms: list[int] = msgspec.field(default_factory=lambda: [1_000, 5_000, 30_000])
    #: A 4xx other than 408, 410 and 429 makes the message a dead letter at once; otherwise it is retried like a 5xx.
    reject_client_errors: bool = True
    #: `json`: a document with everything about the message.  `raw`: the value as it is.
    payload: Payload = "json"
    paused: bool = False
    #: Why it paused itself; empty when somebody asked for it.
    reason: str = ""

    def __repr__(self) -> str:
        return f"Webhook({self.id!r})"  # its headers and its URL may hold tokens


def check_webhook(webhook: Webhook) -> None:
    """Raises InvalidArgument naming the first thing that is not allowed."""
    parse_target(webhook.url)
    _check_range("concurrency", webhook.concurrency, 1, CONCURRENCY_MAX)
    _check_range("timeout_ms", webhook.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
    if not math.isfinite(webhook.rate) or not 0 <= webhook.rate <= RATE_MAX:
        raise InvalidArgument(f"rate must be 0 (no limit) or up to {RATE_MAX} requests per second, not {webhook.rate}")
    if len(webhook.retry_delays_ms) > RETRIES_MAX:
        raise InvalidArgument(f"retry_delays_ms has {RETRIES_MAX} entries at most, not {len(webhook.retry_delays_ms)}")
    for delay_ms in webhook.retry_delays_ms:
        _check_range("an entry of retry_delays_ms", delay_ms, 0, RETRY_DELAY_MS_MAX)
    _check_headers(webhook.headers)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low} and {high}, not {value}")


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > HEADERS_MAX:
        raise InvalidArgument(f"a webhook has {HEADERS_MAX} headers at most, not {len(headers)}")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidArgument(f"{name[:80]!r} cannot be the name of an HTTP header")
        if name.lower() in _OURS or name.lower().startswith(_OUR_PREFIX):
            raise InvalidArgument(f"the header {name!r} is set by the broker itself")
        if not _HEADER_VALUE.fullmatch(value) or len(value) > HEADER_BYTES_MAX:
            raise InvalidArgument(
                f"the value of the header {name!r} must be printable ASCII without spaces around it, "
                f"{HEADER_BYTES_MAX} characters at most"
            )


def check_secret(text: str) -> str:
    if not _SECRET.fullmatch(text):
        raise InvalidArgument("a secret has 16 to 256 printable ASCII characters without spaces")
    return text


def held_ms_max(webhook: Webhook) -> int:
    """How long a message can be under way if every attempt takes its whole time."""
    return sum(webhook.retry_delays_ms) + (len(webhook.retry_delays_ms) + 1) * webhook.timeout_ms


def valid_secrets(webhook: Webhook, now_ms: int) -> list[Secret]:
    return [secret for secret in webhook.secrets if not secret.until_ms or now_ms < secret.until_ms]


def rotated(webhook: Webhook, text: str, *, keep_ms: int, now_ms: int) -> Webhook:
    """The webhook with a new secret; the ones before go on signing for a while, so that receivers can follow."""
    _check_range("keep_ms", keep_ms, 0, SECRET_KEPT_MS_MAX)
    until_ms = now_ms + keep_ms
    old = [
        Secret(secret.text, min(secret.until_ms or until_ms, until_ms))
        for secret in valid_secrets(webhook, now_ms)
        if keep_ms
    ]
    return msgspec.structs.replace(webhook, secrets=[Secret(check_secret(text)), *old][:SECRETS_MAX])
