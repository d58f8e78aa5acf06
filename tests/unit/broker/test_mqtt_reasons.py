"""Reason codes: whatever is refused for whatever reason, the client gets a code that its packet may have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream.broker.mqtt.refusals import connect_reason, publish_reason, subscribe_reason
from millstream.errors import MillstreamError, catalogue
from millstream.mqtt.reasons import Reason

# MQTT 5.0: tables 3-1 (CONNACK), 3-4 (PUBACK; 3-5, PUBREC, has the same) and 3-8 (SUBACK), where something is refused.
CONNACK = {*range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F}
PUBACK = {0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}
SUBACK = {0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}


@pytest.mark.parametrize("error", catalogue().values(), ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    ("reason_of", "allowed"),
    [(connect_reason, CONNACK), (publish_reason, PUBACK), (subscribe_reason, SUBACK)],
    ids=["connect", "publish", "subscribe"],
)
def test_every_refusal_has_a_reason_that_its_packet_may_have(
    reason_of: Callable[[MillstreamError], Reason], allowed: set[int], error: type[MillstreamError]
) -> None:
    assert reason_of(error("why")) in allowed
