"""Webhooks as users ask for them: arguments turned into calls, for both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict

from millstream.client.arguments import as_dict, as_list
from millstream.client.values import checked_rate
from millstream.durations import Duration, parse_ms
from millstream.errors import InvalidArgument
from millstream.wire import webhook_calls as calls
from millstream.wire.webhook_calls import WebhookCreated, WebhookInfo, WebhookTested

__all__ = [
    "WebhookCreated",
    "WebhookInfo",
    "WebhookSettings",
    "WebhookTested",
    "create_call",
    "rotate_call",
    "update_call",
]


class WebhookSettings(TypedDict, total=False):
    """Settings of a webhook.  What is left out has its default, or stays as it was."""

    #: Headers to send with every request; they replace all that were set before.
    headers: Mapping[str, str]
    #: How many requests may be under way at a time, 1 to 100.
    concurrency: int
    #: Requests per second; 0 = no limit.
    rate: float
    #: How long a receiver may take to answer.
    timeout: Duration
    #: How long to wait before each further attempt; after the last one the message is a dead letter.
    retry_delays: Iterable[Duration]
    #: Whether a 4xx other than 408, 410 and 429 makes the message a dead letter at once.
    reject_client_errors: bool
    #: `json`: a document with everything about the message.  `raw`: the value as it is.
    payload: Literal["json", "raw"]


def create_call(
    topic: str, url: str, group: str, secret: str | None, start: str, settings: WebhookSettings
) -> calls.CreateWebhook:
    if start not in ("", "earliest", "latest"):
        raise InvalidArgument(f"start is earliest or latest, not {start!r}")
    return calls.CreateWebhook(
        topic=topic,
        url=url,
        group=group,
        secret=secret or "",
        start=start,  # type: ignore[arg-type]
        options=_options(settings),
    )


def update_call(webhook_id: str, url: str | None, settings: WebhookSettings) -> calls.UpdateWebhook:
    return calls.UpdateWebhook(id=webhook_id, url=url, options=_options(settings))


def rotate_call(webhook_id: str, secret: str | None, keep: Duration) -> calls.RotateSecret:
    return calls.RotateSecret(id=webhook_id, secret=secret or "", keep_ms=parse_ms(keep, "keep"))


def _options(settings: WebhookSettings) -> calls.WebhookOptions:
    unknown = settings.keys() - WebhookSettings.__annotations__.keys()
    if unknown:
        raise InvalidArgument(f"a webhook has no setting {min(unknown)!r}")
    headers, delays, timeout = settings.get("headers"), settings.get("retry_delays"), settings.get("timeout")
    return calls.WebhookOptions(
        headers=None if headers is None else as_dict("headers", headers),
        concurrency=settings.get("concurrency"),
        rate=checked_rate(settings.get("rate")),
        timeout_ms=None if timeout is None else parse_ms(timeout, "timeout"),
        retry_delays_ms=None if delays is None else _delays_ms(delays),
        reject_client_errors=settings.get("reject_client_errors"),
        payload=settings.get("payload"),
    )


def _delays_ms(delays: Iterable[Duration]) -> list[int]:
    return [parse_ms(delay, "retry_delays") for delay in as_list("retry_delays", delays, "list of times")]
