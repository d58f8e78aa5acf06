"""Settings of queue groups and of topics that are read as queues, and receipt handles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.durations import DURATION_MS_MAX
from millstream.errors import ConfigInvalid, InvalidArgument
from millstream.policies import QueuePolicy
from millstream.receipts import ReceiptHandle
from millstream.retries import parse_retry
from millstream.topics import TopicConfig, parse_lanes


@pytest.mark.parametrize(("text", "ms"), [("5000", 5000), ("5s", 5000), ("1h30m", 5_400_000), ("5000.0", 5000)])
def test_a_number_without_a_unit_counts_what_the_name_of_the_setting_says(text: str, ms: int) -> None:
    """With a point in it, it counted seconds."""
    assert QueuePolicy.from_mapping({"lease_ms": text}).lease_ms == ms


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ordering": "keys"}, "ordering='keys' is not allowed"),
        ({"lease_ms": 10}, "lease_ms must be between"),
        ({"fair_by": "tenant"}, "fair_by is 'header:NAME'"),
        ({"fair_by": "header:tenant", "ordering": "key"}, "fair_by needs ordering=none"),
        ({"retry": "sometimes"}, "retry profile 'sometimes' is unknown"),
        ({"lease_ms": "a while"}, "lease_ms='a while' is not allowed: use milliseconds, or a length such as '30s'"),
        ({"lease_ms": "5000.5"}, "lease_ms='5000.5' is not allowed"),
        ({"max_deliveries": -1}, "max_deliveries must be between 0 .no limit. and"),
        ({"max_deliveries": 2**53 + 1}, "max_deliveries must be between 0 .no limit. and"),
        ({"processing_ms": "36501d"}, "processing_ms must be between 0 .no limit. and"),
        ({"retry": "standard,multiplier=nan"}, "multiplier must be between"),
        ({"orderin": "key"}, "did you mean 'ordering'"),
    ],
)
def test_a_queue_setting_that_cannot_be_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        QueuePolicy.from_mapping(settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lanes": "1,2,3"}, "5 weights"),
        ({"lanes": "50,25,15,7,0"}, "5 weights"),
        ({"lease_ms": "5"}, "lease_ms must be between"),
        ({"dead_letter_topic": "no spaces"}, "dead_letter_topic: topic 'no spaces' is not valid"),
        ({"dead_letter_alert": "ftp://x"}, "must be an http or https URL"),
        ({"max_depth": -1}, "max_depth must be between 0 .no limit. and"),
        ({"message_ttl_ms": "36501d"}, "message_ttl_ms must be between 0 .no limit. and"),
        ({"overflow": "explode"}, "overflow='explode' is not allowed"),
        ({"retry": "simple,max_retries=x"}, "does not fit"),
    ],
)
def test_a_topic_setting_for_queues_that_cannot_be_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        TopicConfig.from_mapping(settings)


def test_lanes_are_weights_or_strict() -> None:
    assert parse_lanes(TopicConfig().lanes) == (50, 25, 15, 7, 3)
    assert parse_lanes("strict") == ()


def test_settings_come_as_text_from_a_command_line() -> None:
    policy = QueuePolicy.from_mapping(
        {"paused": "true", "lease_ms": "60000", "processing_ms": "10m"}, QueuePolicy(ordering="key")
    )
    assert policy == QueuePolicy(paused=True, lease_ms=60_000, processing_ms=600_000, ordering="key")


def test_a_receipt_handle_is_text_with_five_parts() -> None:
    handle = ReceiptHandle("orders.eu", 3, 42, 1, 0xA1B2C3D4E5F67890)
    assert str(handle) == "orders.eu:3:42:1:a1b2c3d4e5f67890"
    assert ReceiptHandle.parse(str(handle)) == handle


@given(st.text(max_size=60))
def test_any_other_text_is_no_receipt_handle(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a receipt handle"):
        ReceiptHandle.parse(text)


def test_stored_settings_beyond_the_limits_are_read_as_near_as_they_allow() -> None:
    stored = {"processing_ms": 10**30, "max_deliveries": 7, "retry": "standard,multiplier=inf"}
    policy = QueuePolicy.stored(stored)
    assert (policy.processing_ms, policy.max_deliveries) == (DURATION_MS_MAX, 7)
    assert parse_retry(policy.retry).multiplier == 1000
    config = TopicConfig.stored({"message_ttl_ms": 10**30, "retry": "standard,initial=36501d"})
    assert config == TopicConfig(message_ttl_ms=DURATION_MS_MAX, retry="standard,initial=5214w2d")
    assert TopicConfig.stored({}) == TopicConfig()
