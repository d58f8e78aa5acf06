"""Groups with the real broker: members come, go, stall and die; nothing is lost, handed-over work is not repeated."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.errors import GroupNotEmpty, InvalidArgument, MemberFenced
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire import calls
from tests.either import EitherClient
from tests.waiting import eventually


class Reader:
    """A member of a group in a thread of its own, counting what it sees."""

    def __init__(self, address: str, group: str = "g", **options: object) -> None:
        self.seen: list[tuple[int, int]] = []
        self.client = millstream.connect(address)
        self.stream = self.client.stream("t", group=group, **options)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for message in self.stream:
            self.seen.append((message.partition, message.offset))

    def close(self) -> None:
        self.stream.close()
        self.thread.join(10)
        self.client.close()


def publish(client: millstream.Client, count: int, partitions: int = 4) -> None:
    for partition in range(partitions):
        client.publish_many("t", [millstream.Outgoing(value=b"x", partition=partition)] * count)


@pytest.mark.parametrize("protocol", ["cooperative", "eager"])
@pytest.mark.parametrize("strategy", ["sticky", "range", "round_robin"])
def test_members_share_the_partitions_and_take_over_from_each_other(
    broker: BrokerForTests, protocol: str, strategy: str
) -> None:
    options = {"protocol": protocol, "strategy": strategy}
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 100)
        first = Reader(broker.address, **options)
        eventually(lambda: len(first.seen) == 400)
        second = Reader(broker.address, **options)
        eventually(lambda: len(first.stream.assignment()) == 2 and len(second.stream.assignment()) == 2)
        publish(client, 100)
        eventually(lambda: len(first.seen) + len(second.seen) >= 800)
        second.close()
        eventually(lambda: len(first.stream.assignment()) == 4)
        publish(client, 100)
        eventually(lambda: len(first.seen) + len(second.seen) >= 1200)
        first.close()
        counts = Counter(first.seen + second.seen)
        assert len(counts) == 1200
        # A handover repeats the message that was in hand at most: one per partition and move.
        assert sum(counts.values()) - 1200 <= 8
        assert client.group("g").state == "empty"


def test_progress_survives_the_reader(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 50)
        with client.stream("t", group="g") as stream:
            for _ in range(100):
                assert stream.next(5) is not None
            stream.commit()
        with client.stream("t", group="g", timeout_s=1) as stream:
            assert len(list(stream)) == 100
        assert sum(line.lag for line in client.group("g").lag) == 0


def test_a_slow_handler_is_not_thrown_out(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=1)
        publish(client, 3, partitions=1)
        with client.stream("t", group="g", session_ms=1000) as stream:
            message = stream.next(5)
            member = stream._membership.member_id  # type: ignore[union-attr]
            time.sleep(2.5)  # two and a half sessions
            assert message is not None
            message.commit()
            assert [info.member_id for info in client.group("g").members] == [member]
            assert stream.next(5).offset == 1  # type: ignore[union-attr]


def test_a_member_that_is_evicted_comes_back(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 10)
        lost: list[bool] = []
        reader = Reader(broker.address, session_ms=1000, on_revoked=lambda _, gone: lost.append(gone))
        eventually(lambda: len(reader.seen) == 40)
        client.evict_member("g", reader.stream._membership.member_id)  # type: ignore[union-attr]
        eventually(lambda: lost == [True])
        publish(client, 10)
        eventually(lambda: len(set(reader.seen)) == 80)
        reader.close()


def test_a_member_whose_group_was_deleted_joins_again(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 10)
        reader = Reader(broker.address, session_ms=1000)
        eventually(lambda: len(reader.seen) == 40)
        client.evict_member("g", reader.stream._membership.member_id)  # type: ignore[union-attr]
        client.delete_group("g")
        eventually(lambda: len(reader.seen) == 80)  # its progress was deleted as well
        reader.close()


def test_a_partition_that_moves_while_its_start_is_looked_up_has_one_reader(broker: BrokerForTests) -> None:
    """Two members start together, and the broker is slow to tell the first where to begin."""
    with millstream.connect(broker.address) as client, millstream.connect(broker.address) as other:
        client.create_topic("t", partitions=4)
        publish(client, 10)
        stream = other.stream("t", group="g", timeout_s=10)
        ask, second = stream._call, []

        def slow(call: Any, kind: Any) -> Any:
            if isinstance(call, calls.ListOffsets) and not second:
                second.append(Reader(broker.address))
                eventually(lambda: len(second[0].stream.assignment()) == 2)
            return ask(call, kind)

        stream._call = slow
        seen = [(message.partition, message.offset) for _, message in zip(range(20), stream, strict=False)]
        assert len(stream.assignment()) == 2
        assert not set(stream.assignment()) & set(second[0].stream.assignment())
        eventually(lambda: len(second[0].seen) == 20)
        assert len(set(seen + second[0].seen)) == 40
        stream.close()
        second[0].close()


def test_a_static_member_returns_to_its_partitions_without_a_rebalance(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 10)
        first = Reader(broker.address, instance_id="one")
        second = Reader(broker.address, instance_id="two")
        eventually(lambda: len(first.stream.assignment()) == 2 and len(second.stream.assignment()) == 2)
        before, generation = first.stream.assignment(), client.group("g").generation
        first.close()
        first = Reader(broker.address, instance_id="one")
        eventually(lambda: first.stream.assignment() == before)
        assert client.group("g").generation == generation
        first.close()
        second.close()


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_of_two_processes_with_one_instance_id_the_newer_one_stays(broker: BrokerForTests, kind: str) -> None:
    """Each joined again when it heard that the other had its place, for ever."""
    older = EitherClient(broker.address, asynchronous=kind == "asynchronous")
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        first = older.do(older.client.stream("t", group="g", instance_id="one"))
        with client.stream("t", group="g", instance_id="one") as second:
            [member] = client.group("g").members
            with pytest.raises(MemberFenced, match="place of one in group"):
                older.next(first)
            with pytest.raises(MemberFenced):
                older.next(first)
            older.do(first.close())
            publish(client, 10)
            assert len([second.next(10) for _ in range(40)]) == 40
            assert [each.member_id for each in client.group("g").members] == [member.member_id]
    older.end()


def test_a_commit_of_a_process_whose_place_was_taken_says_so(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client, millstream.connect(broker.address) as other:
        client.publish("t", b"x")
        first = client.stream("t", group="g", instance_id="one", commit="manual")
        assert first.next(10) is not None
        with other.stream("t", group="g", instance_id="one"):
            with pytest.raises(MemberFenced):
                first.commit()
            first.close()


def test_a_group_follows_new_partitions_and_patterns(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders.eu")
        client.publish("orders.eu", b"1")
        with client.stream("orders.#", group="g", timeout_s=10) as stream:
            assert stream.next(5).topic == "orders.eu"  # type: ignore[union-attr]
            client.create_topic("orders.us")
            client.publish("orders.us", b"2")
            assert stream.next(10).topic == "orders.us"  # type: ignore[union-attr]
            client.alter_topic("orders.us", partitions=2)
            client.publish("orders.us", b"3", partition=1)
            assert stream.next(10).partition == 1  # type: ignore[union-attr]


def test_members_must_agree_and_live_groups_cannot_be_reset(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.publish("t", b"x")
        with client.stream("t", group="g", strategy="range"):
            with pytest.raises(InvalidArgument):
                client.stream("t", group="g", strategy="sticky")
            with pytest.raises(GroupNotEmpty):
                client.reset_group("g", "t", "earliest")
            with pytest.raises(GroupNotEmpty):
                client.commit_offsets("g", {("t", 0): 0})


def test_asynchronous_members_share_with_synchronous_ones(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=4)
        publish(client, 50)

        async def main() -> None:
            seen: list[tuple[int, int]] = []
            async with asyncio.timeout(30), aio.connect(broker.address) as other:
                stream = await other.stream("t", group="g")
                while len(seen) < 200:
                    message = await stream.next(5)
                    assert message is not None
                    seen.append((message.partition, message.offset))
                reader = await asyncio.to_thread(Reader, broker.address)
                while len(stream.assignment()) != 2:
                    await stream.next(0.02)
                await asyncio.to_thread(publish, client, 50)
                while len(seen) < 300:
                    message = await stream.next(5)
                    assert message is not None
                    seen.append((message.partition, message.offset))
                await asyncio.to_thread(eventually, lambda: len(set(reader.seen + seen)) == 400)
                await stream.close()
                await asyncio.to_thread(reader.close)

        asyncio.run(main())


def test_readers_survive_a_broker_that_is_killed(tmp_path: Path) -> None:
    process = BrokerProcess(tmp_path / "data").start()
    port = int(process.address.rsplit(":", 1)[1])
    try:
        with millstream.connect(process.address) as client:
            client.create_topic("t", partitions=4)
            publish(client, 100)
            readers = [Reader(process.address, commit_interval_s=0.05) for _ in range(2)]
            eventually(lambda: len({place for reader in readers for place in reader.seen}) == 400)
            process.kill()
            process = BrokerProcess(tmp_path / "data", port=port).start()
            publish(client, 100)
            eventually(lambda: len({place for reader in readers for place in reader.seen}) == 800)
            for reader in readers:
                reader.close()
            assert sum(entry.offset for entry in client.committed("g")) >= 792
    finally:
        process.kill()


def test_an_interrupt_ends_a_waiting_stream_at_once(broker: BrokerForTests) -> None:
    """Ctrl-C while nothing happens: KeyboardInterrupt in the loop, and the member leaves its group."""
    program = f"""
import signal
import millstream
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
with millstream.connect({broker.address!r}) as client:
    client.publish("t", b"x")
    try:
        for message in client.stream("t", group="g"):
            print("ready", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0
    with millstream.connect(broker.address) as client:
        assert client.group("g").state == "empty"


def test_a_session_that_is_too_short_is_refused_in_words(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.publish("t", b"x")
    with pytest.raises(InvalidArgument, match="not within 1000 to 3600000"):
        client.stream("t", group="g", session_ms=5).next(5)


def test_a_topic_made_anew_is_read_from_its_beginning(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=1)
        publish(client, 7, partitions=1)
        with client.stream("t", group="g") as stream:
            for _ in range(7):
                assert stream.next(10) is not None
            client.delete_topic("t", force=True)
            client.create_topic("t", partitions=1)
            stored = [client.publish("t", b"new").id for _ in range(9)]
            read = [message.id for _ in range(9) if (message := stream.next(10)) is not None]
            assert read == stored
