"""Replays of dead letters with the real broker: each is sent once, also across restarts and kill -9."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.client import Client
from millstream.dead_letters import ReplayInfo
from millstream.errors import ReplayNotFound, TopicNotFound
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire.subscription_calls import SetMode
from tests.e2e.letters_world import bury, messages, texts
from tests.waiting import eventually


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


def test_a_dry_run_says_what_would_happen_and_does_nothing(client: Client) -> None:
    ids = bury(client, "a", "b")
    plan = client.dead_letters.plan_replay(topic="orders", rate=2)
    assert (plan.total, plan.targets, plan.first, plan.duration_ms) == (2, {"orders": 2}, ids, 1000)
    assert client.dead_letters.plan_replay(everything=True, target="missing").warnings
    assert client.dead_letters.stats().total == 2
    assert client.offsets("orders") == {0: 2}
    assert client.dead_letters.replays() == []


def test_a_plan_says_who_else_gets_the_messages_again(client: Client) -> None:
    client.create_topic("orders")
    client.create_topic("orders.again")
    with client.queue("orders", group="audit") as other, client.queue("orders", group="billing"):
        bury(client, "1")
        (done,) = other.lease(wait=10)
        done.ack()
        (warning,) = client.dead_letters.plan_replay(topic="orders").warnings
        assert "group 'audit' too" in warning
        assert client.dead_letters.plan_replay(topic="orders", target="orders.again").warnings == []
        replay = client.dead_letters.replay(topic="orders")
        assert replay.plan is not None
        assert replay.plan.warnings == [warning]
        (again,) = other.lease(wait=10)
        assert again.text == "1"


def test_replayed_messages_are_new_and_say_where_they_were(client: Client) -> None:
    (letter,) = bury(client, "a", key="k", shop="berlin")
    replay = client.dead_letters.replay(everything=True)
    info = replay.wait(20)
    assert (info.status, info.total, info.replayed, info.failed) == ("completed", 1, 1, 0)
    (message,) = messages(client, "orders", 1, start=1)
    assert (message.text, message.key) == ("a", b"k")
    assert message.headers == {
        "shop": "berlin",
        "millstream-replay-id": replay.id,
        "millstream-replayed-from": letter,
        "millstream-replayed-reason": "REJECTED",
    }
    assert client.dead_letters.list() == []
    assert client.dead_letters.show(letter).text == "a", "it can be looked at as long as it is stored"
    assert client.dead_letters.replay(everything=True).wait(20).total == 0, "nothing is sent twice"


def test_letters_go_out_in_the_order_of_their_originals(client: Client) -> None:
    """Whatever order they died in."""
    originals = [client.publish("orders", f"{number}", key=b"k") for number in range(4)]
    for number in (2, 0, 3, 1):
        headers = {"millstream-dead-topic": "orders", "millstream-dead-id": originals[number].id}
        client.publish("orders.dlq", f"{number}", key=b"k", headers=headers)
    client.dead_letters.replay(topic="orders").wait(20)
    assert [message.text for message in messages(client, "orders", 4, start=4)] == ["0", "1", "2", "3"]


def test_keys_go_to_their_partition_and_the_rest_back_to_where_it_was(client: Client) -> None:
    client.create_topic("orders", partitions=4)
    client.create_topic("orders.dlq", partitions=4)
    sent = [client.publish("orders", "x", key=f"k{number}") for number in range(20)]
    for number, receipt in enumerate(sent):
        headers = {"millstream-dead-topic": "orders", "millstream-dead-id": receipt.id}
        client.publish("orders.dlq", f"{number}", key=f"k{number}", headers=headers, partition=0)
    headers = {"millstream-dead-topic": "orders", "millstream-dead-partition": "2"}
    client.publish("orders.dlq", "keyless", headers=headers)
    ends = client.offsets("orders")
    client.dead_letters.replay(everything=True).wait(20)
    found = {}
    for partition, end in client.offsets("orders").items():
        if end > ends[partition]:
            with client.stream("orders", partitions=[partition], start=ends[partition], timeout_s=5) as stream:
                found |= {
                    message.text: partition for _, message in zip(range(end - ends[partition]), stream, strict=False)
                }
    assert found.pop("keyless") == 2
    assert found == {f"{number}": receipt.partition for number, receipt in enumerate(sent)}


def test_a_replay_can_repair_messages_and_send_them_elsewhere(client: Client) -> None:
    client.create_topic("repaired")
    good, bad = bury(client, "good", "bad", step="1", secret="x")
    replay = client.dead_letters.replay(
        [bad], target="repaired", value="better", set_headers={"step": "2"}, remove_headers=["secret"]
    )
    assert replay.wait(20).replayed == 1
    (message,) = messages(client, "repaired", 1)
    assert message.text == "better"
    assert message.headers["step"] == "2"
    assert "secret" not in message.headers
    assert [letter.id for letter in client.dead_letters.list()] == [good]


def test_the_rate_is_kept(client: Client) -> None:
    bury(client, *map(str, range(11)))
    began_s = time.monotonic()
    client.dead_letters.replay(everything=True, rate=20).wait(20)
    assert time.monotonic() - began_s >= 0.45
    assert len(messages(client, "orders", 11, start=11)) == 11


def test_an_id_that_is_named_in_two_ways_is_sent_once(client: Client) -> None:
    (letter,) = bury(client, "once")
    assert client.dead_letters.replay([letter, letter.lower()]).wait(20).total == 1
    assert client.offsets("orders")[0] == 2


def test_what_a_replay_makes_larger_can_still_be_read(client: Client) -> None:
    letters = bury(client, *map(str, range(12)))
    start = client.offsets("orders")[0]
    assert client.dead_letters.replay(letters, value=bytes(1_000_000)).wait(30).replayed == 12
    assert [len(message.value or b"") for message in messages(client, "orders", 12, start=start)] == [1_000_000] * 12


def test_an_aborted_replay_leaves_the_rest_where_it_is(client: Client) -> None:
    bury(client, *map(str, range(50)))
    replay = client.dead_letters.replay(everything=True, rate=10)
    eventually(lambda: replay.progress().replayed)
    info = replay.abort()
    assert info.status == "aborted"
    assert 0 < info.replayed < 50
    assert client.offsets("orders")[0] == 50 + info.replayed
    assert client.dead_letters.stats().total == 50 - info.replayed
    assert replay.progress() == info, "nothing moves any more"


def test_what_cannot_be_sent_stays_and_the_report_says_why(client: Client) -> None:
    bury(client, "fits", "x" * 2000)
    client.create_topic("small", config={"max_message_bytes": 1000})
    info = client.dead_letters.replay(everything=True, target="small").wait(20)
    assert (info.status, info.replayed, info.failed) == ("completed", 1, 1)
    (failure,) = info.failures
    assert "2000 bytes" in failure.reason
    assert [letter.id for letter in client.dead_letters.list()] == [failure.id]
    with pytest.raises(TopicNotFound, match="target of the replay"):
        client.dead_letters.replay(everything=True, target="missing")


def test_a_replay_waits_while_the_broker_takes_nothing(client: Client) -> None:
    bury(client, "a")
    client.call(SetMode(mode="maintenance", reason="new disks"), Any)
    replay = client.dead_letters.replay(everything=True)
    eventually(lambda: replay.progress().status == "paused")
    assert "new disks" in replay.info.reason
    client.call(SetMode(mode="normal"), Any)
    assert replay.wait(20).replayed == 1


def test_a_replay_waits_for_room_in_a_full_queue(client: Client) -> None:
    client.create_topic("target", config={"max_depth": 5})
    bury(client, *map(str, range(8)))
    replay = client.dead_letters.replay(everything=True, target="target", rate=20)
    eventually(lambda: replay.progress().status == "paused")
    assert "'target' is full" in replay.info.reason
    with client.queue("target") as work:

        def is_drained() -> bool:
            work.ack(work.lease(max=10))
            return replay.progress().is_over

        eventually(is_drained)
    assert replay.info.replayed == 8


def test_a_replay_that_does_not_help_ends(client: Client) -> None:
    """Its messages die again as fast as they are sent; they are not sent in circles either."""
    bury(client, *map(str, range(200)))
    client.create_topic("target", config={"retry": "simple,max_retries=0"})
    stopping = threading.Event()

    def refuse() -> None:
        with client.queue("target") as work:
            while not stopping.is_set():
                for message in work.lease(max=10, wait=0.1):
                    message.nack(reason="still down")

    refusing = threading.Thread(target=refuse)
    refusing.start()
    try:
        replay = client.dead_letters.replay(topic="orders", target="target", rate=25)
        info = replay.wait(30)
        assert info.status == "failed"
        assert "died again" in info.reason
        assert 20 <= info.relapsed <= info.replayed < 200
        eventually(lambda: client.dead_letters.stats(topic="target").total == replay.progress().relapsed)
    finally:
        stopping.set()
        refusing.join()


def test_replays_of_the_same_letters_at_the_same_time_send_each_once(broker: BrokerForTests, client: Client) -> None:
    bury(client, *map(str, range(300)))

    async def replay_four_times() -> list[ReplayInfo]:
        async with aio.connect(broker.address) as other:
            begun = await asyncio.gather(*(other.dead_letters.replay(everything=True) for _ in range(4)))
            return [await replay.wait(30) for replay in begun]

    reports = asyncio.run(replay_four_times())
    assert {report.status for report in reports} == {"completed"}
    assert sum(report.replayed for report in reports) == 300
    found = [message.text for message in messages(client, "orders", 300, start=300)]
    assert sorted(found, key=int) == [str(number) for number in range(300)]


def test_an_unknown_replay_is_refused(client: Client) -> None:
    with pytest.raises(ReplayNotFound):
        client.dead_letters.replay_status("r-0")


# --- surviving -------------------------------------------------------------------------------------------------------


def test_a_replay_goes_on_after_a_restart(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        bury(client, *map(str, range(30)))
        replay = client.dead_letters.replay(everything=True, rate=40)
        eventually(lambda: replay.progress().replayed)
        replay_id = replay.id
        bury(client, "late", topic="bills")
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        info = client.dead_letters.replay_status(replay_id).wait(20)
        assert (info.status, info.replayed, info.total) == ("completed", 30, 30)
        found = [message.text for message in messages(client, "orders", 30, start=30)]
        assert found == [str(number) for number in range(30)]
        assert [report.id for report in client.dead_letters.replays()] == [replay_id]
        assert texts(client.dead_letters.list()) == ["late"], "only what was dead when it began is replayed"


def test_an_aborted_replay_stays_aborted_after_a_crash(tmp_path: Path) -> None:
    port = free_port()
    with BrokerProcess(tmp_path, port=port) as broker, millstream.connect(broker.address) as client:
        bury(client, "a", "b", "c")
        replay = client.dead_letters.replay(everything=True, rate=0.5)
        replay.abort()
        sent = replay.info.replayed
        broker.kill()
        broker.start()
        assert client.dead_letters.replay_status(replay.id).info.status == "aborted"
        assert client.offsets("orders")[0] == 3 + sent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.slow
def test_kill_nine_in_the_middle_of_a_replay_loses_and_repeats_nothing(tmp_path: Path) -> None:
    count, keys = 2000, 5
    port = free_port()
    with BrokerProcess(tmp_path, port=port) as broker, millstream.connect(broker.address) as client:
        client.create_topic("orders", partitions=2)
        client.create_topic("orders.dlq", partitions=2)
        sent = client.publish_many(
            "orders", [millstream.Outgoing(value=f"{n}", key=f"k{n % keys}") for n in range(count)]
        )
        dead = [
            millstream.Outgoing(
                value=f"{n}",
                key=f"k{n % keys}",
                headers={"millstream-dead-topic": "orders", "millstream-dead-id": sent[n].id},
            )
            for n in reversed(range(count))
        ]
        client.publish_many("orders.dlq", dead)
        before = client.offsets("orders")
        replay = client.dead_letters.replay(everything=True, rate=1500)
        for _ in range(3):
            time.sleep(0.15)
            broker.kill()
            broker.start()
        info = replay.wait(60)
        assert (info.status, info.replayed) == ("completed", count)
        seen: dict[bytes, list[int]] = {}
        left = count
        with client.stream("orders", start=before, timeout_s=10) as stream:
            while left:
                message = stream.next(timeout_s=10)
                assert message is not None, f"{left} messages are missing"
                assert message.key is not None
                seen.setdefault(message.key, []).append(int(message.text))
                left -= 1
        assert sum(client.offsets("orders").values()) == 2 * count, "something was sent twice"
        for key, numbers in seen.items():
            assert numbers == sorted(numbers), f"the order of {key!r} was lost"
        assert sorted(n for numbers in seen.values() for n in numbers) == list(range(count))
        assert client.dead_letters.stats().total == 0
