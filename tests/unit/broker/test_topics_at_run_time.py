"""Topics that are deleted, compacted and read at the same time, and after restarts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from millstream.config import Settings
from millstream.errors import MillstreamError, PartitionNotFound, StorageFailed
from millstream.log.compaction import Compaction
from millstream.log.scan import Found
from millstream.log.segment import Segment
from millstream.log.storage import DiskStorage
from millstream.records import Batch
from millstream.testing.broker import BrokerForTests
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import decode_fetch_result
from tests.native import NativeClient
from tests.waiting import eventually


class SlowVerification:
    """Holds the check of a cold segment, after it has read, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.checked: list[int] = []  # base offsets, as often as it was done
        original = Segment.verify

        def verify(segment: Segment, **options: bool) -> object:
            result = original(segment, **options)
            if "asyncio" in threading.current_thread().name:
                self.checked.append(segment.base_offset)
                self.entered.set()
                self.go.wait(20)
            return result

        monkeypatch.setattr(Segment, "verify", verify)


class SlowCompaction:
    """Holds a compaction at its first batch until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.batches = 0  # that it has looked at
        original = Compaction._open

        def open_batch(compaction: Compaction, found: Found) -> Batch | None:
            if "asyncio" in threading.current_thread().name:
                self.batches += 1
                self.entered.set()
                self.go.wait(20)
            return original(compaction, found)

        monkeypatch.setattr(Compaction, "_open", open_batch)


def fill(data: Path, **config: object) -> None:
    with BrokerForTests(data) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t", config={"segment_bytes": 1 << 20, **config})
        for number in range(40):
            client.publish("t", [bytes(100_000)], keys=[b"k%d" % (number % 3)])


def test_a_negative_partition_number_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t")
        with pytest.raises(PartitionNotFound):
            client.call("topic.offsets", topic="t", partitions=[-1])
        client.publish("t", [b"confirmed"])
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        assert client.fetch("t", 0).high_watermark == 1


def test_the_first_use_of_a_partition_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand new partitions would otherwise stop everybody for as long as a thousand syncs take."""
    synced_by: list[str] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        synced_by.append(threading.current_thread().name)
        original(fd)

    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t", partitions=4)
        client.call("topic.alter", name="t", partitions=8)
        loop = broker.run(_thread_name())
        monkeypatch.setattr(os, "fsync", fsync)
        for number in range(8):
            assert client.publish("t", [b"x"], partition=number).label == "disk"
        monkeypatch.undo()
    assert len(synced_by) >= 8, "the name of each file is on disk before its first message is confirmed"
    assert loop not in synced_by


async def _thread_name() -> str:
    return threading.current_thread().name


def test_a_fetch_is_answered_when_retention_takes_its_segment_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    slow = SlowVerification(monkeypatch)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        asked = client.send_fetch("t", 0)
        assert slow.entered.wait(5)
        with NativeClient(broker.address) as other:
            other.call("topic.alter", name="t", config={"retention_bytes": 1})
        broker.run(broker.broker._life.cleanup.run())
        slow.go.set()
        client.answer(asked)


def test_a_cold_segment_is_checked_once_however_many_want_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart all consumers of a topic go on about where they were: each waited for a check of its own."""
    fill(tmp_path)
    slow = SlowVerification(monkeypatch)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        asked = [client.send_fetch("t", offset) for offset in range(8)]
        assert slow.entered.wait(5)
        partition = broker.broker.topics.partition("default", "t", 0)

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(partition.warm(0), 0.001)

        broker.run(give_up())  # who does not wait any longer takes nothing away from the others
        warmed = asyncio.run_coroutine_threadsafe(partition.warm(0), broker.broker._life.opener.loop)
        client.call("topic.list")  # so all of them wait
        slow.go.set()
        answers = [client.receive() for _ in asked]
        assert {number for _, number, _ in answers} == set(asked)
        assert all(decode_fetch_result(payload).batches for _, _, payload in answers)
        warmed.result(5)
        assert slow.checked == [0]


def test_a_cold_segment_that_cannot_be_read_is_tried_again_by_the_next_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)

    def fails(_segment: Segment, **_options: bool) -> object:
        raise OSError(5, "Input/output error")

    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        with monkeypatch.context() as broken:
            broken.setattr(Segment, "verify", fails)
            for number in [client.send_fetch("t", offset) for offset in (0, 1)]:
                with pytest.raises(StorageFailed, match="Input/output error"):
                    decode_fetch_result(client.answer(number))
        assert client.fetch("t", 0).batches


def test_a_cold_segment_is_checked_by_the_next_who_asks_when_no_thread_could_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the machine, met once: from then on everybody waited for a check that nobody made."""
    fill(tmp_path)
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("asyncio"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        partition = broker.broker.topics.partition("default", "t", 0)
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", fails)
            asked = client.send_fetch("t", 0)
            with pytest.raises(StorageFailed, match="can't start new thread"):
                decode_fetch_result(client.answer(asked))
            with pytest.raises(StorageFailed, match="can't start new thread"):
                broker.run(partition.warm(0))
        assert client.fetch("t", 0).batches
        assert partition.is_idle


def test_compaction_during_the_check_of_a_cold_segment_leaves_healthy_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, cleanup="compact")
    slow = SlowVerification(monkeypatch)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        asked = client.send_fetch("t", 0)
        assert slow.entered.wait(5)

        async def compact() -> None:
            log = broker.broker.topics.partition("default", "t", 0).log
            compaction = Compaction.plan(log, now_us=10**18, tombstone_retention_ms=0)
            assert compaction is not None
            compaction.rewrite()
            assert any([*compaction.swaps()])

        broker.run(compact())
        index = tmp_path / "topics/default/t/0/00000000000000000000.index"
        before = index.read_bytes()
        slow.go.set()
        client.answer(asked)
        assert index.read_bytes() == before
    monkeypatch.undo()
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        assert client.fetch("t", 0).damaged is None
        assert not client.call("topic.describe", name="t")["partitions"][0]["damaged_ranges"]


def test_a_topic_made_anew_does_not_write_into_the_files_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    slow = SlowVerification(monkeypatch)
    removing, go_on = threading.Event(), threading.Event()
    original = DiskStorage.remove_tree

    def remove_tree(storage: DiskStorage, directory: str) -> None:
        removing.set()
        go_on.wait(20)
        original(storage, directory)

    monkeypatch.setattr(DiskStorage, "remove_tree", remove_tree)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        reader = NativeClient(broker.address)
        asked = reader.send_fetch("t", 0)
        assert slow.entered.wait(5)  # a reader waits for the check of a cold segment
        client.socket.sendall(encode_frame(FrameType.CALL, b'{"op":"topic.delete","name":"t"}', 77))
        assert removing.wait(5)  # the log is closed, its directory is about to go
        slow.go.set()
        assert reader.receive()[1] == asked
        go_on.set()
        client.answer(77)
        client.call("topic.create", name="t")
        assert client.publish("t", [b"confirmed"]).label == "disk"
        reader.close()
    monkeypatch.undo()
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        assert client.fetch("t", 0).high_watermark == 1


def test_deleting_a_topic_does_not_wait_for_its_compaction_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one takes minutes, in which no topic could be made, changed or deleted."""
    fill(tmp_path, cleanup="compact")
    slow = SlowCompaction(monkeypatch)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        partition = broker.broker.topics.partition("default", "t", 0)
        compacting = asyncio.run_coroutine_threadsafe(
            broker.broker._life.cleanup.run(), broker.broker._life.opener.loop
        )
        assert slow.entered.wait(5)
        client.socket.sendall(encode_frame(FrameType.CALL, b'{"op":"topic.delete","name":"t"}', 77))
        eventually(lambda: partition.failed)
        slow.go.set()
        client.answer(77)
        compacting.result(5)
        assert slow.batches == 1, "it gives up at once"
        client.call("topic.create", name="t")


def test_a_broker_that_stops_does_not_wait_for_a_compaction_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stops it kills it after a while, and the next start has to repair what an orderly stop leaves in order."""
    fill(tmp_path, cleanup="compact")
    slow = SlowCompaction(monkeypatch)
    settings = Settings.model_validate({"storage": {"cleanup_interval_ms": 100}})
    with BrokerForTests(tmp_path, settings=settings) as broker:
        broker.broker.topics.partition("default", "t", 0)
        assert slow.entered.wait(5)
        stopping = threading.Thread(target=broker.stop)
        stopping.start()
        eventually(broker.broker._life.stopping.is_set)
        slow.go.set()
        stopping.join(20)
        assert not stopping.is_alive()
    assert slow.batches == 1, "it gives up at once"
    assert not list(tmp_path.rglob("*.new"))
    monkeypatch.undo()
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        assert client.fetch("t", 0).next_offset == 10, "nothing has changed"
        broker.run(broker.broker._life.cleanup.run())
        assert broker.broker.metrics.compactions == 1, "and the next round does it"


def test_a_deletion_that_the_disk_refused_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t")
        client.publish("t", [b"x"])

        def refuse(_storage: DiskStorage, _directory: str) -> None:
            raise OSError(39, "Directory not empty")

        with monkeypatch.context() as broken:
            broken.setattr(DiskStorage, "remove_tree", refuse)
            with pytest.raises(MillstreamError, match="delete it again"):
                client.call("topic.delete", name="t")
        client.call("topic.delete", name="t")
        client.call("topic.create", name="t")


def test_deleting_a_namespace_forgets_what_groups_have_read_of_it(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address, namespace="ns") as client:
        client.call("topic.create", name="t")
        client.publish("t", [b"old"])
        client.call("group.commit", group="g", offsets=[{"topic": "t", "partition": 0, "offset": 1}])
        client.call("namespace.delete", name="ns", force=True)
        client.call("topic.create", name="t")
        assert client.call("group.committed", group="g") == []


def test_messages_of_a_topic_that_nobody_uses_grow_old_all_the_same(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="t", config={"retention_ms": 1})
        client.publish("t", [b"old"])
    time.sleep(0.01)  # the clock of the machine decides here
    with BrokerForTests(tmp_path) as broker:
        broker.run(broker.broker._life.cleanup.run())
        assert sum(path.stat().st_size for path in (tmp_path / "topics/default/t/0").glob("*.log")) == 0
        with NativeClient(broker.address) as client:
            assert client.fetch("t", 1).start_offset == 1
            assert client.publish("t", [b"new"]).base_offset == 1


def test_the_lag_of_a_group_is_found_without_checking_segments_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    threads: list[str] = []
    original = Segment.verify

    def verify(segment: Segment, **options: bool) -> object:
        threads.append(threading.current_thread().name)
        return original(segment, **options)

    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("group.commit", group="g", offsets=[{"topic": "t", "partition": 0, "offset": 0}])
    monkeypatch.setattr(Segment, "verify", verify)
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        (lag,) = client.call("group.describe", name="g")["lag"]
        assert lag["lag"] == 40
    assert threads
    assert "broker-for-tests" not in threads


def test_stopping_does_not_wait_for_a_whole_round_of_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    rewrites: list[object] = []

    def rewrite(compaction: Compaction, _is_over: object) -> None:
        rewrites.append(compaction)
        entered.set()
        go_on.wait(20)

    monkeypatch.setattr(Compaction, "rewrite", rewrite)
    settings = Settings.model_validate({"storage": {"cleanup_interval_ms": 100}})
    broker = BrokerForTests(tmp_path, settings=settings).start()
    with NativeClient(broker.address) as client:
        for name in ("a", "b", "c"):
            client.call("topic.create", name=name, config={"segment_bytes": 1 << 20, "cleanup": "compact"})
            for _ in range(15):
                client.publish(name, [bytes(100_000)], keys=[b"k"])
    assert entered.wait(10)
    stopping = threading.Thread(target=broker.stop)
    stopping.start()
    eventually(broker.broker._life.stopping.is_set)
    go_on.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert len(rewrites) == 1
