"""Streams of the asynchronous client: they keep the promises of the synchronous one's."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from async_scenarios import fill, numbered, run
from fake_broker import FakeBroker, Fault

import millstream
from millstream import aio
from millstream.client.asynchronous import stream as stream_module
from millstream.client.membership import Membership
from millstream.client.messages import TopicPartition
from millstream.errors import InvalidArgument, RequestTimeout, Throttled, TopicNotFound, Unauthorized
from tests.waiting import eventually_async

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def test_a_stream_reads_everything_in_order_and_waits_for_more(fake: FakeBroker) -> None:
    fill(fake)

    async def scenario(client: aio.Client) -> None:
        seen = []
        async for message in client.stream("t"):
            seen.append(message.value)
            if len(seen) == 30:
                asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(client.publish("t", b"late")))
            if len(seen) == 31:
                break
        assert seen == [*numbered(30), b"late"]
        async with client.stream("t", timeout_s=0.5, start=25) as stream:
            assert [message.offset async for message in stream] == [25, 26, 27, 28, 29, 30]
        async with client.stream("t", timeout_s=0.5) as stream:
            assert sum([len(messages) async for messages in stream.batches()]) == 31
            assert await stream.next(0) is None
        with pytest.raises(TopicNotFound):
            await client.stream("missing")

    run(fake, scenario)


def test_a_stream_that_is_iterated_without_being_opened_first_can_be_asked_for_more(fake: FakeBroker) -> None:
    fill(fake)

    async def scenario(client: aio.Client) -> None:
        stream = client.stream("t", timeout_s=10)
        with pytest.raises(AttributeError, match="'seek' is there when this is open: `async with` it, or `await` it"):
            stream.seek  # type: ignore[attr-defined]  # noqa: B018
        assert not hasattr(stream, "__len__")
        seen = []
        async for message in stream:
            seen.append(message.offset)
            if message.offset == 4:
                await stream.seek("t", 0, 29)  # type: ignore[attr-defined]
            if message.offset == 29:
                break
        assert seen == [*range(5), 29]
        await stream.close()

    run(fake, scenario)


def test_seek_pause_and_resume(fake: FakeBroker) -> None:
    fill(fake)

    async def scenario(client: aio.Client) -> None:
        async with client.stream("t", timeout_s=10) as stream:
            seen: list[int] = []
            async for message in stream:
                seen.append(message.offset)
                if message.offset == 4:
                    await stream.seek("t", 0, 20)
                if len(seen) == 15:
                    break
            assert seen == [*range(5), *range(20, 30)]
            await stream.seek("t", 0, "earliest")
            assert (await stream.next(10)).offset == 0  # type: ignore[union-attr]
            stream.pause()
            assert await stream.next(0.05) is None
            stream.resume()
            assert (await stream.next(10)).offset == 1  # type: ignore[union-attr]
            assert stream.position() == {T0: 2}
            assert stream.lag() == {T0: 28}

    run(fake, scenario)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_lost_connection_is_not_noticed(fake: FakeBroker, group: str | None) -> None:
    fill(fake, count=60)

    async def scenario(client: aio.Client) -> None:
        seen = []
        async with client.stream("t", group=group, max_bytes=300) as stream:
            async for message in stream:
                seen.append(message.value)
                if len(seen) in (5, 25):
                    fake.drop_all()
                if len(seen) == 40:
                    fake.stop_listening()
                    asyncio.get_running_loop().call_later(0.2, fake.listen)
                if len(seen) == 60:
                    break
        assert seen == numbered(60)

    run(fake, scenario)


def test_a_group_commits_what_is_finished(fake: FakeBroker) -> None:
    fill(fake, partitions=2, count=10)
    told: list[tuple[str, list[TopicPartition]]] = []

    async def on_assigned(partitions: list[TopicPartition]) -> None:
        told.append(("assigned", partitions))

    async def scenario(client: aio.Client) -> None:
        async with client.stream("t", group="g", on_assigned=on_assigned) as stream:
            for _ in range(15):
                assert await stream.next(10) is not None
        assert sum(fake.committed.values()) == 14
        async with client.stream("t", group="g", commit="manual") as stream:
            message = await stream.next(10)
            assert message is not None
            await message.commit()
        assert sum(fake.committed.values()) == 15
        assert not fake.members
        fake.call_errors["JoinGroup"] = deque([Unauthorized("not you")])
        with pytest.raises(Unauthorized):
            await client.stream("t", group="g")

    run(fake, scenario)
    assert told == [("assigned", [T0, T1])]


def test_a_partition_is_committed_before_it_is_given_up_while_others_go_on(fake: FakeBroker) -> None:
    fill(fake, partitions=2, count=10)
    revoked: list[tuple[list[TopicPartition], bool]] = []

    async def scenario(client: aio.Client) -> None:
        def on_revoked(partitions: list[TopicPartition], lost: bool) -> None:
            revoked.append((partitions, lost))

        stream = await client.stream("t", group="g", on_revoked=on_revoked)
        first = await stream.next(10)
        assert first is not None
        kept = 1 - first.partition
        (member,) = fake.members.values()
        await asyncio.to_thread(fake.wait_for, lambda: len(member.owned) == 2)
        member.generation += 1
        member.allowed = [("t", kept)]
        fake.push_rebalance("g")
        await eventually_async(lambda: stream._attention)
        assert ("t", first.partition) in member.owned  # still handling: kept
        following = await stream.next(10)
        assert following is not None
        assert following.partition == kept
        await asyncio.to_thread(fake.wait_for, lambda: member.owned == {("t", kept)})
        assert fake.committed["g", "t", first.partition] == 1
        assert revoked == [([TopicPartition("t", first.partition)], False)]

    run(fake, scenario)


def test_messages_do_not_keep_a_dropped_stream_alive(fake: FakeBroker) -> None:
    fill(fake, count=10)

    async def scenario(client: aio.Client) -> None:
        message = await (await client.stream("t", group="g")).next(5)
        assert message is not None
        gc.collect()
        await eventually_async(lambda: not fake.members)  # it left the group by itself
        with pytest.raises(InvalidArgument):
            await message.commit()

    run(fake, scenario)


def test_a_dropped_stream_keeps_no_connection(fake: FakeBroker) -> None:
    fill(fake, count=10)

    async def scenario(client: aio.Client) -> None:
        stream = await client.stream("t")
        assert await stream.next(5) is not None
        before = len(fake._peers)
        del stream
        gc.collect()
        await eventually_async(lambda: len(fake._peers) == before - 1)

    run(fake, scenario)


def test_a_stream_that_is_closed_by_another_task_while_its_broker_is_away_ends(fake: FakeBroker) -> None:
    fill(fake, count=10)

    async def scenario(client: aio.Client) -> None:
        stream = await client.stream("t")

        async def read() -> int:
            return len([message async for message in stream])

        reading = asyncio.create_task(read())
        await eventually_async(lambda: stream.position() == {T0: 10})
        fake.stop_listening()
        await eventually_async(lambda: stream._link.trouble)
        await stream.close()
        assert await reading == 10

    run(fake, scenario)


def test_a_refusal_before_the_last_try_is_named_when_that_one_is_not_answered(fake: FakeBroker) -> None:
    async def run() -> None:
        async with aio.connect(fake.address, timeout_s=0.6) as client:
            await client.publish("t", b"warm")
            fake.faults.append(Fault(store=False, error=Throttled("topic 't' is overloaded")))
            fake.faults.extend([Fault(store=False, silent=True)] * 5)
            with pytest.raises(
                RequestTimeout, match=r"may or may not be stored.*refused: topic 't' is overloaded$"
            ) as caught:
                await client.publish("t", b"a")
            assert isinstance(caught.value.__cause__, Throttled)
            fake.faults.clear()

    asyncio.run(run())


def test_a_close_that_is_given_up_while_the_group_is_left_keeps_no_connection(fake: FakeBroker) -> None:
    """It was the last that knew of the connection: nothing closed it any more, not even dropping the stream."""
    leave = threading.Event()

    async def scenario(client: aio.Client) -> None:
        fake.topic("t")
        fake.grant = [("t", 0)]
        connections = len(fake._peers)
        stream = await client.stream("t", group="g")
        assert await stream.next(0.1) is None
        fake.before["LeaveGroup"] = lambda: leave.wait(20) and None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stream.close()
        leave.set()
        await eventually_async(lambda: len(fake._peers) == connections)

    run(fake, scenario)


def test_what_waits_to_be_handed_out_is_limited_however_many_partitions_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer of each of them was kept, up to `max_bytes` each."""
    monkeypatch.setattr(stream_module, "_AHEAD_BYTES_MAX", 100_000)
    partitions = 40

    async def scenario(client: aio.Client) -> None:
        async with client.stream("t", max_bytes=1, timeout_s=10) as stream:
            seen = []
            async for message in stream:
                seen.append(message.partition)
                await asyncio.sleep(0.3 if len(seen) == 1 else 0)
                assert sum(handout.size for handout in stream._ready) < 400_000
                if len(seen) == partitions:
                    break
            assert sorted(seen) == list(range(partitions))
            stream.pause()
            assert await stream.next(0.1) is None
            stream.resume()
            await client.publish("t", b"late", partition=0)
            late = await stream.next(10)
            assert late is not None
            assert late.value == b"late"

    with FakeBroker(partitions=partitions) as fake:
        with millstream.connect(fake.address) as filling:
            for partition in range(partitions):
                filling.publish("t", b"x" * 60_000, partition=partition)
        run(fake, scenario)


def test_an_opening_that_is_cancelled_keeps_no_thread_waiting(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was blocked for as long as a request may take."""
    let_go, go_on = threading.Event(), threading.Event()
    wait_joined = Membership.wait_joined

    def waiting(membership: Membership, timeout_s: float) -> None:
        try:
            wait_joined(membership, timeout_s)
        finally:
            let_go.set()

    monkeypatch.setattr(Membership, "wait_joined", waiting)

    async def scenario(client: aio.Client) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        fake.topic("t")
        fake.before["JoinGroup"] = lambda: go_on.wait(20) and None

        async def open_one() -> None:
            await client.stream("t", group="g")

        opening = asyncio.create_task(open_one())
        await eventually_async(lambda: not fake.before)
        opening.cancel()
        await eventually_async(let_go.is_set, within_s=5)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    run(fake, scenario)
