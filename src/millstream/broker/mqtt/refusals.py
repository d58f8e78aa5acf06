"""What MQTT calls the broker's errors."""

from __future__ import annotations

from typing import Final

from millstream.errors import (
    Forbidden,
    InvalidName,
    MillstreamError,
    PayloadTooLarge,
    QueueFull,
    QuotaExceeded,
    RequestError,
    Throttled,
    Unauthorized,
)
from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = ["connect_reason", "publish_reason", "subscribe_reason"]

_PUBLISH: Final[tuple[tuple[type[MillstreamError], Reason], ...]] = (
    (Forbidden, Reason.NOT_AUTHORIZED),
    (Unauthorized, Reason.NOT_AUTHORIZED),
    (InvalidName, Reason.TOPIC_NAME_INVALID),
    (QuotaExceeded, Reason.QUOTA_EXCEEDED),
    (Throttled, Reason.QUOTA_EXCEEDED),
    (PayloadTooLarge, Reason.QUOTA_EXCEEDED),
    (QueueFull, Reason.QUOTA_EXCEEDED),
    (RequestError, Reason.IMPLEMENTATION_SPECIFIC_ERROR),
)
_SUBSCRIBE: Final[tuple[tuple[type[MillstreamError], Reason], ...]] = (
    (Forbidden, Reason.NOT_AUTHORIZED),
    (Unauthorized, Reason.NOT_AUTHORIZED),
    (InvalidName, Reason.TOPIC_FILTER_INVALID),
    (QuotaExceeded, Reason.QUOTA_EXCEEDED),
    (Throttled, Reason.QUOTA_EXCEEDED),
    (RequestError, Reason.IMPLEMENTATION_SPECIFIC_ERROR),
)
_CONNECT: Final[tuple[tuple[type[MillstreamError], Reason], ...]] = (
    (Unauthorized, Reason.BAD_USER_NAME_OR_PASSWORD),
    (Forbidden, Reason.NOT_AUTHORIZED),
    (InvalidName, Reason.BAD_USER_NAME_OR_PASSWORD),
    (Throttled, Reason.CONNECTION_RATE_EXCEEDED),
    (QuotaExceeded, Reason.QUOTA_EXCEEDED),
)


def publish_reason(error: MillstreamError) -> Reason:
    return _found(error, _PUBLISH, Reason.UNSPECIFIED_ERROR)


def subscribe_reason(error: MillstreamError) -> Reason:
    return _found(error, _SUBSCRIBE, Reason.UNSPECIFIED_ERROR)


def connect_reason(error: MillstreamError) -> Reason:
    return _found(error, _CONNECT, Reason.SERVER_UNAVAILABLE)


def _found(
    error: MillstreamError, table: tuple[tuple[type[MillstreamError], Reason], ...], otherwise: Reason
) -> Reason:
    if isinstance(error, MqttViolation):
        return error.reason
    return next((reason for kind, reason in table if isinstance(error, kind)), otherwise)
