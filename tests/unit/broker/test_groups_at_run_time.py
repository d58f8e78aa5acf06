"""Groups under concurrency: whoever comes at the same time finds the same group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from millstream.clock import SystemClock
from millstream.errors import StaleGeneration
from millstream.groups.sessions import Sessions
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.leases import Settle
from tests.simulated_broker import after_power_cut, run, started
from tests.waiting import eventually_async


def held(assignment: calls.Assignment) -> set[tuple[str, int]]:
    return {(entry.topic, number) for entry in assignment.partitions for number in entry.partitions}


def test_members_that_join_a_new_group_together_share_it() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        first, second = await asyncio.gather(
            client.call(calls.JoinGroup(group="g", topics=["orders"])),
            client.call(calls.JoinGroup(group="g", topics=["orders"])),
        )
        assert isinstance(first, calls.Assignment)
        assert isinstance(second, calls.Assignment)
        assert not held(first) & held(second)
        info = await client.call(calls.DescribeGroup(name="g"))
        assert isinstance(info, calls.GroupInfo)
        assert len(info.members) == 2

    run(scenario)


def test_commits_to_a_new_group_at_the_same_time_all_count() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        await client.send([b"read"] * 7)
        entries = [calls.OffsetEntry(topic="orders", partition=p, offset=7 * (1 - p)) for p in range(2)]
        await asyncio.gather(*[client.call(calls.CommitOffsets(group="g", offsets=[entry])) for entry in entries])
        assert await client.call(calls.CommittedOffsets(group="g")) == entries
        client = await after_power_cut(client, storage)
        assert await client.call(calls.CommittedOffsets(group="g")) == entries

    run(scenario)


def test_a_join_that_waited_for_a_deletion_finds_a_new_group() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        entry = calls.OffsetEntry(topic="orders", partition=0, offset=7)
        await client.call(calls.CommitOffsets(group="g", offsets=[entry]))
        await asyncio.gather(
            client.call(calls.DeleteGroup(name="g")), client.call(calls.JoinGroup(group="g", topics=["orders"]))
        )
        assert await client.call(calls.CommittedOffsets(group="g")) == []
        client = await after_power_cut(client, storage)
        assert await client.call(calls.CommittedOffsets(group="g")) == []

    run(scenario)


def test_a_refused_join_leaves_no_group_behind() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        refused = await asyncio.gather(
            client.call(calls.JoinGroup(group="g", topics=["orders"], session_ms=1)), return_exceptions=True
        )
        assert isinstance(refused[0], Exception)
        assert await client.call(calls.ListGroups()) == []

    run(scenario)


def test_two_clients_of_a_new_namespace_make_it_together() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        session = client.broker.open_session(namespace="fresh", client_id="", address="", push=lambda _: None)
        await asyncio.gather(
            *[client.broker.call(session, calls.Metadata(topics=[name], create=True)) for name in ("a", "b")]
        )

    run(scenario)


def test_a_group_follows_topics_that_the_broker_makes_itself() -> None:
    """Dead letters above all: whoever waits for them has subscribed before there are any."""

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders"))
        joined = await client.call(calls.JoinGroup(group="g", topics=["orders.dlq"], member_id="m"))
        assert isinstance(joined, calls.Assignment)
        assert held(joined) == set()
        await client.send([b"spoilt"])
        queue = await client.open_queue()
        (message,) = await client.lease(queue)
        await client.settle(Settle.REJECT, message)
        await eventually_async(lambda: client.broker.metrics.messages_dead_lettered)
        seen = await client.call(calls.HeartbeatGroup(group="g", member_id="m", generation=joined.generation, owned=[]))
        assert isinstance(seen, calls.Assignment)
        assert held(seen) == {("orders.dlq", 0)}

    run(scenario)


def test_a_group_that_is_forgotten_while_others_wait_for_it_stays_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        await client.call(calls.JoinGroup(group="g", topics=["orders"]))
        groups = client.broker.groups
        monkeypatch.setattr(groups._host, "partition_counts", lambda _: {"orders": 3})
        late = dict.fromkeys(groups._groups["default", "g"].state.members, "silent")
        monkeypatch.setattr(Sessions, "late", lambda *_, **__: late)
        await asyncio.gather(groups.forget_namespace("default"), groups.refresh("default"), groups.expire())
        assert await client.call(calls.ListGroups()) == []
        client = await after_power_cut(client, storage)
        assert await client.call(calls.ListGroups()) == []

    run(scenario)


def test_positions_in_a_topic_in_memory_end_with_the_broker() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config={"mode": "ephemeral"}))
        await client.send([b"old"] * 7, label=1)
        entry = calls.OffsetEntry(topic="orders", partition=0, offset=7)
        await client.call(calls.CommitOffsets(group="g", offsets=[entry]))
        await client.broker.stop()
        client = await started(storage)
        await client.send([b"new"] * 9, label=1)
        found = await client.call(calls.CommittedOffsets(group="g"))
        assert [entry.offset for entry in found] == [0], "seven of the new messages would count as read"

    run(scenario)


class HandClock(SystemClock):
    """Monotonic time that stands still until it is moved."""

    at_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.at_ms

    elapsed_ms = monotonic_ms


@pytest.mark.parametrize("stood_still_ms", [1_500, 3_000, 60_000])
def test_nobody_is_late_while_the_broker_stands_still(stood_still_ms: int) -> None:
    """Heartbeats that came meanwhile wait in the sockets; a session may be shorter than such a moment."""

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        groups, clock = client.broker.groups, HandClock()
        groups._clock = clock
        groups._expired_at_ms = clock.at_ms
        await client.call(calls.CreateTopic(name="orders"))
        await client.call(calls.JoinGroup(group="g", topics=["orders"], session_ms=1_000))

        async def look(after_ms: int) -> int:
            clock.at_ms += after_ms
            await groups.expire()
            return len(groups._groups["default", "g"].state.members)

        assert await look(250) == 1
        assert await look(stood_still_ms) == 1
        assert await look(250) == 1
        assert [await look(250) for _ in range(4)][-1] == 0, "then it was silent by itself"

    run(scenario)


def test_a_topic_made_anew_is_read_from_its_beginning_by_who_held_the_old_one() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders"))
        joined = await client.call(calls.JoinGroup(group="g", topics=["orders"], member_id="m"))
        owned = joined.partitions
        await client.call(calls.DeleteTopic(name="orders", force=True))
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"new"] * 9)

        # It has read the old topic up to 7, and no heartbeat has told it yet.
        read = calls.OffsetEntry(topic="orders", partition=0, offset=7)
        for generation in (joined.generation, joined.generation + 2):
            commit = calls.CommitOffsets(group="g", offsets=[read], member_id="m", generation=generation)
            with pytest.raises(StaleGeneration):
                await client.call(commit)
        seen = await client.call(
            calls.HeartbeatGroup(group="g", member_id="m", generation=joined.generation, owned=owned)
        )
        assert held(seen) == set(), "it must let go of the old one first"
        with pytest.raises(StaleGeneration):
            await client.call(calls.CommitOffsets(group="g", offsets=[read], member_id="m", generation=seen.generation))
        again = await client.call(calls.HeartbeatGroup(group="g", member_id="m", generation=seen.generation, owned=[]))
        assert held(again) == {("orders", 0)}
        assert await client.call(calls.CommittedOffsets(group="g")) == []
        await client.call(calls.CommitOffsets(group="g", offsets=[read], member_id="m", generation=again.generation))

    run(scenario)


def test_groups_that_follow_the_same_topic_share_the_disks_time() -> None:
    """A thousand groups must not make whoever makes a topic wait for a thousand syncs, one after the other."""

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        for number in range(50):
            await client.call(calls.JoinGroup(group=f"g{number}", topics=["#"], member_id="m"))
        before = client.broker.metrics.sync_rounds
        await client.call(calls.CreateTopic(name="orders"))
        made = client.broker.metrics.sync_rounds
        await client.call(calls.DeleteTopic(name="orders", force=True))
        assert made - before < 10
        assert client.broker.metrics.sync_rounds - made < 20

    run(scenario)


def test_a_topic_made_while_the_first_member_joins_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        log, written = client.broker.groups._log, asyncio.Event()
        honest = log.record

        async def slowly(facts: Mapping[str, Any], *, now_us: int) -> None:
            await written.wait()
            await honest(facts, now_us=now_us)

        monkeypatch.setattr(log, "record", slowly)
        joining = asyncio.create_task(client.call(calls.JoinGroup(group="g", topics=["#"], member_id="m")))
        making = asyncio.create_task(client.call(calls.CreateTopic(name="orders")))
        await eventually_async(lambda: client.broker.topics.registry.find("default", "orders"))
        for _ in range(10):
            await asyncio.sleep(0)
        written.set()
        joined, _ = await asyncio.gather(joining, making)
        assert isinstance(joined, calls.Assignment)
        seen = await client.call(calls.HeartbeatGroup(group="g", member_id="m", generation=0, owned=[]))
        assert isinstance(seen, calls.Assignment)
        assert held(seen) == {("orders", 0)}

    run(scenario)


def test_where_a_group_began_is_durable_before_its_first_member_is_in() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        await client.send([b"old"] * 7)
        await client.call(calls.JoinGroup(group="g", topics=["orders"], start="latest"))
        client = await after_power_cut(client, storage)
        await client.send([b"new"])
        await client.call(calls.AlterTopic(name="orders", partitions=3))
        await client.call(calls.JoinGroup(group="g", topics=["orders"], start="latest"))
        # Nothing where nothing was stored: those are read from their first message.
        began = [calls.OffsetEntry(topic="orders", partition=0, offset=7)]
        assert await client.call(calls.CommittedOffsets(group="g")) == began

    run(scenario)


def test_a_topic_that_comes_while_the_first_member_joins_is_the_groups() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders.a"))
        await client.send([b"old"], topic="orders.a")
        joined, _ = await asyncio.gather(
            client.call(calls.JoinGroup(group="g", topics=["orders.#"], start="latest")),
            client.call(calls.CreateTopic(name="orders.b")),
        )
        assert isinstance(joined, calls.Assignment)
        info = await client.call(calls.DescribeGroup(name="g"))
        assert isinstance(info, calls.GroupInfo)
        assert {line.topic for line in info.lag} == {"orders.a", "orders.b"}

    run(scenario)


def test_a_connection_that_ends_takes_no_look_at_groups_it_is_not_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unseen(dict[Any, Any]):
        def values(self) -> Any:
            pytest.fail("it looked at all of them")

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        groups = client.broker.groups
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        told: list[tuple[str, object]] = []
        sessions = [
            client.broker.open_session(
                namespace="default", client_id=name, address="", push=lambda news, name=name: told.append((name, news))
            )
            for name in ("first", "second", "bystander")
        ]
        first, second, bystander = sessions
        joined = await client.broker.call(first, calls.JoinGroup(group="g", topics=["orders"]))
        assert isinstance(joined, calls.Assignment)
        beat = calls.HeartbeatGroup(group="g", member_id=joined.member_id, generation=joined.generation, owned=[])
        await client.broker.call(second, beat)
        with monkeypatch.context() as patched:
            patched.setattr(groups, "_groups", Unseen(groups._groups))
            client.broker.session_closed(bystander)
            client.broker.session_closed(first)
        await client.call(calls.RebalanceGroup(name="g"))
        assert [name for name, _ in told] == ["second"], "the member has come by another connection since"
        client.broker.session_closed(second)
        await client.call(calls.RebalanceGroup(name="g"))
        assert len(told) == 1
        assert not groups._reached
        await client.broker.stop()

    run(scenario)
