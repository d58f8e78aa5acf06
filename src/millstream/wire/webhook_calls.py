"""The control calls of webhooks and their answers.

A webhook delivers the messages of a queue group by HTTP POST.  Its secret is in the answer that makes it, and nowhere
else; header values are never answered either, because that is where tokens are.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "CreateWebhook",
    "DeleteWebhook",
    "DescribeWebhook",
    "ListWebhooks",
    "PauseWebhook",
    "RotateSecret",
    "TestWebhook",
    "UpdateWebhook",
    "WebhookCreated",
    "WebhookInfo",
    "WebhookOptions",
    "WebhookTested",
]


class WebhookOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What can be set; None = the default, or what it was before."""

    #: Sent with every request; replaces all that were set before.
    headers: dict[str, str] | None = None
    #: Requests under way at a time, 1 to 100.
    concurrency: int | None = None
    #: Requests per second; 0 = no limit.
    rate: float | None = None
    timeout_ms: int | None = None
    #: How long to wait before each further attempt; after the last one the message is a dead letter.
    retry_delays_ms: list[int] | None = None
    #: Whether a 4xx other than 408, 410 and 429 makes the message a dead letter at once.
    reject_client_errors: bool | None = None
    #: `json`: a document with everything about the message.  `raw`: the value as it is.
    payload: Literal["json", "raw"] | None = None


class CreateWebhook(CallForm, tag="webhook.create"):
    """Makes the queue group too, if there is none.  Answers with WebhookCreated."""

    #: A topic, or a pattern.
    topic: str
    url: str
    group: str = "default"
    #: The key of the signatures; drawn by the broker if empty.
    secret: str = ""
    #: Where a new group begins.
    start: Literal["", "earliest", "latest"] = ""
    options: WebhookOptions = WebhookOptions()


class ListWebhooks(CallForm, tag="webhook.list"):
    """Answers with a list of WebhookInfo: of a topic, of a group, or all."""

    topic: str | None = None
    group: str | None = None


class DescribeWebhook(CallForm, tag="webhook.show"):
    """Answers with WebhookInfo."""

    id: str


class UpdateWebhook(CallForm, tag="webhook.update"):
    """Changes what is given, from the next attempt on.  Answers with WebhookInfo."""

    id: str
    url: str | None = None
    options: WebhookOptions = WebhookOptions()


class PauseWebhook(CallForm, tag="webhook.pause"):
    """Stops a webhook, or lets it go on.  Answers with WebhookInfo when it sends no more."""

    id: str
    paused: bool = True


class RotateSecret(CallForm, tag="webhook.rotate"):
    """A new secret; the one before goes on signing too for a while.  Answers with WebhookCreated."""

    id: str
    secret: str = ""
    keep_ms: int = 24 * 3_600_000


class DeleteWebhook(CallForm, tag="webhook.delete"):
    """The queue group stays."""

    id: str


class TestWebhook(CallForm, tag="webhook.test"):
    """Sends a signed request that is no message, once.  Answers with WebhookTested."""

    __test__ = False  # its name makes pytest curious

    id: str


class WebhookInfo(AnswerForm):
    id: str
    topic: str
    group: str
    #: Without its query, because that is where services have tokens.
    url: str
    state: Literal["active", "failing", "paused"]
    #: Why the webhook paused itself; empty if somebody asked for it.
    paused_reason: str
    #: The values of the headers are not shown.
    header_names: list[str]
    concurrency: int
    rate: float
    timeout_ms: int
    retry_delays_ms: list[int]
    reject_client_errors: bool
    payload: Literal["json", "raw"]
    created_ms: int
    #: Until when an earlier secret signs requests beside the newest; 0 = there is only one.
    rotating_until_ms: int
    #: Messages that the receiver took, since the broker started.
    delivered: int
    #: Attempts that failed, since the broker started.
    failed: int
    #: Messages given up, since the broker started.
    dead: int
    #: Messages in hand now, including those that wait for their next attempt.
    in_flight: int
    consecutive_failures: int
    #: The error of the latest attempt that failed; empty if none has.
    last_error: str
    #: The HTTP status of the latest attempt; 0 = there was no answer.
    last_status: int
    #: When a message was last delivered; 0 = not since the broker started.
    last_delivery_ms: int


class WebhookCreated(AnswerForm):
    webhook: WebhookInfo
    #: Shown here and never again.
    secret: str


class WebhookTested(AnswerForm):
    delivered: bool
    status: int
    error: str
    took_ms: int
