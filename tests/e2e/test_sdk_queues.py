"""Queues as users use them: the SDK and a real broker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest

import millstream
from millstream import Settled, aio
from millstream.errors import ConfigInvalid, MessageNotFound, ReceiptInvalid
from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.waiting import eventually


def fill(client: millstream.Client, count: int, partitions: int = 1) -> None:
    client.create_topic("t", partitions=partitions, if_missing=True)
    for number in range(partitions):
        outgoing = [millstream.Outgoing(value=b"%d" % at, partition=number) for at in range(count // partitions)]
        client.publish_many("t", outgoing)


def test_every_message_is_worked_on_once(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 4000, partitions=4)
        seen: list[str] = []
        with client.queue("t", group="billing", prefetch=300, lease="30s", timeout_s=10) as queue:
            for message in islice(queue, 4000):
                seen.append(message.id)
                message.ack()
        assert len(seen) == len(set(seen)) == 4000
        assert client.queues.describe("t", "billing").depth == 0
        with client.queue("t", group="billing", timeout_s=0.2) as queue:
            assert list(queue) == []


def test_groups_do_not_disturb_each_other(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 100)
        for group in ("billing", "audit"):
            with client.queue("t", group=group, timeout_s=10) as queue:
                assert len({message.offset for message in islice(queue, 100) if message.ack() is None}) == 100


def test_consumers_share_a_group(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1000)
        seen: list[list[int]] = [[], [], []]

        def consume(mine: list[int]) -> None:
            with millstream.connect(broker.address) as other:
                for message in other.queue("t", prefetch=20, timeout_s=1):
                    mine.append(message.offset)
                    message.ack()

        threads = [threading.Thread(target=consume, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(offset for mine in seen for offset in mine) == list(range(1000))


def test_a_burst_is_spread_over_idle_consumers(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t")
        seen: list[list[int]] = [[], [], []]

        def consume(mine: list[int]) -> None:
            with millstream.connect(broker.address) as other:
                for message in other.queue("t", timeout_s=2):
                    mine.append(message.offset)
                    message.ack()

        threads = [threading.Thread(target=consume, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()

        def asked() -> list[int]:
            found = client.queues.list()
            return [consumer.requested for queue in found for consumer in client.queues.describe("t").consumers]

        eventually(lambda: asked() == [500] * 3)
        client.publish_many("t", [b"%d" % at for at in range(60)])
        for thread in threads:
            thread.join(30)
        assert [len(mine) for mine in seen] == [20, 20, 20]
        assert sorted(offset for mine in seen for offset in mine) == list(range(60))


def test_a_nacked_message_comes_again_and_a_rejected_one_never(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 3)
        with client.queue("t", timeout_s=0.5) as queue:
            first, second, third = queue.lease(max=3, wait="5s")
            assert queue.nack([first], "db down", retry_after="10ms") == [Settled.RETRIED]
            assert queue.reject([second], "bad payload") == [Settled.DEAD]
            third.ack(wait=True)
            again = queue.next(5)
            assert again is not None
            assert (again.offset, again.delivery_count, again.failures) == (0, 2, 1)
            (attempt,) = again.history()
            assert (attempt.kind, attempt.reason) == ("nack", "db down")
            again.ack(wait=True)
            assert queue.next(0.2) is None


def test_a_late_ack_is_refused_and_changes_nothing(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        with client.queue("t", lease="100ms", auto_extend=False, policy={"retry": "simple"}) as queue:
            (message,) = queue.lease(wait="5s")
            time.sleep(0.4)
            with pytest.raises(ReceiptInvalid):
                message.ack(wait=True)
            (again,) = queue.lease(wait="5s")
            assert again.redelivered
            again.ack(wait=True)
            again.ack(wait=True)  # once more is a success


def test_a_handler_that_blocks_keeps_its_lease(broker: BrokerForTests) -> None:
    """Three leases long, in the thread that reads, with more leased ahead."""
    with millstream.connect(broker.address) as client:
        fill(client, 10)
        deliveries: list[tuple[int, int]] = []
        with client.queue("t", prefetch=10, lease="700ms", timeout_s=10) as queue:
            for message in islice(queue, 10):
                if message.offset == 0:
                    time.sleep(2.1)
                deliveries.append((message.offset, message.delivery_count))
                message.ack()
        assert deliveries == [(offset, 1) for offset in range(10)]
        assert queue.stats.refused == 0


def test_a_message_that_is_never_settled_does_not_stop_the_queue(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        policy = {"retry": "standard,initial=0ms,max_retries=5"}
        with client.queue("t", prefetch=1, lease="200ms", auto_extend=False, policy=policy) as queue:
            for failures in range(3):
                message = queue.next(5)
                assert message is not None
                assert (message.failures, message.delivery_count) == (failures, failures + 1)


def test_what_was_not_begun_when_its_lease_ended_has_not_failed(broker: BrokerForTests) -> None:
    """Only the one that somebody was too slow with."""
    with millstream.connect(broker.address) as client:
        fill(client, 4)
        begun: list[tuple[int, int]] = []
        options = {"lease": "3s", "auto_extend": False, "policy": {"retry": "standard,initial=0ms"}}
        with client.queue("t", prefetch=8, timeout_s=1, **options) as queue:
            for message in queue:
                if not begun:
                    time.sleep(3.3)
                begun.append((message.offset, message.failures))
                message.ack()
        assert sorted(begun) == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
        assert queue.stats.refused == 1


def test_leaving_the_loop_frees_what_was_leased_ahead(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 100)
        with client.queue("t", prefetch=100) as queue:
            for message in queue:
                message.ack(wait=True)
                break
            with client.queue("t", prefetch=100, timeout_s=10) as other:
                taken = islice(other, 99)
                rest = [(message.offset, message.failures) for message in taken if message.ack() is None]
        assert sorted(rest) == [(offset, 0) for offset in range(1, 100)]


@pytest.mark.parametrize("wait", [False, True])
def test_a_message_whose_queue_was_dropped_is_given_back_and_says_so(broker: BrokerForTests, wait: bool) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        message = client.queue("t").next(10)
        assert message is not None
        with pytest.raises(ReceiptInvalid, match=r"keep the queue \(queue = client.queue"):
            message.ack(wait=wait)
        with client.queue("t") as queue:
            again = queue.next(10)
            assert again is not None
            again.ack(wait=True)


def test_a_consumer_that_is_killed_frees_its_messages_at_once(broker: BrokerForTests, tmp_path: Path) -> None:
    program = tmp_path / "doomed.py"
    program.write_text(
        "import sys, time, millstream\n"
        "with millstream.connect(sys.argv[1]) as client:\n"
        "    for message in client.queue('t', prefetch=10, lease='10m'):\n"
        "        print('took', flush=True)\n"
        "        time.sleep(600)\n"
    )
    with millstream.connect(broker.address) as client:
        fill(client, 10)
        with subprocess.Popen([sys.executable, program, broker.address], stdout=subprocess.PIPE) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == b"took\n"
            eventually(lambda: client.queues.describe("t").leased == 10)
            doomed.kill()
        with client.queue("t", timeout_s=1) as queue:
            assert len([message.ack() for message in queue]) == 10


def test_a_queue_survives_its_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        port = int(broker.address.rsplit(":", 1)[1])
        with millstream.connect(broker.address) as client:
            fill(client, 500)
            done: set[int] = set()
            with client.queue("t", prefetch=50, timeout_s=10) as queue:
                for message in queue:
                    message.ack()
                    done.add(message.offset)
                    if len(done) == 200 and queue.stats.connections == 1:
                        broker.kill()
                        broker = BrokerProcess(tmp_path / "data", port=port).start()
                    if len(done) == 500:
                        break
                assert queue.stats.connections == 2
            assert done == set(range(500))
        broker.kill()


def test_looking_at_and_changing_queues(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 5)
        with client.queue("t", group="g", consumer="me", retry="durable") as queue:
            (message,) = queue.lease(wait="5s")
            (summary,) = client.queues.list("t")
            assert (summary.group, summary.depth, summary.ready, summary.leased) == ("g", 5, 4, 1)
            info = client.queues.describe("t", "g")
            assert info.policy["retry"] == "durable"
            assert [consumer.name for consumer in info.consumers] == ["me"]
            assert [found.state for found in client.queues.message(message.id, "g")] == ["leased"]
            assert [found.offset for found in client.queues.peek("t", "g", state="ready", limit=2)] == [1, 2]
            why = client.why(message.id)
            assert "me" in why.sentence
            client.queues.pause("t", "g")
            assert queue.lease(wait="50ms") == []
            assert "paused" in client.why("t/g").sentence
            client.queues.resume("t", "g")
            assert len(queue.lease(wait="5s")) == 1
            client.queues.configure("t", "g", retry="eager")
            assert client.queues.describe("t", "g").policy["retry"] == "eager"
            assert client.queues.purge("t", "g") == 5
        client.queues.delete("t", "g")
        assert client.queues.list("t") == []
        with pytest.raises(MessageNotFound):
            client.queues.message("01ARZ3NDEKTSV4RRFFQ69G5FAV")


def test_why_says_what_waits_where_everything_is_settled(broker: BrokerForTests) -> None:
    """`2 are waiting` was taken for messages."""
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        with client.queue("t", group="g", auto_ack=True) as one, client.queue("t", group="g", auto_ack=True) as other:
            assert len(one.lease(wait="5s")) == 1
            assert other.lease(wait="50ms") == []
            assert client.why("t/g").sentence == "Everything is settled; 2 consumers are waiting."


def test_settings_that_differ_from_the_groups_are_refused(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        client.queue("t", ordering="key").close()
        client.queue("t").close()
        with pytest.raises(ConfigInvalid):
            client.queue("t", ordering="strict")


def test_options_of_a_message(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", config={"dedup_window_ms": 60_000})
        first = client.publish("t", b"a", dedup_id="order-17", priority="high", lease="5m", max_retries=0)
        assert client.publish("t", b"a", dedup_id="order-17").id == first.id
        client.publish_many("t", [b"plain", millstream.Outgoing(value=b"b", dedup_id="order-18"), b"plain"])
        with client.queue("t") as queue:
            messages = queue.lease(max=10, wait="5s")
            long = next(message for message in messages if message.id == first.id)
            assert long.lease_deadline.timestamp() - time.time() > 200
            assert queue.nack([long]) == [Settled.DEAD]


def test_workers_share_the_work(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 200)
        seen: list[int] = []

        @client.worker("t", group="g", concurrency=8, retry="simple")
        async def handle(message: millstream.QueueMessage) -> None:
            await asyncio.sleep(0.001)
            if message.offset % 10 == 0 and not message.redelivered:
                raise RuntimeError("the first time it fails")
            seen.append(message.offset)

        with handle:
            eventually(lambda: len(seen) == 200)
        assert sorted(seen) == list(range(200))
        assert client.queues.describe("t", "g").depth == 0


def test_the_asynchronous_client(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t", partitions=2)
            await client.publish_many("t", [b"x"] * 1000)
            count = 0
            async for message in client.queue("t", prefetch=100, timeout_s=10):
                message.ack()
                count += 1
                if count == 1000:
                    break
            assert count == 1000
            async with client.queue("t", group="other", lease="500ms", prefetch=4) as queue:
                held = await queue.next(5)
                assert held is not None
                await asyncio.sleep(1.2)
                await held.ack(wait=True)
                assert len(await queue.lease(max=5, wait="5s")) > 0
            assert (await client.queues.describe("t", "other")).leased == 0
            assert (await client.why("t/other")).sentence

    asyncio.run(main())


def test_an_extension_says_how_long_the_lease_really_lasts(broker: BrokerForTests) -> None:
    def seconds_left(moment: datetime) -> float:
        return (moment - datetime.now(UTC)).total_seconds()

    with millstream.connect(broker.address) as client:
        fill(client, 2)
        policy = {"processing_ms": "60s"}
        with client.queue("t", prefetch=1, lease="10s", auto_extend=False, policy=policy) as queue:
            message = queue.next(5)
            assert message is not None
            assert 15 < seconds_left(message.extend("20s", wait=True)) < 21
            assert 40 < seconds_left(message.extend("2h", wait=True)) < 61
            assert 40 < seconds_left(message.lease_deadline) < 61
            assert queue.extend([message], "2h") == [Settled.DONE]
            assert 40 < seconds_left(message.lease_deadline) < 61
            (peeked,) = client.queues.peek("t", state="leased")
            assert abs(peeked.until_ms / 1000 - message.lease_deadline.timestamp()) < 1
            (outcome,) = client.queues.settle("extend", [peek_receipt(client)], delay="2h")
            assert outcome.result == "done"
            assert 40 < seconds_left(datetime.fromtimestamp(outcome.deadline_ms / 1000, UTC)) < 61

    async def again() -> None:
        async with aio.connect(broker.address) as client, client.queue("t", group="async", lease="10s") as queue:
            message = await queue.next(5)
            assert message is not None
            assert 250 < seconds_left(await message.extend("2h", wait=True)) < 301
            assert await message.extend("2h") is None

    asyncio.run(again())


def peek_receipt(client: millstream.Client) -> str:
    (leased,) = client.queues.lease("t", wait="5s")
    return leased.receipt
