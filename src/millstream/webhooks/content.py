"""What is sent: the body and the headers of one request."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from millstream.values import to_headers, to_json
from millstream.version import VERSION
from millstream.webhooks.registration import Webhook, valid_secrets
from millstream.webhooks.signing import signature

__all__ = ["Leased", "Request", "compose", "compose_test"]

_USER_AGENT: Final = f"millstream/{VERSION}"
#: What may stand in an HTTP header as it is.
_HEADER_TEXT: Final = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,1022}[\x21-\x7e])?")
#: Passed on, so that a trace goes on at the receiver.
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


class Leased(Protocol):
    """A message as the broker hands it out."""

    @property
    def id(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def delivery(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...


class Request(NamedTuple):
    headers: list[tuple[str, str]]
    body: bytes


class _Document(msgspec.Struct, kw_only=True):
    """The JSON body; docs/guide/webhooks.md explains the fields."""

    id: str
    webhook: str
    namespace: str
    topic: str
    group: str
    partition: int
    offset: int
    key: str | None
    key_encoding: str
    value: Any
    encoding: str
    headers: dict[str, str | list[str]]
    delivery: int
    attempts: int
    timestamp_ms: int
    sent_ms: int


class _TestDocument(msgspec.Struct, kw_only=True):
    webhook: str
    namespace: str
    topic: str
    group: str
    sent_ms: int
    test: bool = True


def compose(webhook: Webhook, message: Leased, *, attempt: int, now_ms: int) -> Request:
    """The request for one attempt, counted from 1, to deliver a message."""
    given = dict(message.headers)
    headers = [
        ("Millstream-Message-Id", message.id),
        *((name, text) for name in _TRACE_HEADERS if (text := _header_text(given.get(name)))),
    ]
    if webhook.payload == "raw":
        body = message.value or b""
        content_type = _header_text(given.get("content-type")) or "application/octet-stream"
        headers += _about(webhook, message, attempt)
    else:
        body = msgspec.json.encode(_document(webhook, message, attempt, now_ms))
        content_type = "application/json"
    return Request(_signed(webhook, headers, content_type, body, now_ms), body)


def compose_test(webhook: Webhook, *, now_ms: int) -> Request:
    """A request that is no message, to see whether the receiver is there and knows the secret."""
    document = _TestDocument(
        webhook=webhook.id, namespace=webhook.namespace, topic=webhook.topic, group=webhook.group, sent_ms=now_ms
    )
    body = msgspec.json.encode(document)
    return Request(_signed(webhook, [("Millstream-Test", "true")], "application/json", body, now_ms), body)


def _signed(
    webhook: Webhook, headers: list[tuple[str, str]], content_type: str, body: bytes, now_ms: int
) -> list[tuple[str, str]]:
    secrets = [secret.text for secret in valid_secrets(webhook, now_ms)]
    ours = [
        ("User-Agent", _USER_AGENT),
        ("Content-Type", content_type),
        ("Millstream-Webhook", webhook.id),
        *headers,
        ("Millstream-Signature", signature(secrets, now_ms // 1000, body)),
    ]
    custom = {name.lower() for name in webhook.headers}
    return [(name, value) for name, value in ours if name.lower() not in custom] + list(webhook.headers.items())


def _document(webhook: Webhook, message: Leased, attempt: int, now_ms: int) -> _Document:
    key, key_encoding = to_json(message.key, "text")
    value, encoding = to_json(message.value)
    return _Document(
        id=message.id,
        webhook=webhook.id,
        namespace=webhook.namespace,
        topic=message.topic,
        group=webhook.group,
        partition=message.partition,
        offset=message.offset,
        key=key,
        key_encoding=key_encoding,
        value=value,
        encoding=encoding,
        headers=to_headers(message.headers),
        delivery=message.delivery,
        attempts=attempt,
        timestamp_ms=message.timestamp_ms,
        sent_ms=now_ms,
    )


def _about(webhook: Webhook, message: Leased, attempt: int) -> list[tuple[str, str]]:
    """What the document says about a message, as headers: for a body that is nothing but its value."""
    key = _header_text(message.key)
    about = [
        ("Millstream-Namespace", webhook.namespace),
        ("Millstream-Topic", message.topic),
        ("Millstream-Group", webhook.group),
        ("Millstream-Partition", str(message.partition)),
        ("Millstream-Offset", str(message.offset)),
        ("Millstream-Delivery", str(message.delivery)),
        ("Millstream-Attempts", str(attempt)),
        ("Millstream-Timestamp-Ms", str(message.timestamp_ms)),
    ]
    if key:
        about.append(("Millstream-Key", key))
    elif message.key:
        about.append(("Millstream-Key-Base64", b64encode(message.key).decode()))
    return about


def _header_text(data: bytes | None) -> str:
    return data.decode() if data and _HEADER_TEXT.fullmatch(data) else ""
