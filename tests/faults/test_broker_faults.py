"""The whole broker on a disk that fails: nothing confirmed is lost, and what cannot be promised is not confirmed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from millstream.broker.broker import Broker, FetchAnswer, Session
from millstream.config import Settings
from millstream.errors import MillstreamError, ReadOnly, StorageFailed
from millstream.records import Batch, encode_batch
from millstream.testing.storage import Fault, PowerCut, SimulatedStorage
from millstream.wire import calls
from millstream.wire.messages import FetchRequest, PublishRequest


@dataclass
class Client:
    """Talks to a broker without a socket, as every door does."""

    broker: Broker
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.broker.open_session(namespace="default", client_id="test", address="", push=lambda _: None)

    async def call(self, call: object) -> object:
        return await self.broker.call(self.session, call)

    def send(
        self, values: list[bytes], *, topic: str = "orders", producer: int = 0, sequence: int = 0
    ) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def confirmed(error: MillstreamError | None, label: int, base: int, _time: int, _again: bool) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                assert label == 3, "the default policy promises the disk"
                future.set_result(base)

        batch = encode_batch(values, base_timestamp_us=1, producer=producer << 16, first_sequence=sequence)
        self.broker.publish(self.session, PublishRequest(topic, 0, 1, 0, memoryview(batch)), confirmed)
        self.broker.flush()
        return future

    async def read_all(self, topic: str = "orders") -> list[bytes | None]:
        values: list[bytes | None] = []
        offset = 0
        while True:
            future: asyncio.Future[FetchAnswer | MillstreamError] = asyncio.get_running_loop().create_future()
            self.broker.fetch(self.session, FetchRequest(topic, 0, offset, 1 << 20, 0), future.set_result)
            answer = await future
            if isinstance(answer, MillstreamError):
                raise answer
            data = b"".join(answer.buffers)
            if not data:
                return values
            at = 0
            while at < len(data):
                batch = Batch.parse(data, at)
                values += [v for v, o in zip(batch.values(), batch.offsets(), strict=True) if o >= offset]
                at += batch.header.length
            offset = answer.next_offset


async def started(storage: SimulatedStorage) -> Client:
    settings = Settings.model_validate({"storage": {"free_bytes_min": 0, "segment_bytes": 16_384}})
    broker = Broker(settings, storage, rng=random.Random(1))
    await broker.start()
    return Client(broker)


async def after_power_cut(client: Client, storage: SimulatedStorage, *, lose_everything: bool = False) -> Client:
    """The machine goes down with everything that ran on it, and a new broker starts on what the disk kept."""
    for task in client.broker._tasks:
        task.cancel()
    storage.heal()
    storage.power_cut(lose_everything=lose_everything)
    return await started(storage)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.WRITE_ERROR])
def test_a_failed_write_is_refused_leaves_nothing_and_the_partition_goes_on(fault: Fault) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=2)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"before"], producer=5, sequence=0)
        storage.inject(fault, when=lambda operation: operation.path.startswith("topics/") and operation.kind == "write")
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


@pytest.mark.parametrize("seed", range(60))
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
        entries = [calls.OffsetEntry(topic="orders", partition=p, offset=10 + p) for p in range(2)]
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
        await broker._cleanup.watch_disk()
        with pytest.raises(ReadOnly, match="999999 bytes left"):
            client.send([b"refused"])
        assert await client.read_all() == [b"before"], "reading goes on"
        storage.free = 1_050_000
        await broker._cleanup.watch_disk()
        with pytest.raises(ReadOnly):
            client.send([b"not yet: it would flap"])
        storage.free = 2_000_000
        await broker._cleanup.watch_disk()
        await client.send([b"after"])
        assert await client.read_all() == [b"before", b"after"]
        await broker.stop()

    run(scenario)
