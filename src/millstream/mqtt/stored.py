"""How a message of MQTT is stored, so that every other door understands it, and how it is read back as it was.

User properties are headers as they are.  The content type, the response topic and the correlation data are headers that
the SDK and webhooks know too.  What only MQTT knows stands in one more header, the *mark*, which is the first::

    mqtt: 1ru2:device7      QoS 1, Retain, payload format 1 (UTF-8), 2 headers that are no user properties, client id

A user property may have any name, also one of these; that is why the mark says where they begin.  A message without a
mark came through another door: there the names decide.

Another door may store a header of this name as well.  It is a mark only where it is the first and names a client, as
each does that MQTT has ever written; then it is believed, so whoever copies a message copies how it is delivered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from millstream.entries import Entry
from millstream.headers import encode_headers
from millstream.mqtt.messages import Message, expires_us
from millstream.mqtt.packets import NO_PROPERTIES, Properties
from millstream.mqtt.reasons import MqttViolation
from millstream.mqtt.topics import check_topic_name, from_topic, to_topic
from millstream.options import CORRELATION_ID, REPLY_TO
from millstream.records import PRIORITY_DEFAULT

__all__ = ["CONTENT_TYPE", "MARK", "RESPONSE_TOPIC", "entry_of", "message_of"]

MARK: Final = "mqtt"
CONTENT_TYPE: Final = "content-type"
#: In place of REPLY_TO if the response topic is no topic of the broker: nobody but MQTT can answer there.
RESPONSE_TOPIC: Final = "mqtt-response-topic"

#: What a text or binary data of MQTT holds at most.
_FIELD_BYTES_MAX: Final = 65_535
_QOS_OF_OTHERS: Final = 2
_MARK: Final = re.compile(r"([012])(r?)([bu]?)([1-3]?):(.*)", re.DOTALL)
#: Payload formats by their letters: bytes, and UTF-8.
_FORMATS: Final = "bu"


def entry_of(message: Message, *, key: bytes | None, now_us: int) -> Entry | bytes:
    """The message on its way into a batch; plain bytes if there is nothing to say besides its payload."""
    properties = message.properties
    expiry_us = message.expiry_us
    if properties is not NO_PROPERTIES:
        expiry_us = expiry_us or expires_us(properties.message_expiry_s, now_us)
        headers = _headers(message, properties)
    elif message.client_id or message.retain or message.qos != _QOS_OF_OTHERS:
        headers = _mark(message.qos, message.retain, None, 0, message.client_id)
    else:
        headers = b""
    if not headers and key is None and not expiry_us:
        return message.payload
    return Entry(message.payload, key, headers, PRIORITY_DEFAULT, 0, expiry_us, 0)


def message_of(
    topic_name: str, value: bytes | None, headers: Sequence[tuple[str, bytes]], expiry_us: int = 0
) -> Message:
    """What was stored, with the MQTT topic name under which it is delivered."""
    message = Message(topic_name, value or b"", expiry_us=expiry_us)
    if not headers:
        return message
    mark = _MARK.fullmatch(headers[0][1].decode("utf-8", "replace")) if headers[0][0] == MARK else None
    if mark is None or int(mark[4] or 0) >= len(headers):
        message.properties = _properties(None, headers, ())
        return message
    qos, retain, payload_format, known, client_id = mark.groups()
    message.qos, message.retain, message.client_id = int(qos), bool(retain), client_id
    if payload_format or len(headers) > 1:
        user_from = 1 + int(known or 0)
        message.properties = _properties(
            _FORMATS.index(payload_format) if payload_format else None, headers[1:user_from], headers[user_from:]
        )
    return message


def _headers(message: Message, properties: Properties) -> bytes:
    headers: list[tuple[str, str | bytes]] = []
    if properties.content_type is not None:
        headers.append((CONTENT_TYPE, properties.content_type))
    if properties.response_topic is not None:
        topic = to_topic(properties.response_topic)
        headers.append((RESPONSE_TOPIC, properties.response_topic) if topic is None else (REPLY_TO, topic))
    if properties.correlation_data is not None:
        headers.append((CORRELATION_ID, properties.correlation_data))
    mark = _mark(message.qos, message.retain, properties.payload_format, len(headers), message.client_id)
    return mark + encode_headers([*headers, *properties.user])


@lru_cache(maxsize=1024)  # a client says the same with most of its messages
def _mark(qos: int, retain: bool, payload_format: int | None, known: int, client_id: str) -> bytes:
    """The mark as stored; whatever follows is simply put behind it."""
    text = f"{qos}{'r' if retain else ''}{'' if payload_format is None else _FORMATS[payload_format]}{known or ''}"
    return encode_headers([(MARK, f"{text}:{client_id}")])


def _properties(
    payload_format: int | None, known: Sequence[tuple[str, bytes]], user: Sequence[tuple[str, bytes]]
) -> Properties:
    """`known` are headers that mean what their name says; those that do not are user properties as well."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    others: list[tuple[str, bytes]] = []
    for name, value in known:
        if name == CONTENT_TYPE and content_type is None and _fits(text := _text(value)):
            content_type = text
        elif name == CORRELATION_ID and correlation_data is None and len(value) <= _FIELD_BYTES_MAX:
            correlation_data = value
        elif name in (REPLY_TO, RESPONSE_TOPIC) and response_topic is None and (topic := _response_topic(name, value)):
            response_topic = topic
        else:
            others.append((name, value))
    return Properties(
        payload_format=payload_format,
        content_type=content_type,
        response_topic=response_topic,
        correlation_data=correlation_data,
        user=tuple(
            (shown, text)
            for name, value in (*others, *user)
            if _fits(shown := name.replace("\0", "\ufffd")) and _fits(text := _text(value))
        ),
    )


def _response_topic(name: str, value: bytes) -> str | None:
    """Where an answer goes, as MQTT says it; None if it is no place to publish to."""
    text = _text(value)
    if name == REPLY_TO:
        topic = from_topic(text)
        return topic if "/" not in text and to_topic(topic) is not None else None
    try:
        return check_topic_name(text)
    except MqttViolation:
        return None


def _fits(text: str) -> bool:
    """What is longer cannot be said in MQTT, and is left out."""
    return len(text) * 4 <= _FIELD_BYTES_MAX or len(text.encode()) <= _FIELD_BYTES_MAX


def _text(value: bytes) -> str:
    """Text that MQTT allows, whatever was stored: what is no UTF-8, and U+0000, become the replacement character."""
    return value.decode("utf-8", "replace").replace("\0", "\ufffd")
