"""The whole broker on a disk that fails: nothing confirmed is lost, and what cannot be promised is not confirmed."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups import Groups
from millstream.config import Settings
from millstream.errors import MillstreamError, ReadOnly, StorageFailed, TopicNotFound
from millstream.log.compaction import Compaction
from millstream.log.partition import PartitionLog
from millstream.log.recovery import Recovered, recover
from millstream.log.storage import Storage
from millstream.records import encode_batch
from millstream.testing.storage import Fault, PowerCut, SimulatedStorage
from millstream.wire import calls
from millstream.wire.admin_calls import CheckHealth, HealthReport
from millstream.wire.messages import PublishRequest
from millstream.wire.schedule_calls import ListSchedules
from tests.examples import seeds
from tests.simulated_broker import Client, after_kill, after_power_cut, run, started
from tests.waiting import eventually_async


def test_after_a_failed_sync_nothing_is_confirmed_and_a_restart_recovers_what_was() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"kept"])
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.path.startswith("topics/"))
        with pytest.raises(StorageFailed, match="in doubt"):
            await client.send([b"in doubt"])
        storage.heal()
        with pytest.raises(StorageFailed):
            client.send([b"refused"])
        assert await client.read_all() == [b"kept"], "what was confirmed stays readable, what was not is not shown"
        info = await client.call(calls.DescribeTopic(name="orders"))
        assert isinstance(info, calls.TopicInfo)
        assert "in doubt" in (info.partitions[0].failed or "")
        client = await after_power_cut(client, storage)
        assert (await client.read_all())[:1] == [b"kept"]
        await client.send([b"goes on"])
        assert (await client.read_all())[-1] == b"goes on"
        await client.broker.stop()

    run(scenario)


def test_what_waits_for_the_interval_is_on_disk_when_it_is_over_and_only_that_is_synced() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, fsync_interval_ms=20)
        for name in ("orders", "quiet"):
            await client.call(calls.CreateTopic(name=name, config={"fsync": "interval"}))
        client.send([b"settled"], topic="quiet", label=2)
        await _round_over(client.broker)
        client.send([b"kept"], label=2)
        files = client.broker.metrics.files_synced
        await _round_over(client.broker)
        assert client.broker.metrics.files_synced - files <= 3, (
            "the file of one log, its name, and that of its directory"
        )
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.read_all() == [b"kept"]
        assert await client.read_all("quiet") == [b"settled"]
        await client.broker.stop()

    run(scenario)


def test_too_many_open_files_delay_confirmations_and_end_no_log() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, fsync_interval_ms=100)
        await client.call(calls.CreateTopic(name="orders"))
        names = "topics/default/orders"
        storage.inject(Fault.NO_FILES, times=3, when=lambda it: it.kind == "sync_directory" and names in it.path)
        stored = client.send([b"waits"])
        await client.broker._life.committer.drain()
        assert not stored.done(), "its file might not be there after a power cut"
        assert await client.read_all() == []
        await stored
        assert await client.read_all() == [b"waits"]
        state = client.broker._life.state_logs[0].partition
        names = state.log.directory
        storage.inject(Fault.NO_FILES, times=2, when=lambda it: it.kind == "sync_directory" and it.path == names)
        state.log.roll()
        await client.call(calls.CreateTopic(name="payments"))
        assert state.failed is None
        await client.send([b"x"], topic="payments")
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.read_all() == [b"waits"]
        assert await client.read_all("payments") == [b"x"]
        await client.broker.stop()

    run(scenario)


def test_a_repetition_is_confirmed_when_it_is_as_durable_as_it_asks_for() -> None:
    """What it repeats was confirmed without a sync, and none is due for a long time."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, fsync_interval_ms=3_600_000)
        await client.call(calls.CreateTopic(name="orders", config={"fsync": "interval"}))
        await client.send([b"once"], producer=7, label=2)
        assert await client.send([b"once"], producer=7, label=2) == 0
        await client.call(calls.AlterTopic(name="orders", config={"fsync": "group"}))
        assert await client.send([b"once"], producer=7, label=3) == 0
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.read_all() == [b"once"]
        await client.broker.stop()

    run(scenario)


def test_what_is_never_synced_does_not_keep_files_open_for_ever() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1), fsync_interval_ms=20, open_files_max=8)
        await client.call(calls.CreateTopic(name="orders", partitions=40, config={"fsync": "never"}))
        for number in range(40):
            await client.send([b"x"], partition=number, label=2)
        files = client.broker._life.opener.files
        await eventually_async(lambda: len(files) <= 8 + 8)
        for number in range(40):
            await client.send([b"y"], partition=number, label=2)
        await eventually_async(lambda: len(files) <= 8 + 8)
        await client.broker.stop()

    run(scenario)


def test_rot_in_a_log_that_was_written_a_moment_ago_costs_one_message_and_is_reported() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, fsync_interval_ms=20)
        for number in range(7):
            await client.call(calls.CreateTopic(name=f"topic-{number}"))
        await client.call(calls.CreateTopic(name="orders"))
        for number in range(8):
            await client.send([b"%d" % number])
        await asyncio.sleep(0.06)
        for log in (
            client.broker.topics.partition("default", "orders", 0).log,
            client.broker._life.state_logs[0].partition.log,
        ):
            storage.open(log.segments[0].path).write(b"\xff", log.size_bytes // 8 * 3 + 40)
        client = await after_kill(client, storage)
        assert len(await client.read_all()) == 7
        topics = await client.call(calls.ListTopics())
        assert isinstance(topics, list)
        assert len(topics) == 7
        report = await client.call(CheckHealth())
        assert isinstance(report, HealthReport)
        damaged = {found.name: found.message for found in report.components if "damaged" in found.message}
        assert set(damaged) == {"state", "logs"}
        assert "topics/default/orders/0 offsets 3 to 3" in damaged["logs"]
        await client.broker.stop()

    run(scenario)


async def _round_over(broker: Broker) -> None:
    rounds = broker.metrics.sync_rounds
    while broker.metrics.sync_rounds == rounds:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.WRITE_ERROR])
def test_a_failed_write_is_refused_leaves_nothing_and_the_partition_goes_on(fault: Fault) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=2)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"before"], producer=5, sequence=0)
        storage.inject(
            fault, when=lambda operation: operation.path.startswith("topics/") and operation.kind == "write", times=2
        )
        with pytest.raises(StorageFailed):
            await client.send([b"lost"], producer=5, sequence=1)
        storage.heal()
        await client.send([b"lost"], producer=5, sequence=1)
        assert await client.read_all() == [b"before", b"lost"], "the retry is the same batch, stored once"
        await client.broker.stop()

    run(scenario)


def test_a_topic_whose_creation_could_not_be_recorded_does_not_exist() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage)
        storage.inject(Fault.WRITE_ERROR, when=lambda operation: operation.path.startswith("state/"))
        with pytest.raises(StorageFailed):
            await client.call(calls.CreateTopic(name="orders"))
        storage.heal()
        assert await client.call(calls.ListTopics()) == []
        await client.call(calls.CreateTopic(name="orders"))
        await client.broker.stop()

    run(scenario)


def test_a_topic_whose_deletion_is_in_doubt_confirms_nothing_that_the_next_start_would_remove() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.path.startswith("state/topics"))
        with pytest.raises(StorageFailed):
            await client.call(calls.DeleteTopic(name="orders"))
        with pytest.raises(TopicNotFound):
            await client.send([b"x"])

    run(scenario)


def test_a_log_that_cannot_be_repaired_for_want_of_room_keeps_no_other_from_being_served() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage, segment_bytes=1 << 24)
        for topic in ("orders", "payments"):
            await client.call(calls.CreateTopic(name=topic))
        for _ in range(5):
            await client.send([bytes(300_000)])
        await client.send([b"x"], topic="payments")
        storage.inject(Fault.NO_SPACE, times=100, when=lambda operation: operation.path.startswith("topics/default/o"))
        client = await after_kill(client, storage)
        assert await client.read_all("payments") == [b"x"]
        with pytest.raises(StorageFailed, match="No space left"):
            await client.read_all()
        storage.heal()
        assert len(await client.read_all()) == 5

    run(scenario)


def test_a_log_that_nobody_understands_keeps_no_broker_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage, segment_bytes=1 << 24)
        for topic in ("orders", "payments"):
            await client.call(calls.CreateTopic(name=topic))
        for _ in range(5):
            await client.send([bytes(300_000)])
        await client.send([b"x"], topic="payments")

        def confused(storage: Storage, directory: str, **options: Any) -> Recovered:
            if directory.startswith("topics/default/orders"):
                raise struct.error("a number that nobody thought of")
            return recover(storage, directory, **options)

        with monkeypatch.context() as patch:
            patch.setattr("millstream.log.partition.recover", confused)
            client = await after_kill(client, storage)
            await client.send([b"y"], topic="payments")
            assert await client.read_all("payments") == [b"x", b"y"]
            with pytest.raises(StorageFailed, match="a number that nobody thought of"):
                await client.send([b"z"])
            info = await client.call(calls.DescribeTopic(name="orders"))
            assert isinstance(info, calls.TopicInfo)
            assert "a number that nobody thought of" in (info.partitions[0].failed or "")
        assert len(await client.read_all()) == 5, "nothing of it is lost"
        await client.broker.stop()

    run(scenario)


def test_what_somebody_else_has_put_beside_partitions_is_none_of_the_brokers() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        storage.make_directory("topics/default/orders/copy.schedules", "topics/default/orders/copy.state")
        client = await after_kill(client, storage)
        assert await client.call(ListSchedules(topic="orders")) == []
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_a_power_cut_at_any_moment_loses_nothing_confirmed(seed: int) -> None:
    """Idempotent producers retry through power cuts: confirmed = stored exactly once, in order."""

    async def scenario() -> None:
        rng = random.Random(seed)
        storage = SimulatedStorage(seed=seed)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        confirmed = 0  # messages
        number = 0
        for _ in range(6):
            storage.inject(Fault.POWER_CUT, when=_countdown(rng.randint(1, 60)))
            # PowerCut stands for the end of the machine: whoever meets it stops there.
            with suppress(PowerCut, MillstreamError, TimeoutError):
                number = confirmed
                while True:
                    window = []
                    for _ in range(rng.randint(1, 4)):
                        count = rng.randint(1, 5)
                        values = [b"%d" % (number + i) for i in range(count)]
                        window.append((number + count, client.send(values, producer=7, sequence=number)))
                        number += count
                    for end, future in window:
                        await asyncio.wait_for(future, 0.5)
                        confirmed = end
            client = await after_power_cut(client, storage)
            stored = await client.read_all()
            assert stored == [b"%d" % i for i in range(len(stored))], f"seed {seed}: lost, repeated or reordered"
            assert len(stored) >= confirmed, f"seed {seed}: confirmed {confirmed}, found {len(stored)}"
            confirmed = len(stored)  # what is there was sent; the producer goes on behind it
        await client.broker.stop()

    run(scenario)


def _countdown(operations: int) -> Callable[[object], bool]:
    left = operations

    def due(_: object) -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    return due


@pytest.mark.parametrize("seed", range(20))
def test_offsets_and_groups_survive_a_power_cut(seed: int) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=seed)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        joined = await client.call(calls.JoinGroup(group="audit", topics=["orders"]))
        assert isinstance(joined, calls.Assignment)
        await client.send([b"read"] * 10)
        entries = [calls.OffsetEntry(topic="orders", partition=p, offset=10 * (1 - p)) for p in range(2)]
        await client.call(
            calls.CommitOffsets(
                group="audit", offsets=entries, member_id=joined.member_id, generation=joined.generation
            )
        )
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.call(calls.CommittedOffsets(group="audit")) == entries
        info = await client.call(calls.DescribeGroup(name="audit"))
        assert isinstance(info, calls.GroupInfo)
        assert info.generation == joined.generation
        assert [member.member_id for member in info.members] == [joined.member_id], "a restart is not a rebalance"
        await client.broker.stop()

    run(scenario)


def test_positions_beyond_a_log_that_lost_its_end_are_taken_back() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"kept"] * 3)
        # As if five more had been read and committed before a power cut took them: only `group` syncs them first.
        beyond = [calls.OffsetEntry(topic="orders", partition=0, offset=8, metadata="job 7")]
        await client.call(calls.CommitOffsets(group="audit", offsets=beyond))
        client = await after_power_cut(client, storage)
        kept = [calls.OffsetEntry(topic="orders", partition=0, offset=3, metadata="job 7")]
        assert await client.call(calls.CommittedOffsets(group="audit")) == kept, "or new messages would be skipped"
        await client.broker.stop()

    run(scenario)


def test_positions_in_a_log_that_cannot_be_opened_keep_the_broker_from_nothing() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage, segment_bytes=1 << 24)
        for topic in ("orders", "payments"):
            await client.call(calls.CreateTopic(name=topic))
        await client.send([bytes(300_000)] * 3)
        await client.send([b"x"], topic="payments")
        read = [calls.OffsetEntry(topic="orders", partition=0, offset=2)]
        await client.call(calls.CommitOffsets(group="audit", offsets=read))
        storage.inject(Fault.NO_SPACE, times=100, when=lambda operation: operation.path.startswith("topics/default/o"))
        client = await after_kill(client, storage)
        assert await client.read_all("payments") == [b"x"]
        assert await client.call(calls.CommittedOffsets(group="audit")) == read
        with pytest.raises(StorageFailed, match="No space left"):
            await client.send([b"new"])
        storage.heal()
        assert await client.send([b"new"]) == 3
        assert await client.call(calls.CommittedOffsets(group="audit")) == read
        await client.broker.stop()

    run(scenario)


def test_a_log_that_could_not_be_opened_takes_nothing_until_positions_beyond_its_end_are_taken_back() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage, segment_bytes=1 << 24)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([bytes(300_000)] * 3)
        beyond = [calls.OffsetEntry(topic="orders", partition=0, offset=8)]
        await client.call(calls.CommitOffsets(group="audit", offsets=beyond))
        storage.inject(Fault.NO_SPACE, times=100, when=lambda operation: operation.path.startswith("topics/default/o"))
        client = await after_kill(client, storage)
        storage.heal()
        with pytest.raises(StorageFailed, match="restart the broker"):
            await client.send([b"would be taken for read"])
        assert await client.call(calls.CommittedOffsets(group="audit")) == beyond
        await client.broker.stop()
        client = await started(storage)
        taken_back = [calls.OffsetEntry(topic="orders", partition=0, offset=3)]
        assert await client.call(calls.CommittedOffsets(group="audit")) == taken_back
        assert await client.send([b"new"]) == 3
        await client.broker.stop()

    run(scenario)


def test_a_topic_that_came_in_the_moment_of_a_crash_is_read_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unseen(self: Groups, namespace: str) -> None:
        """The crash comes before the groups hear of the topic."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=7)
        client = await started(storage)
        joined = await client.call(calls.JoinGroup(group="audit", topics=["orders.*"]))
        assert isinstance(joined, calls.Assignment)
        with monkeypatch.context() as crash:
            crash.setattr(Groups, "refresh", unseen)
            await client.call(calls.CreateTopic(name="orders.eu"))
        client = await after_power_cut(client, storage)
        info = await client.call(calls.DescribeGroup(name="audit"))
        assert isinstance(info, calls.GroupInfo)
        assert info.generation > joined.generation
        await client.broker.stop()

    run(scenario)


def test_a_nearly_full_disk_makes_the_broker_read_only_until_there_is_room() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=4)
        settings = Settings.model_validate({"storage": {"free_bytes_min": 1_000_000}})
        broker = Broker(settings, storage, rng=random.Random(1))
        await broker.start()
        client = Client(broker)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"before"])
        storage.free = 999_999
        await broker.modes.watch()
        with pytest.raises(ReadOnly, match="999,999 bytes left"):
            client.send([b"refused"])
        assert await client.read_all() == [b"before"], "reading goes on"
        storage.free = 1_050_000
        await broker.modes.watch()
        with pytest.raises(ReadOnly):
            client.send([b"not yet: it would flap"])
        storage.free = 2_000_000
        await broker.modes.watch()
        await client.send([b"after"])
        assert await client.read_all() == [b"before", b"after"]
        await broker.stop()

    run(scenario)


def test_messages_refused_after_a_failed_sync_never_become_visible() -> None:
    """Also not by a later round of commits, which finds nothing left to sync and nothing wrong."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"kept"])
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.path.startswith("topics/"))
        first = client.send([b"a"])
        await asyncio.sleep(0)  # the committer has begun its round
        second = client.send([b"b"])  # asks for the next one
        for future in (first, second):
            with pytest.raises(StorageFailed):
                await future
        await client.broker._life.committer.drain()
        assert await client.read_all() == [b"kept"]

    run(scenario)


def test_a_log_that_fails_in_compaction_confirms_nothing_any_more() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config={"cleanup": "compact"}))
        partition = client.broker.topics.partition("default", "orders", 0)

        def publish_keyed() -> asyncio.Future[int]:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            batch = encode_batch([bytes(4000)], keys=[b"k"], base_timestamp_us=1)
            client.broker.publish(
                client.session,
                PublishRequest("orders", 0, 1, 0, memoryview(batch)),
                lambda error, label, *_: future.set_exception(error) if error else future.set_result(label),
            )
            client.broker.flush()
            return future

        for _ in range(12):
            await publish_keyed()
        await client.broker._life.committer.drain()
        compaction = Compaction.plan(partition.log, now_us=1, tombstone_retention_ms=0)
        assert compaction is not None
        compaction.rewrite()
        appended = publish_keyed()  # its commit is asked for, and then the log fails
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.kind == "sync_directory")
        with pytest.raises(StorageFailed):
            list(compaction.swaps())
        with pytest.raises(StorageFailed):
            await appended

    run(scenario)


def test_others_have_their_turn_between_two_segments_that_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some syncs of the directory, and a large topic has hundreds of them."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config={"cleanup": "compact"}))
        for number in range(40):
            batch = encode_batch([b"%04000d" % number], keys=[b"%d" % (number or 1)], base_timestamp_us=1)
            partition = client.broker.topics.partition("default", "orders", 0)
            await partition.append_durably(batch)
        turns, turn = [], 0
        honest = PartitionLog.swap

        def noted(log: PartitionLog, *replacement: Any) -> bool:
            if log is partition.log:
                turns.append(turn)
            return honest(log, *replacement)

        monkeypatch.setattr(PartitionLog, "swap", noted)

        async def take_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        others = asyncio.ensure_future(take_turns())
        topic = client.broker.topics.registry.get("default", "orders")
        tended = await client.broker._life.cleanup.tend_now(topic, roll=True)
        others.cancel()
        assert tended.compacted == 1
        assert len(turns) > 5
        assert len(set(turns)) == len(turns)
        client = await after_kill(client, storage)
        assert [int(value or b"") for value in await client.read_all()] == list(range(1, 40))
        await client.broker.stop()

    run(scenario)


def test_one_reply_that_raises_does_not_stop_all_commits() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders"))
        await client.call(calls.CreateTopic(name="other"))

        def boom(*_: object) -> None:
            raise RuntimeError("the connection is in a state nobody thought of")

        batch = encode_batch([b"x"], base_timestamp_us=1)
        client.broker.publish(client.session, PublishRequest("orders", 0, 1, 0, memoryview(batch)), boom)
        client.broker.flush()
        await client.broker._life.committer.drain()
        await asyncio.wait_for(client.send([b"y"], topic="other"), 5)

    run(scenario)


def test_offsets_of_a_topic_go_with_it_even_if_the_machine_goes_down_meanwhile() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"])
        entry = calls.OffsetEntry(topic="orders", partition=0, offset=1)
        await client.call(calls.CommitOffsets(group="g", offsets=[entry]))
        await client.broker.topics.delete("default", "orders")
        client = await after_power_cut(client, storage)
        await client.call(calls.CreateTopic(name="orders"))
        assert await client.call(calls.CommittedOffsets(group="g")) == []

    run(scenario)
