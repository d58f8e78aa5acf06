"""What the broker answers about MQTT, under the names that users write."""

from __future__ import annotations

from millstream.wire.mqtt_calls import (
    MqttOverview,
    RetainedInfo,
    RetainedMessage,
    SessionInfo,
    SessionSubscription,
    SessionSummary,
)

__all__ = [
    "MqttOverview",
    "RetainedInfo",
    "RetainedMessage",
    "SessionInfo",
    "SessionSubscription",
    "SessionSummary",
]
