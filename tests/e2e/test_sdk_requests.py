"""Requests and replies over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import millstream
from millstream.client import Client
from millstream.errors import ConnectionLost, InvalidName, NoReplyAddress, RequestTimeout
from millstream.options import CORRELATION_ID, REPLY_TO
from millstream.testing.broker import BrokerForTests
from tests.native import NativeClient


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


class Service:
    """A thread that answers what is published to a topic."""

    def __init__(self, client: Client, topic: str, answer: Callable[[millstream.Message], object]) -> None:
        self.subscription = client.subscribe(topic)
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for message in self.subscription:
            self._answer(message)

    def stop(self) -> None:
        self.subscription.close()
        self._thread.join(10)


def test_a_request_gets_its_reply(client: Client) -> None:
    service = Service(client, "sums", lambda message: message.reply(json=sum(message.json()), headers={"by": "us"}))
    reply = client.request("sums", json=[1, 2, 3], headers={"mine": "kept"}, timeout="10s")
    assert reply.json() == 6
    assert reply.headers["by"] == "us"
    service.stop()


def test_many_requests_share_the_inbox_and_each_gets_its_own_reply(client: Client) -> None:
    service = Service(client, "echo", lambda message: message.reply(message.value))
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda n: client.request("echo", str(n), timeout=20).text, range(300)))
    assert replies == [str(n) for n in range(300)]
    service.stop()


def test_without_a_reply_the_request_times_out_and_a_late_one_is_dropped_and_counted(client: Client) -> None:
    asked: list[millstream.Message] = []
    service = Service(client, "slow", asked.append)
    with pytest.raises(RequestTimeout, match=r"no reply came within 1 s"):
        client.request("slow", b"?", timeout=1)
    while not asked:
        pass
    assert asked[0].reply(b"late") is not None
    assert asked[0].reply(b"later") is not None
    # What comes next on the connection comes behind the late ones.
    client.broker()
    assert client.late_replies == 2
    service.stop()


def test_of_two_replies_the_first_counts(client: Client) -> None:
    def answer_twice(message: millstream.Message) -> None:
        message.reply(b"first")
        message.reply(b"second")

    service = Service(client, "twice", answer_twice)
    assert client.request("twice", b"?", timeout=10).value == b"first"
    assert client.request("twice", b"?", timeout=10).value == b"first"
    service.stop()


def test_a_reply_to_somebody_who_is_gone_is_none(broker: BrokerForTests, client: Client) -> None:
    subscription = client.subscribe("bye")
    with millstream.connect(broker.address) as leaving, pytest.raises(RequestTimeout):
        leaving.request("bye", b"?", timeout=1)
    message = subscription.next(10)
    assert message is not None
    while broker.broker.metrics.subscriptions > 1:
        pass
    assert message.reply(b"!") is None
    assert client.topics("#") == client.topics("bye"), "no topic was made for it"


def test_a_message_that_is_no_request_cannot_be_replied_to(client: Client) -> None:
    subscription = client.subscribe("news")
    client.publish("news", b"x")
    message = subscription.next(10)
    assert message is not None
    with pytest.raises(NoReplyAddress, match="does not ask for a reply"):
        message.reply(b"y")


def test_messages_of_a_stream_can_be_replied_to(client: Client) -> None:
    client.create_topic("jobs")
    stream = client.stream("jobs", timeout_s=10)

    def serve() -> None:
        for message in stream:
            message.reply(message.text.upper())
            return

    thread = threading.Thread(target=serve)
    thread.start()
    assert client.request("jobs", "shout", timeout=10).text == "SHOUT"
    thread.join()


def test_a_reply_may_go_to_an_ordinary_topic(client: Client) -> None:
    answers = client.subscribe("answers")
    questions = client.subscribe("questions")
    client.publish("questions", b"?", headers={REPLY_TO: "answers", CORRELATION_ID: "abc"})
    question = questions.next(10)
    assert question is not None
    question.reply(b"!")
    answer = answers.next(10)
    assert answer is not None
    assert (answer.value, answer.headers) == (b"!", {CORRELATION_ID: "abc"})


def test_requests_go_on_after_the_broker_came_back(tmp_path: Path) -> None:
    """The one that waited while the broker was away gets its reply under the same address."""
    with BrokerForTests(tmp_path / "data") as first:
        port = int(first.address.rsplit(":", 1)[1])
        client, other = millstream.connect(first.address), millstream.connect(first.address)
        asked = other.subscribe("ask")
        replies: list[bytes | None] = []
        waiting = threading.Thread(target=lambda: replies.append(client.request("ask", b"?", timeout=20).value))
        waiting.start()
        message = asked.next(10)
        assert message is not None
    with BrokerForTests(tmp_path / "data", port=port) as second:
        while second.broker.metrics.subscriptions < 1 or message.reply(b"!") is None:
            pass
        waiting.join(20)
        assert replies == [b"!"]
        service = Service(other, "echo", lambda message: message.reply(message.value))
        assert client.request("echo", b"again", timeout=10).value == b"again"
        service.stop()
        client.close()
        other.close()


def test_an_inbox_belongs_to_its_client_and_its_name_is_reserved(broker: BrokerForTests, client: Client) -> None:
    with NativeClient(broker.address, client_id="a") as mine, NativeClient(broker.address, client_id="b") as theirs:
        address = mine.call("inbox.open")["address"]
        with pytest.raises(InvalidName, match="another client's"):
            theirs.call("inbox.open", address=address)
        with pytest.raises(InvalidName, match="not the address of an inbox"):
            theirs.call("inbox.open", address="_inbox.short")
        with pytest.raises(InvalidName, match="are inboxes"):
            theirs.call("topic.create", name="_inbox.mine")


def test_nobody_overhears_replies(client: Client) -> None:
    ears = client.subscribe("#")
    service = Service(client, "secret", lambda message: message.reply(b"!"))
    client.request("secret", b"?", timeout=10)
    heard = ears.next(10)
    assert heard is not None
    assert heard.topic == "secret"
    assert ears.next(0.1) is None
    service.stop()


def test_async_requests(broker: BrokerForTests) -> None:
    async def run() -> None:
        async with millstream.aio.connect(broker.address) as client, client.subscribe("echo") as questions:

            async def serve() -> None:
                async for message in questions:
                    if message.value != b"silence":
                        await message.reply(message.value)

            serving = asyncio.create_task(serve())
            replies = await asyncio.gather(*(client.request("echo", str(n), timeout=10) for n in range(200)))
            assert [reply.text for reply in replies] == [str(n) for n in range(200)]
            with pytest.raises(RequestTimeout, match="no reply came"):
                await client.request("echo", b"silence", timeout=0.1)
            await questions.close()
            await serving

    asyncio.run(run())


def test_an_async_request_outlives_its_connection(tmp_path: Path) -> None:
    async def run() -> None:
        first = BrokerForTests(tmp_path / "data").start()
        port = int(first.address.rsplit(":", 1)[1])
        async with millstream.aio.connect(first.address) as client, client.subscribe("ask") as asked:
            waiting = asyncio.create_task(client.request("ask", b"?", timeout=20))
            message = await asked.next(10)
            assert message is not None
            await asyncio.to_thread(first.stop)
            with BrokerForTests(tmp_path / "data", port=port):
                while await message.reply(b"!") is None:  # noqa: ASYNC110 - until the inbox is open again
                    await asyncio.sleep(0.01)
                assert (await waiting).value == b"!"
                await asked.close()
                await client.close()

    asyncio.run(run())


def test_an_async_request_ends_with_its_client(broker: BrokerForTests) -> None:
    """It waited for its whole time: nobody looked for replies any more, and nobody said so."""

    async def run() -> None:
        async with asyncio.timeout(20), millstream.aio.connect(broker.address) as client:
            async with client.subscribe("ask") as asked:
                waiting = asyncio.create_task(client.request("ask", b"?", timeout=60))
                assert await asked.next(10) is not None
            await client.close()
            with pytest.raises(ConnectionLost, match="the client is closed"):
                await waiting

    asyncio.run(run())


def test_messages_of_a_queue_can_be_replied_to(client: Client) -> None:
    client.create_topic("jobs")
    queue = client.queue("jobs", timeout_s=10)

    def serve() -> None:
        message = queue.next(10)
        assert message is not None
        message.reply(message.text.upper())
        message.ack()

    thread = threading.Thread(target=serve)
    thread.start()
    assert client.request("jobs", "shout", timeout=10).text == "SHOUT"
    thread.join()


def test_a_request_nobody_waits_for_is_not_worked_on(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs")
    with pytest.raises(RequestTimeout):
        client.request("jobs", "too late", timeout=0.05)
    client.publish("jobs", "another")
    broker.clock.advance("1s")
    with client.queue("jobs") as queue:
        message = queue.next(10)
        assert message is not None
        assert message.text == "another"
