"""Options of single messages: headers that speak to the broker, and batches that say so."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from fake_broker import FakeBroker

import millstream
from millstream.errors import InvalidArgument, InvalidName
from millstream.headers import decode_headers
from millstream.records import Batch, Columns
from tests.either import EitherClient

_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


def batches(fake: FakeBroker) -> list[Batch]:
    return [Batch.parse(stored) for stored in fake.topics["t"][0].batches]


def test_options_travel_as_headers_in_a_batch_that_says_so(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"a", headers={"x": "y"}, dedup_id="order-17", max_retries=2, lease="5m")
    client.publish("t", b"b", headers={"x": "y"})
    first, second = batches(fake)
    assert first.header.flags & Columns.OPTIONS
    assert not second.header.flags & Columns.OPTIONS
    assert decode_headers((first.raw_headers() or [None])[0]) == [
        ("x", b"y"),
        ("millstream-dedup-id", b"order-17"),
        ("millstream-max-retries", b"2"),
        ("millstream-lease-ms", b"300000"),
    ]


def test_a_message_with_a_dedup_id_is_a_batch_of_its_own(fake: FakeBroker, client: millstream.Client) -> None:
    special = millstream.Outgoing(value=b"d", dedup_id="d")
    receipts = client.publish_many("t", [b"0", b"1", special, b"3", special, special, b"6"])
    assert [receipt.offset for receipt in receipts] == list(range(7))
    with client.producer("t", linger_ms=1000) as producer:
        producer.send(b"7")
        producer.send(b"8", dedup_id="e")
        producer.send(b"9")
        producer.send(b"10", max_retries=1)
    assert [batch.count for batch in batches(fake)] == [2, 1, 1, 1, 1, 1, 1, 1, 2]
    assert fake.values("t") == [b"0", b"1", b"d", b"3", b"d", b"d", b"6", b"7", b"8", b"9", b"10"]


def test_priorities_have_names(fake: FakeBroker, client: millstream.Client) -> None:
    for priority in ("critical", "high", "normal", "low", "background", 1):
        client.publish("t", b"x", priority=priority)  # type: ignore[arg-type]
    assert [(batch.priorities() or [2])[0] for batch in batches(fake)] == [0, 1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "urgent"},
        {"priority": 5},
        {"priority": True},
        {"dedup_id": ""},
        {"max_retries": -1},
        {"lease": "1ms"},
        {"lease": "2d"},
    ],
)
def test_options_that_cannot_be_are_refused(client: millstream.Client, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        client.publish("t", b"x", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"value": "\ud800"}, "a value cannot be written as UTF-8"),
        ({"key": "\ud800"}, "a key cannot be written as UTF-8"),
        ({"dedup_id": "\ud800"}, "a dedup id cannot be written as UTF-8"),
        ({"partition": "x"}, "partition is a number, not 'x'"),
        ({"partition": 1.5}, "partition is a number, not 1.5"),
        ({"value": None, "json": _CIRCLE}, "json= cannot be written as JSON: maximum recursion depth exceeded"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(
    client: millstream.Client, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        client.publish("t", **{"value": b"x", **options})


@pytest.mark.parametrize("start", [2**63, -1, {0: -1}, {0: 2**63}, {"a": 1}, 1.5])
def test_a_start_that_is_no_offset_is_refused_in_words(client: millstream.Client, start: Any) -> None:
    with pytest.raises(InvalidArgument, match="start is 'earliest', 'latest', a datetime, an offset"):
        client.stream("t", start=start)


@pytest.mark.parametrize("offset", [2**63, 2**70, -1])
def test_a_place_to_go_on_from_that_is_no_offset_is_refused_in_words(client: millstream.Client, offset: int) -> None:
    """It was taken, and every message that was asked for afterwards was an error of the packing."""
    client.publish("t", b"x")
    with client.stream("t", start="earliest") as stream:
        with pytest.raises(InvalidArgument, match="an offset is 0 or more and has 63 bits, not"):
            stream.seek("t", 0, offset)
        message = stream.next(5)
        assert message is not None
        assert message.value == b"x"


@pytest.mark.parametrize(
    "value", [bytearray(b"12345678"), memoryview(array("I", [1, 2])), memoryview(b"12345678")[::2]]
)
def test_a_header_that_is_not_quite_bytes_arrives_whole(
    fake: FakeBroker, client: millstream.Client, value: bytes
) -> None:
    """Of a view of numbers these were counted, not its bytes: the message was stored and nobody could read it."""
    client.publish("t", b"x", headers={"before": "1", "it": value, "behind": "2"})
    (batch,) = batches(fake)
    assert decode_headers((batch.raw_headers() or [None])[0]) == [
        ("before", b"1"),
        ("it", bytes(value)),
        ("behind", b"2"),
    ]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.publish(b"t", b"x"),
        lambda client: client.publish(None, b"x"),
        lambda client: client.stream(b"t"),
        lambda client: client.stream("t", group=b"g"),
        lambda client: client.queue(b"t"),
        lambda client: client.queue("t", group=5),
        lambda client: client.subscribe(b"t"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_name_that_is_no_text_is_refused_in_words(
    fake: FakeBroker, ask: Callable[[Any], Any], asynchronous: bool
) -> None:
    """It was a TypeError about patterns of a regular expression."""
    either = EitherClient(fake.address, asynchronous=asynchronous)
    with pytest.raises(InvalidName, match=r"\((bytes|int|NoneType), not text\) is not valid"):
        either.do(ask(either.client))
    either.end()


def test_a_session_of_no_length_is_refused_in_words(client: millstream.Client) -> None:
    with pytest.raises(InvalidArgument, match="session_ms must be 1 or more, not -1"):
        client.stream("t", group="g", session_ms=-1)


@pytest.mark.parametrize("lease", ["0s", 0, "99ms", "13h"])
def test_a_lease_of_no_length_is_not_taken_for_the_usual_one(client: millstream.Client, lease: str | int) -> None:
    with pytest.raises(InvalidArgument, match="a lease lasts between 100 ms and 12 hours"):
        client.queues.lease("t", lease=lease)
    with pytest.raises(InvalidArgument, match="a lease lasts between 100 ms and 12 hours"):
        client.queue("t", lease=lease)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.topic("a\udcff"),
        lambda client: client.keys.create("read", name="\udcff"),
        lambda client: client.queues.settle("reject", ["t:0:0:1:0000010175cc0b28"], reason="\ud800"),
    ],
)
def test_a_text_that_is_none_is_refused_before_it_is_sent(ask: Any, client: millstream.Client) -> None:
    """As the shell hands over bytes that are not UTF-8."""
    with pytest.raises(InvalidArgument, match="cannot be written as UTF-8"):
        ask(client)


def test_the_asynchronous_client_refuses_such_a_text_as_well(fake: FakeBroker) -> None:
    async def ask() -> None:
        async with millstream.aio.connect(fake.address) as client:
            with pytest.raises(InvalidArgument, match="cannot be written as UTF-8"):
                await client.topic("a\udcff")

    asyncio.run(ask())


def test_a_key_that_is_no_text_is_refused(fake: FakeBroker) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written as UTF-8"):
        millstream.connect(fake.address, key="\udcff")


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_no_number_does_not_mean_none(rate: float, client: millstream.Client) -> None:
    with pytest.raises(InvalidArgument, match="rate is a number"):
        client.webhooks.create("t", "http://localhost/", rate=rate)
    with pytest.raises(InvalidArgument, match="rate is a number"):
        client.dead_letters.replay(everything=True, rate=rate)


def test_a_lease_that_is_extended_by_nothing_does_not_get_the_usual_length(client: millstream.Client) -> None:
    with pytest.raises(InvalidArgument, match="an extension is more than 0"):
        client.queues.settle("extend", ["t:0:0:1:0000010175cc0b28"], delay=0)


@pytest.mark.parametrize("messages", ["hello", b"hello", bytearray(b"hello"), millstream.Outgoing(value="hello")])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_single_message_is_not_taken_for_many(fake: FakeBroker, messages: Any, asynchronous: bool) -> None:
    """Each letter of a text was published as a message."""
    either = EitherClient(fake.address, asynchronous=asynchronous)
    with pytest.raises(InvalidArgument, match="publish_many takes a list of messages; publish is for a single one"):
        either.do(either.client.publish_many("t", messages))
    either.end()
    assert fake.publishes == []


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("producer", {"linger_ms": "5"}, "linger_ms is between 0 and 60000, not '5'"),
        ("producer", {"batch_bytes": "5"}, "batch_bytes is between 1 and 5242880, not '5'"),
        ("producer", {"window": None}, "window is between 1 and 16, not None"),
        ("producer", {"buffer_bytes": "1"}, "buffer_bytes must be more than 0, not '1'"),
        ("producer", {"delivery_timeout_s": math.inf}, "delivery_timeout_s is a number of seconds, not inf"),
        ("producer", {"delivery_timeout_s": 0}, "delivery_timeout_s must be more than 0, not 0"),
        ("producer", {"send_timeout_s": "1"}, "send_timeout_s is a number of seconds, not '1'"),
        ("producer", {"on_error": "log"}, "on_error is a function, not 'log'"),
        ("stream", {"on_assigned": 5}, "on_assigned is a function, not 5"),
        ("stream", {"on_revoked": "x"}, "on_revoked is a function, not 'x'"),
        ("stream", {"timeout_s": math.inf}, "timeout_s is a number of seconds or None, not inf"),
        ("stream", {"max_bytes": "1"}, "max_bytes is 1 to 10485760, not '1'"),
        ("stream", {"commit_interval_s": "1"}, "commit_interval_s must be more than 0, not '1'"),
        ("subscribe", {"timeout_s": "1"}, "timeout_s is a number of seconds or None, not '1'"),
        ("queue", {"prefetch": "10"}, "prefetch is between 1 and 1000000, not '10'"),
        ("queue", {"timeout_s": math.nan}, "timeout_s is a number of seconds or None, not nan"),
        ("worker", {"concurrency": "8"}, "concurrency must be 1 or more, not '8'"),
        ("worker", {"prefetch": 0}, "prefetch is between 1 and 1000000, not 0"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_an_option_that_cannot_be_is_refused_in_words(
    fake: FakeBroker, kind: str, options: dict[str, Any], sentence: str, asynchronous: bool
) -> None:
    either = EitherClient(fake.address, asynchronous=asynchronous)
    with pytest.raises(InvalidArgument, match=sentence):
        either.do(getattr(either.client, kind)("t", **options))
    either.end()


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, "5", 0])
def test_a_client_without_a_time_limit_is_refused(fake: FakeBroker, timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s must be a number of seconds, and more than 0"):
        millstream.connect(fake.address, timeout_s=timeout_s)
