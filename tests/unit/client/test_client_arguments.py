"""Arguments of another type than the one that is meant: one sentence that names them, and nothing is sent."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import pickle
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from fake_broker import FakeBroker
from fake_queues import FakeQueues

import millstream
from millstream import aio
from millstream.errors import InvalidArgument, MillstreamError
from tests.either import EitherClient

_WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("why", lambda c: c.why(None), "message id"),
    ("offsets", lambda c: c.commit_offsets("g", [("orders", 0)]), "offsets are a mapping"),
    ("offset of a topic", lambda c: c.commit_offsets("g", {"orders": 5}), "offsets are a mapping"),
    ("headers of a schedule", lambda c: c.schedules.repeat("n", "t", "* * * * *", b"x", headers=[1]), "headers is a"),
    ("headers to set", lambda c: c.dead_letters.replay(set_headers="x"), "set_headers is a mapping"),
    ("headers to find", lambda c: c.dead_letters.list(headers="x"), "headers is a mapping"),
    ("ids of letters", lambda c: c.dead_letters.replay(ids=5), "ids is a list"),
    ("headers of a webhook", lambda c: c.webhooks.create("t", "http://x", headers="x"), "headers is a mapping"),
    ("config", lambda c: c.create_topic("t", config="a"), "config is a mapping"),
    ("config to change", lambda c: c.alter_topic("t", config=5), "config is a mapping"),
    ("partitions", lambda c: c.create_topic("t", partitions=object()), "partitions cannot be sent"),
    ("policy", lambda c: c.queue("t", policy="x"), "policy is a mapping"),
    ("limit of browse", lambda c: c.browse("t", limit="10"), "limit is a whole number"),
    ("limit of traces", lambda c: c.traces(limit="10"), "limit is a whole number"),
    ("limit of schedules", lambda c: c.schedules.list("t", limit="10"), "limit is a whole number"),
    ("topic", lambda c: c.publish(["t"], b"x"), "topic"),
    ("topic and key", lambda c: c.publish(["t"], b"x", key="k"), "topic"),
    ("topic of many", lambda c: c.publish_many(["t"], [b"x"]), "topic"),
    ("messages", lambda c: c.publish_many("t", 5), "messages is a list"),
    ("topics", lambda c: c.stream(5), "topics is a list"),
    ("topics of a group", lambda c: c.committed("g", topics="orders"), "topics is a list"),
    ("scopes", lambda c: c.keys.create("admin", scopes=5), "scopes is a list"),
    ("name", lambda c: c.keys.create("admin", name={(1, 2): 3}), "name cannot be sent"),
]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def either(request: pytest.FixtureRequest, fake: FakeBroker) -> Iterator[EitherClient]:
    fake.topic("t")
    either = EitherClient(fake.address, asynchronous=request.param)
    yield either
    either.end()


@pytest.mark.parametrize(("call", "said"), [pytest.param(call, said, id=name) for name, call, said in _WRONG])
def test_an_argument_of_the_wrong_type_is_refused_by_name(
    either: EitherClient, fake: FakeBroker, call: Callable[[Any], Any], said: str
) -> None:
    either.do(either.client.publish("t", b"first"))
    with pytest.raises(MillstreamError, match=said) as raised:
        either.do(call(either.client))
    assert raised.value.code in ("INVALID_ARGUMENT", "INVALID_NAME")
    assert fake.values("t") == [b"first"]


@pytest.mark.parametrize("connect", [millstream.connect, aio.connect])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"address": 9092}, "write host:port"),
        ({"timeout_s": 1e300}, "at most 1000000"),
        ({"ca": 5}, "the authorities in ca=5 cannot be used"),
    ],
)
def test_a_connection_has_an_address_and_a_limit(connect: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        connect(**arguments)


def test_what_fails_in_the_messages_of_the_user_is_not_blamed_on_their_type(either: EitherClient) -> None:
    def messages() -> Iterator[bytes]:
        yield b"x"
        raise TypeError("a mistake of the program")

    with pytest.raises(TypeError, match="a mistake of the program"):
        either.do(either.client.publish_many("t", messages()))


class _Price(msgspec.Struct):
    amount: float
    unit: str | None = None


@pytest.mark.parametrize(
    "value",
    [math.nan, [math.inf], {"a": {"b": (1, -math.inf)}}, _Price(math.nan), {"n": None, "x": math.nan}],
    ids=repr,
)
def test_a_number_that_json_does_not_have_is_refused(either: EitherClient, fake: FakeBroker, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="it has NaN or an infinity"):
        either.do(either.client.publish("t", json=value))
    assert fake.values("t") == []


def test_null_is_json_like_any_other(either: EitherClient, fake: FakeBroker) -> None:
    deep: Any = None
    for _ in range(500):
        deep = [deep]
    values = [{"n": None}, "null", _Price(1.5), {1: None}, msgspec.Raw(b"[null]"), [deep, 1.0]]
    for value in values:
        either.do(either.client.publish("t", json=value))
    assert fake.values("t") == [msgspec.json.encode(value) for value in values]


def test_memory_that_lies_in_pieces_is_no_json(either: EitherClient) -> None:
    with pytest.raises(InvalidArgument, match="json= cannot be written as JSON"):
        either.do(either.client.publish("t", json=memoryview(array("b", range(8)))[::2]))


@pytest.mark.parametrize("limit", [math.inf, math.nan, "x"])
def test_a_worker_is_stopped_within_a_number_of_seconds(either: EitherClient, limit: Any) -> None:
    worker = either.client.worker("t")(lambda message: None)
    with pytest.raises(InvalidArgument, match="timeout_s is a number of seconds"):
        either.do(worker.stop(limit))


class _Methods:
    def fits(self, message: object) -> None: ...

    def does_not(self) -> None: ...


def _keyword(*, message: object) -> None: ...


def _two(message: object, more: object) -> None: ...


@pytest.mark.parametrize("handler", [object(), None, "handle", lambda: None, _Methods().does_not, _keyword, _two])
def test_a_handler_that_cannot_take_a_message_is_refused(either: EitherClient, handler: Any) -> None:
    with pytest.raises(InvalidArgument, match="message"):
        either.client.worker("t")(handler)


@pytest.mark.parametrize(
    "handler",
    [print, lambda *args: None, lambda message, more=5: None, _Methods().fits, functools.partial(_two, 1), dict, id],
)
def test_a_handler_that_can_is_not(either: EitherClient, handler: Any) -> None:
    either.client.worker("t")(handler)


def test_a_coroutine_function_that_takes_nothing_is_refused_as_well(fake: FakeBroker) -> None:
    async def handle() -> None: ...

    async def main() -> None:
        async with aio.connect(fake.address) as client:
            with pytest.raises(InvalidArgument, match="cannot be called with a message"):
                client.worker("t")(handle)

    asyncio.run(main())


def test_a_message_that_is_pickled_says_what_to_pass_on_instead() -> None:
    with FakeQueues() as fake, millstream.connect(fake.address) as client:
        client.publish("t", b"x", key="k")
        with client.stream("t") as stream, client.queue("t") as queue:
            for message in (stream.next(10), queue.next(10)):
                assert message is not None
                with pytest.raises(TypeError, match=r"pass on message\.value, message\.key and message\.headers"):
                    pickle.dumps(message)
                for twin in (copy.copy(message), copy.deepcopy([message])[0]):
                    assert (twin.value, twin.key, twin.id) == (b"x", b"k", message.id)
