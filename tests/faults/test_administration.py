"""What an operator asks for, on a disk that loses power right afterwards."""

from __future__ import annotations

import errno

import pytest

from millstream.errors import StorageFailed
from millstream.records import encode_batch
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import admin_calls, calls
from millstream.wire.leases import Settle
from millstream.wire.messages import PublishRequest
from tests.simulated_broker import Client, after_power_cut, run, started


def unsafely(client: Client, topic: str, *values: bytes) -> None:
    """Publish to a topic that does not wait for the disk, as nobody who waits for an answer."""
    batch = encode_batch(list(values), base_timestamp_us=1)
    client.broker.publish(client.session, PublishRequest(topic, 0, 0, 0, memoryview(batch)), None)
    client.broker.flush()


def test_after_a_checkpoint_a_power_cut_takes_nothing_whatever_publishers_were_promised() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config={"fsync": "never"}))
        unsafely(client, "orders", b"1", b"2", b"3")
        consumer = await client.open_queue()
        first, *_ = await client.lease(consumer)
        await client.settle(Settle.ACK, first)
        answer = await client.call(admin_calls.Checkpoint())
        assert isinstance(answer, admin_calls.Checkpointed)
        assert (answer.failures, answer.journals) == ([], 1)
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.read_all() == [b"1", b"2", b"3"]
        left = await client.lease(await client.open_queue())
        assert [message.value for message in left] == [b"2", b"3"]
        await client.broker.stop()

    run(scenario)


def test_a_checkpoint_leaves_state_logs_with_one_fact_per_key() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=4)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        for retention_ms in range(1000, 1100):
            await client.call(calls.AlterTopic(name="orders", config={"retention_ms": retention_ms}))
        log = client.broker.topics._log.partition.log
        before = log.size_bytes
        await client.call(admin_calls.Checkpoint())
        assert log.size_bytes < before / 10
        client = await after_power_cut(client, storage, lose_everything=True)
        info = await client.call(calls.DescribeTopic(name="orders"))
        assert isinstance(info, calls.TopicInfo)
        assert info.config["retention_ms"] == 1099
        await client.broker.stop()

    run(scenario)


def test_a_log_that_has_failed_is_named_and_the_others_are_put_on_disk() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=5)
        client = await started(storage)
        for name in ("good", "bad"):
            await client.call(calls.CreateTopic(name=name, config={"fsync": "never"}))
            unsafely(client, name, b"1")
        storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.path.startswith("topics/default/bad"))
        answer = await client.call(admin_calls.Checkpoint())
        assert isinstance(answer, admin_calls.Checkpointed)
        assert [failure.partition(":")[0] for failure in answer.failures] == ["topics/default/bad/0"]
        assert client.broker.topics.partition("default", "good", 0).is_synced
        report = await client.call(admin_calls.CheckHealth())
        assert isinstance(report, admin_calls.HealthReport)
        logs = next(component for component in report.components if component.name == "logs")
        assert (report.status, logs.status) == ("degraded", "degraded")
        assert "topics/default/bad/0" in logs.message
        await client.broker.stop()

    run(scenario)


def test_a_paused_group_is_still_paused_after_a_power_cut() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        offsets = [calls.OffsetEntry(topic="orders", partition=0, offset=0)]
        await client.call(calls.CommitOffsets(group="audit", offsets=offsets))
        await client.call(calls.PauseGroup(name="audit"))
        client = await after_power_cut(client, storage, lose_everything=True)
        joined = await client.call(calls.JoinGroup(group="audit", topics=["orders"]))
        assert isinstance(joined, calls.Assignment)
        assert joined.partitions == []
        await client.call(calls.PauseGroup(name="audit", paused=False))
        beat = calls.HeartbeatGroup(group="audit", member_id=joined.member_id, generation=joined.generation, owned=[])
        assignment = await client.call(beat)
        assert isinstance(assignment, calls.Assignment)
        assert assignment.partitions == [calls.TopicPartitions(topic="orders", partitions=[0])]
        await client.broker.stop()

    run(scenario)


def unreadable(storage: SimulatedStorage, directory: str, patch: pytest.MonkeyPatch) -> None:
    """A directory that the disk does not show, as one with a bad block, or one of another user."""
    names = storage.names

    def failing(asked: str) -> list[str]:
        if asked == directory:
            raise OSError(errno.EIO, "Input/output error", directory)
        return names(asked)

    patch.setattr(storage, "names", failing)


async def left_behind(storage: SimulatedStorage) -> Client:
    """A broker that has just started, with three topics of old messages that nobody has used since."""
    client = await started(storage)
    for name in ("a", "b", "c"):
        await client.call(calls.CreateTopic(name=name, config={"retention_messages": 1}))
        for _ in range(4):
            await client.send([bytes(10_000)], topic=name)
    await client.broker.stop()
    return await started(storage)


@pytest.mark.parametrize("at", ["first look", "opening"])
def test_a_partition_that_cannot_be_read_keeps_no_other_from_retention(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=7)
        client = await left_behind(storage)
        if at == "first look":
            unreadable(storage, "topics/default/a/0", monkeypatch)
        else:
            storage.inject(Fault.SYNC_ERROR, when=lambda it: it.path.startswith("topics/default/a/0"), times=99)
            segment = max(name for name in storage.names("topics/default/a/0") if name.endswith(".index"))
            storage.flip(f"topics/default/a/0/{segment}", 0)
        await client.broker._life.cleanup.run()
        monkeypatch.undo()
        for name in ("b", "c"):
            segments = [name for name in storage.names(f"topics/default/{name}/0") if name.endswith(".log")]
            assert len(segments) <= 2, "what is beyond the limit is gone"
        await client.broker.stop()

    run(scenario)


def test_a_partition_that_cannot_be_read_keeps_no_other_from_a_compaction_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=8)
        client = await left_behind(storage)
        unreadable(storage, "topics/default/a/0", monkeypatch)
        answer = await client.call(admin_calls.Compact())
        assert isinstance(answer, admin_calls.Compacted)
        assert answer.segments_deleted >= 2
        with pytest.raises(StorageFailed, match="topics/default/a/0"):
            await client.call(admin_calls.Compact(topic="a"))
        await client.broker.stop()

    run(scenario)
