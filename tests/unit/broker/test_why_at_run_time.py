"""What the broker says when somebody asks why: of messages that are done with, and of whole queues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.errors import MessageNotFound, StorageFailed
from millstream.ids import message_id
from millstream.log.partition import PartitionLog
from millstream.wire import calls, queue_calls
from millstream.wire.leases import Settle
from tests.simulated_broker import Client
from tests.unit.broker.test_queues_at_run_time import lives, publish, topic_of

CONFIG = {"retry": "standard,max_retries=0"}


async def why(client: Client, **about: Any) -> queue_calls.Explanation:
    answer = await client.call(queue_calls.Explain(**about))
    assert isinstance(answer, queue_calls.Explanation)
    return answer


async def ids_of(client: Client) -> list[str]:
    messages = await client.call(queue_calls.PeekQueue(topic="orders", group="default", limit=100))
    assert isinstance(messages, list)
    return [message.id for message in messages]


@pytest.mark.parametrize("restart", [False, True])
def test_why_of_a_settled_message_says_how_it_was_settled(restart: bool) -> None:
    ids: list[str] = []

    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config=CONFIG))
        await client.send([b"acked", b"rejected", b"failed"])
        consumer = await client.open_queue()
        await publish(client, [b"expired"], expiry_us=[client.broker._clock.now_us() + 200_000])
        await client.send([b"purged"])
        ids.extend(await ids_of(client))
        acked, rejected, failed, *_ = await client.lease(consumer, 3)
        await client.settle(Settle.ACK, acked)
        await client.settle(Settle.REJECT, rejected, reason="bad payload")
        await client.settle(Settle.NACK, failed, reason="db down")
        await asyncio.sleep(0.3)
        for _ in range(5):
            await client.broker.queues.sweep()
        await client.call(queue_calls.PurgeQueue(topic="orders", group="default"))
        if not restart:
            await look(client)

    async def look(client: Client) -> None:
        told = [await why(client, id=some) for some in ids]
        assert [some.state for some in told] == ["settled"] * 5
        assert [some.facts.get("settled_as") for some in told] == ["acked", "dead", "dead", "expired", "purged"]
        assert "acked" in told[0].sentence
        for answer, reason, error in (
            (told[1], "REJECTED", "bad payload"),
            (told[2], "MAX_RETRIES_EXCEEDED", "db down"),
        ):
            assert "dead letter" in answer.sentence
            assert (answer.facts["reason"], answer.facts["error"]) == (reason, error)
            assert answer.facts["dead_letter_topic"] == "orders.dlq"
            letter = await why(client, id=answer.facts["dead_letter"])
            assert letter.state == "dead-letter"
            assert letter.facts["original_id"] == ids[told.index(answer)]
        assert "expired" in told[3].facts["settled_as"]

    lives(fill, *([look] if restart else []))


def test_why_of_a_dead_letter_that_is_gone_says_where_it_went() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config=CONFIG))
        await client.send([b"x"])
        consumer = await client.open_queue()
        (some,) = await ids_of(client)
        await client.settle(Settle.REJECT, *await client.lease(consumer), reason="no")
        before = await why(client, id=some)
        box, offset = client.broker.letters.locate("default", before.facts["dead_letter"])
        await box.settle([offset])
        after = await why(client, id=some)
        assert "replayed or purged" in after.sentence
        assert "dead_letter" not in after.facts

    lives(work)


def test_why_of_a_queue_names_what_is_missing() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"] * 3)
        consumer = await client.open_queue()
        await client.call(queue_calls.CloseQueue(consumer=consumer))
        told = await why(client, topic="orders", group="default")
        assert told.state == "no-consumer"
        assert "Nobody consumes" in told.sentence
        assert told.facts["depth"] == 3
        await client.call(queue_calls.ConfigureQueue(topic="orders", group="default", policy={"paused": True}))
        told = await why(client, topic="orders", group="default")
        assert told.state == "paused"
        assert "no consumer is connected" in told.sentence, "to resume it would not be enough"
        await client.open_queue()
        told = await why(client, topic="orders", group="default")
        assert "no consumer" not in told.sentence

    lives(work)


def test_why_of_a_queue_says_that_publishers_are_slowed_down() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"throttle_depth": 2, "max_depth": 10}))
        consumer = await client.open_queue()
        await client.send([b"x"] * 10)
        (throttle,) = client.broker.flow._throttles.values()
        for second in range(1, 60):
            throttle.controller.sample(throttle.heard_ms + second * 1000, lag_ms=0, depth=10)
        told = await why(client, topic="orders", group="default")
        assert told.facts["flow"] in ("critical", "overloaded")
        assert "publishers are slowed down" in told.sentence
        assert "full" in told.sentence
        await client.settle(Settle.ACK, *await client.lease(consumer))
        assert client.broker.queues.depth(topic_of(client)) == 0

    lives(work)


def id_at(client: Client, offset: int) -> str:
    return message_id(client.broker._clock.now_us(), topic_of(client).partition_uids[0], offset)


def test_why_of_a_message_that_was_never_stored_says_that_there_is_none() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        with pytest.raises(MessageNotFound, match="no message has the id"):
            await why(client, id=id_at(client, 0))
        await client.send([b"x"] * 3)
        for group in ("", "default"):
            with pytest.raises(MessageNotFound, match="no message has the id"):
                await why(client, id=id_at(client, 3), group=group)
            await client.open_queue()
        assert (await why(client, id=id_at(client, 2))).state == "ready"

    lives(work)


def test_why_of_a_message_from_before_the_group_says_where_the_group_begins() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"] * 3)
        await client.open_queue(start="latest")
        told = await why(client, id=id_at(client, 1))
        assert told.sentence == "Offset 1 is none of this group's: it begins at offset 3."
        assert told.facts["begins"] == 3

    lives(work)


@pytest.mark.parametrize("ordering", ["strict", "key"])
def test_no_message_is_said_to_wait_for_itself(ordering: str) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"] * 2, keys=[b"k"] * 2)
        consumer = await client.open_queue(policy={"ordering": ordering})
        await client.settle(Settle.RELEASE, *await client.lease(consumer, 1))
        first, second = [await why(client, id=id_at(client, offset)) for offset in range(2)]
        assert "every consumer has as many messages as it asked for" in first.sentence
        assert second.facts["held_by"] == 0

    lives(work)


def test_why_of_a_queue_that_cannot_be_read_does_not_say_that_everything_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"])
        await client.open_queue()
        client.broker.queues.log_rewritten(client.broker.topics.partition("default", "orders", 0))

        def fail(*_: object, **__: object) -> Any:
            raise StorageFailed("cannot read the log")

        with monkeypatch.context() as patch:
            patch.setattr(PartitionLog, "read", fail)
            with pytest.raises(StorageFailed):
                await why(client, topic="orders")
        assert (await why(client, topic="orders")).facts["depth"] == 1

    lives(work)


def test_why_of_a_message_that_compaction_took_says_that_it_is_gone() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"cleanup": "compact"}))
        await client.open_queue()
        for number in range(60):
            await publish(client, [bytes(1000)] * 2, keys=[b"same", b"k%d" % number])
        await client.broker._life.cleanup.run()
        old, other = [await why(client, id=id_at(client, offset)) for offset in range(2)]
        assert (old.state, other.state) == ("gone", "ready")
        assert "it was removed" in old.sentence
        told = await why(client, topic="orders")
        assert "The oldest, offset 1: It is ready" in told.sentence

    lives(work)
