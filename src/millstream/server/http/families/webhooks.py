"""Webhooks over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.wire import webhook_calls as calls
from millstream.wire.webhook_calls import WebhookCreated, WebhookInfo, WebhookOptions, WebhookTested

__all__ = ["family"]

family = Family("webhooks", "Messages of queues, delivered by HTTP POST.")


class NewWebhook(WebhookOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    #: A topic, or a pattern.
    topic: str
    #: http or https, without user and password.
    url: str
    group: str = "default"
    #: The key of the signatures; if empty, the broker generates one.
    secret: str = ""
    #: Where a new queue group begins.
    start: Literal["", "earliest", "latest"] = ""


class WebhookChange(WebhookOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str | None = None


class NewSecret(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    #: If empty, the broker generates one.
    secret: str = ""
    #: How long requests are signed with the previous secret as well.
    keep_ms: int = 24 * 3_600_000


class WebhookQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    topic: str | None = None
    group: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


def _options(given: WebhookOptions) -> WebhookOptions:
    return WebhookOptions(**{name: getattr(given, name) for name in WebhookOptions.__struct_fields__})


@family.get("/webhooks", query=WebhookQuery, answer=list[WebhookInfo])
async def list_webhooks(exchange: Exchange[WebhookQuery, None]) -> list[WebhookInfo]:
    """List webhooks of a topic, of a group, or all, with what has become of their messages."""
    query = exchange.query
    found = await exchange.call(calls.ListWebhooks(topic=query.topic, group=query.group))
    return page(exchange, found, limit=query.limit, offset=query.offset)


@family.post("/webhooks", body=NewWebhook, answer=WebhookCreated, status=201)
async def create_webhook(exchange: Exchange[NoQuery, NewWebhook]) -> Any:
    """Deliver the messages of a queue group to a URL.

    The queue group is created if there is none; the topic is not. The answer has the secret, which is not shown again.
    """
    body = exchange.body
    call = calls.CreateWebhook(
        topic=body.topic,
        url=body.url,
        group=body.group,
        secret=body.secret,
        start=body.start,
        options=_options(body),
    )
    return await exchange.call(call)


@family.get("/webhooks/{id}", answer=WebhookInfo)
async def show_webhook(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a webhook: its settings, its state, and what has become of its messages."""
    return await exchange.call(calls.DescribeWebhook(id=exchange.path["id"]))


@family.patch("/webhooks/{id}", body=WebhookChange, answer=WebhookInfo)
async def change_webhook(exchange: Exchange[NoQuery, WebhookChange]) -> Any:
    """Change settings of a webhook, from the next request on; what is not given stays as it is."""
    body = exchange.body
    return await exchange.call(calls.UpdateWebhook(id=exchange.path["id"], url=body.url, options=_options(body)))


@family.delete("/webhooks/{id}")
async def delete_webhook(exchange: Exchange[NoQuery, None]) -> None:
    """Delete a webhook; its queue group stays, with the messages in it."""
    await exchange.call(calls.DeleteWebhook(id=exchange.path["id"]))


@family.post("/webhooks/{id}/pause", answer=WebhookInfo)
async def pause_webhook(exchange: Exchange[NoQuery, None]) -> Any:
    """Pause a webhook; messages in hand go back to the queue."""
    return await exchange.call(calls.PauseWebhook(id=exchange.path["id"]))


@family.post("/webhooks/{id}/resume", answer=WebhookInfo)
async def resume_webhook(exchange: Exchange[NoQuery, None]) -> Any:
    """Resume a paused webhook."""
    return await exchange.call(calls.PauseWebhook(id=exchange.path["id"], paused=False))


@family.post("/webhooks/{id}/rotate", body=NewSecret, answer=WebhookCreated)
async def rotate_secret(exchange: Exchange[NoQuery, NewSecret]) -> Any:
    """Give a webhook a new secret, which is shown only once.

    For `keep_ms`, requests are signed with the previous secret as well, so that receivers can change over.
    """
    body = exchange.body
    return await exchange.call(calls.RotateSecret(id=exchange.path["id"], secret=body.secret, keep_ms=body.keep_ms))


@family.post("/webhooks/{id}/test", answer=WebhookTested)
async def test_webhook(exchange: Exchange[NoQuery, None]) -> Any:
    """Send one signed test request, which is no message, and say what the receiver answered."""
    return await exchange.call(calls.TestWebhook(id=exchange.path["id"]))
