"""A publish that is refused makes no topic: what is refused can be known before there is one.

Each scenario runs with both kinds of client; for the other doors see http/test_messages.py and mqtt/test_mqtt_doors.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.errors import InvalidArgument, MillstreamError, PartitionNotFound, PayloadTooLarge
from millstream.testing.broker import BrokerForTests
from tests.either import EitherClient

LARGE = b"x" * (1024 * 1024 + 1)


@pytest.fixture(params=["blocking", "asynchronous"])
def either(request: pytest.FixtureRequest, broker: BrokerForTests) -> Iterator[EitherClient]:
    made = EitherClient(broker.address, asynchronous=request.param == "asynchronous")
    yield made
    made.end()


REFUSED = [
    ({"value": b"x", "dedup_id": "order-1"}, InvalidArgument, "mistyped.*dedup_window_ms"),
    ({"value": LARGE}, PayloadTooLarge, "1048577 bytes.*'mistyped'.* 1048576"),
    ({"value": b"x", "headers": {"h": b"x" * len(LARGE)}}, PayloadTooLarge, "bytes"),
    ({"value": b"x", "partition": 7}, PartitionNotFound, "'mistyped'.*not 7"),
]


@pytest.mark.parametrize(("message", "error", "text"), REFUSED)
def test_a_publish_that_is_refused_leaves_no_topic_behind(
    either: EitherClient, message: dict[str, Any], error: type[MillstreamError], text: str
) -> None:
    with pytest.raises(error, match=text):
        either.do(either.client.publish("mistyped", **message))
    assert [topic.name for topic in either.do(either.client.topics())] == []


@pytest.mark.parametrize(("message", "error", "text"), REFUSED)
def test_a_publish_of_many_that_is_refused_for_one_of_them_leaves_no_topic_behind(
    either: EitherClient, message: dict[str, Any], error: type[MillstreamError], text: str
) -> None:
    messages = [b"plain", millstream.Outgoing(**message), b"plain"]
    with pytest.raises(error, match=text):
        either.do(either.client.publish_many("mistyped", messages))
    assert [topic.name for topic in either.do(either.client.topics())] == []


def test_a_publish_of_many_of_which_one_is_no_message_leaves_no_topic_behind(either: EitherClient) -> None:
    with pytest.raises(InvalidArgument):
        either.do(either.client.publish_many("mistyped", [b"plain", object()]))
    assert [topic.name for topic in either.do(either.client.topics())] == []


def test_after_a_refusal_the_topic_is_made_by_what_it_takes(either: EitherClient) -> None:
    with pytest.raises(InvalidArgument):
        either.do(either.client.publish("orders", b"x", dedup_id="order-1"))
    either.do(either.client.publish("orders", b"x"))
    assert [topic.name for topic in either.do(either.client.topics())] == ["orders"]


def test_a_message_that_is_refused_costs_nobody_else_the_topic(broker: BrokerForTests) -> None:
    async def publish_together() -> list[object]:
        async with aio.connect(broker.address) as client:
            wanted = [client.publish("t", bytes(size)) for size in (len(LARGE), 1, len(LARGE), 2)]
            return await asyncio.gather(*wanted, return_exceptions=True)

    first, second, third, fourth = asyncio.run(publish_together())
    assert isinstance(first, PayloadTooLarge)
    assert isinstance(third, PayloadTooLarge)
    assert {stored.offset for stored in (second, fourth) if isinstance(stored, millstream.Receipt)} == {0, 1}
