"""`client.webhooks`: messages of queues, delivered by HTTP."""

from __future__ import annotations

from typing import Literal, TypeAlias, Unpack

from millstream.client.asking import AsyncAsk
from millstream.client.webhooks import WebhookSettings, create_call, rotate_call, update_call
from millstream.durations import Duration
from millstream.wire import webhook_calls as calls

__all__ = ["AsyncWebhooks"]

# Inside the class `list` is a method.
_Infos: TypeAlias = list[calls.WebhookInfo]


class AsyncWebhooks:
    """All webhooks of a namespace.  Settings are named arguments: see WebhookSettings."""

    def __init__(self, call: AsyncAsk) -> None:
        self._call = call

    async def create(
        self,
        topic: str,
        url: str,
        *,
        group: str = "default",
        secret: str | None = None,
        start: Literal["", "earliest", "latest"] = "",
        **settings: Unpack[WebhookSettings],
    ) -> calls.WebhookCreated:
        """Deliver the messages of a queue group to a URL.  The answer has the secret, which is not shown again.

        `start` says where a new group begins.  Raises InvalidArgument if the URL or a setting is not allowed,
        TopicNotFound if there is no such topic and it is not a pattern.
        """
        return await self._call(create_call(topic, url, group, secret, start, settings), calls.WebhookCreated)

    async def list(self, *, topic: str | None = None, group: str | None = None) -> _Infos:
        """The webhooks of a topic, of a group, or all of them, with what has become of their messages."""
        return await self._call(calls.ListWebhooks(topic=topic, group=group), _Infos)

    async def show(self, webhook_id: str) -> calls.WebhookInfo:
        """One webhook.  Raises WebhookNotFound."""
        return await self._call(calls.DescribeWebhook(id=webhook_id), calls.WebhookInfo)

    async def update(
        self, webhook_id: str, *, url: str | None = None, **settings: Unpack[WebhookSettings]
    ) -> calls.WebhookInfo:
        """Change the URL and settings that are given, from the next request on."""
        return await self._call(update_call(webhook_id, url, settings), calls.WebhookInfo)

    async def pause(self, webhook_id: str) -> calls.WebhookInfo:
        """Stop sending.  Messages in hand go back to the queue."""
        return await self._call(calls.PauseWebhook(id=webhook_id), calls.WebhookInfo)

    async def resume(self, webhook_id: str) -> calls.WebhookInfo:
        return await self._call(calls.PauseWebhook(id=webhook_id, paused=False), calls.WebhookInfo)

    async def rotate(
        self, webhook_id: str, *, secret: str | None = None, keep: Duration = "24h"
    ) -> calls.WebhookCreated:
        """Give a webhook a new secret, which is shown this once.  For `keep`, the old one signs requests too."""
        return await self._call(rotate_call(webhook_id, secret, keep), calls.WebhookCreated)

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook; its queue group stays, with the messages in it."""
        await self._call(calls.DeleteWebhook(id=webhook_id), object)

    async def test(self, webhook_id: str) -> calls.WebhookTested:
        """Send a signed request that is not a message, and return what the receiver answered."""
        return await self._call(calls.TestWebhook(id=webhook_id), calls.WebhookTested)
