"""Dead letters of many messages at once: what it takes to write them, and that each is written."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.broker.journal import Fact
from millstream.broker.queues import burials
from millstream.broker.queues.keeper import PartitionKeeper
from millstream.broker.queues.source import StoredRun, _Window
from millstream.broker.transfer import Target, Transfer
from millstream.errors import MillstreamError, StorageFailed
from millstream.queues.letters import dead_letter_batch
from millstream.queues.records import Dead
from millstream.records import Batch, BatchHeader
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.leases import Scope, Settle, SettleEntry, SettleResults
from millstream.wire.letter_calls import ListLetters
from tests.simulated_broker import Client, after_kill, run, started
from tests.unit.broker.test_queues_at_run_time import lives, publish
from tests.waiting import eventually_async


async def reject(client: Client, consumer: int, most: int) -> int:
    """Lease messages and reject them lease by lease; returns how many."""
    leased = await client.lease(consumer, most)
    entries = [SettleEntry(Settle.REJECT, nonce, Scope.REST) for nonce in {some.part.nonce: None for some in leased}]
    settled = asyncio.get_running_loop().create_future()
    client.broker.settle(client.session, entries, settled.set_result)
    assert set(await settled) == {2}
    return len(leased)


def test_letters_of_thousands_that_die_together_are_made_once_and_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(batches: Iterable[Batch], dead: Collection[Dead], *details: Any, **more: Any) -> bytearray | None:
        made.append(sum(some.bits.bit_count() for some in dead))
        return dead_letter_batch(batches, dead, *details, **more)

    monkeypatch.setattr(burials, "dead_letter_batch", counted)

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        consumer = await client.open_queue()
        for start in range(0, 5000, 1000):
            await publish(client, [b"%d" % number for number in range(start, start + 1000)])
        assert await reject(client, consumer, 5000) == 5000
        assert sorted(map(int, filter(None, await client.read_all("orders.dlq")))) == list(range(5000))
        assert max(made) <= 500, "others have their turn between them"
        assert sum(made) < 10_000

    lives(work)


def test_those_that_die_one_by_one_share_writes_and_each_keeps_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    move = Transfer.move

    async def counted(transfer: Transfer, target: Target, batch: bytearray, *facts: Any, **more: Any) -> int:
        moves.append(BatchHeader(batch).count)
        return await move(transfer, target, batch, *facts, **more)

    monkeypatch.setattr(Transfer, "move", counted)

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        consumer = await client.open_queue()
        await publish(client, [b"%d" % number for number in range(300)])
        leased = [(await client.lease(consumer, 1))[0] for _ in range(300)]
        settled = []
        for message in leased:
            settled.append(asyncio.get_running_loop().create_future())
            entry = SettleEntry(Settle.REJECT, message.part.nonce, Scope.REST, reason=message.value.decode())
            client.broker.settle(client.session, [entry], settled[-1].set_result)
        assert [list(await one) for one in settled] == [[2]] * 300
        assert sum(moves) == 300
        assert len(moves) <= 5, "what dies while letters are written shares the next write"

    async def look(client: Client) -> None:
        assert await client.read_all("orders.dlq") == [b"%d" % number for number in range(300)]
        found = (await client.call(ListLetters(limit=300))).letters
        assert {letter.original_offset: letter.error for letter in found} == {at: str(at) for at in range(300)}

    lives(work, look)


def test_letters_of_scattered_messages_do_not_take_what_lies_between_them_into_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []

    def counted(batches: Iterable[Batch], *details: Any, **more: Any) -> bytearray | None:
        held.append(sum(batch.header.length for batch in batches))
        return dead_letter_batch(batches, *details, **more)

    monkeypatch.setattr(burials, "dead_letter_batch", counted)

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        consumer = await client.open_queue()
        for number in range(20):
            await publish(client, [b"%d" % number, *[bytes(1000)] * 99], priorities=[0, *[2] * 99])
        assert await reject(client, consumer, 20) == 20
        assert await client.read_all("orders.dlq") == [b"%d" % number for number in range(20)]
        assert sum(held) < 10_000

    lives(work)


def test_a_letter_is_written_although_the_segment_before_its_message_has_not_been_checked() -> None:
    async def fail(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for values in [[b"x"] * 1500, [bytes(15_000)], [bytes(15_000)], [bytes(15_000)], [b"bad", *[b"x"] * 10]]:
            await publish(client, values)
        consumer, leased = await client.open_queue(), []
        while more := await client.lease(consumer, 2000):
            leased += more
        bad = [message for message in leased if message.value == b"bad"]
        await client.settle(Settle.ACK, *(message for message in leased if message not in bad))
        await client.settle(Settle.NACK, *bad, value=0)

    async def give_up(client: Client) -> None:
        (bad,) = await client.lease(await client.open_queue(), wait_ms=5000)
        partition = client.broker.topics.partition("default", "orders", 0)
        source = client.broker.queues._keepers[partition.uid].source
        await partition.warm(0)
        source.forget()  # as if others had needed the memory; then somebody reads from the beginning
        assert source.batch_at(0) is not None
        assert partition.log.cold_segment(1500) is not None
        assert await client.settle(Settle.REJECT, bad) == [2]
        assert await client.read_all("orders.dlq") == [b"bad"]

    lives(fail, give_up)


def test_a_message_that_cannot_be_read_keeps_no_other_that_died_with_it_from_its_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        consumer, queues = await client.open_queue(), client.broker.queues
        for value in (b"good", b"bad", b"fine"):
            await publish(client, [value])
        leased = [(await client.lease(consumer, 1))[0] for _ in range(3)]
        part = queues.routed(leased[0].part.nonce)
        assert part is not None
        run_at = PartitionKeeper.run_at

        async def failing(keeper: PartitionKeeper, offset: int) -> StoredRun | None:
            if offset == 1:
                raise StorageFailed("the disk does not answer")
            return await run_at(keeper, offset)

        monkeypatch.setattr(PartitionKeeper, "run_at", failing)
        dead: list[Dead] = []
        for message in leased:
            entry = SettleEntry(Settle.REJECT, message.part.nonce, Scope.REST)
            dead += queues.settle_one(part, entry, client.session, queues.now_us()).dead
        with pytest.raises(StorageFailed):
            await part.burials.bury(dead)
        assert await client.read_all("orders.dlq") == [b"good", b"fine"]
        monkeypatch.undo()
        await asyncio.sleep(1)
        assert await client.read_all("orders.dlq") == [b"good", b"fine", b"bad"]

    lives(work)


async def rejected(client: Client, count: int) -> list[MillstreamError | SettleResults]:
    """Publish so many messages, lease each by itself and reject them all; what each settle is answered with."""
    await client.call(calls.CreateTopic(name="orders"))
    consumer = await client.open_queue()
    await publish(client, [b"%d" % number for number in range(count)])
    leased = [(await client.lease(consumer, 1))[0] for _ in range(count)]
    settled = []
    for message in leased:
        settled.append(asyncio.get_running_loop().create_future())
        entry = SettleEntry(Settle.REJECT, message.part.nonce, Scope.REST)
        client.broker.settle(client.session, [entry], settled[-1].set_result)
    return await asyncio.gather(*settled)


def test_letters_that_a_full_disk_refused_are_tried_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burials, "_RETRY_S_FIRST", 0.4)
    refused: list[int] = []
    moves: list[int] = []
    move, full = Transfer.move, True

    async def counted(transfer: Transfer, target: Target, batch: bytearray, *facts: Any, **more: Any) -> int:
        (refused if full else moves).append(BatchHeader(batch).count)
        if full:
            raise StorageFailed("no space left on device")
        return await move(transfer, target, batch, *facts, **more)

    monkeypatch.setattr(Transfer, "move", counted)

    async def work(client: Client) -> None:
        nonlocal full
        with capture_logs() as entries:
            answers = await rejected(client, 600)
            await asyncio.sleep(0)
        assert all(isinstance(answer, StorageFailed) for answer in answers)
        assert len(refused) < 100, "it is the disk, and each by itself would fare no better"
        assert [entry["messages"] for entry in entries if entry["event"] == "dead letters wait"] == [600]
        full = False
        await eventually_async(lambda: _has_letters(client, 600))
        assert len(moves) <= 3

    lives(work)


def test_many_that_cannot_be_read_keep_no_others_from_their_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burials, "_LETTERS_MAX", 100)
    run_at = PartitionKeeper.run_at

    async def failing(keeper: PartitionKeeper, offset: int) -> StoredRun | None:
        if offset < 60:
            raise StorageFailed("the disk does not answer")
        return await run_at(keeper, offset)

    monkeypatch.setattr(PartitionKeeper, "run_at", failing)

    async def work(client: Client) -> None:
        answers = await rejected(client, 300)
        refused = [number for number, answer in enumerate(answers) if isinstance(answer, StorageFailed)]
        assert set(range(60)) <= set(refused) <= set(range(100))
        monkeypatch.setattr(PartitionKeeper, "run_at", run_at)
        await eventually_async(lambda: _has_letters(client, 300))

    lives(work)


@pytest.mark.parametrize("elsewhere", ["", "graveyard"])
@pytest.mark.parametrize("killed", [False, True])
def test_letters_whose_topic_is_deleted_while_they_are_written_are_written_to_one_that_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, killed: bool, elsewhere: str
) -> None:
    """Also when letters are to go elsewhere by then."""
    intend, storage = Transfer._intend, SimulatedStorage(seed=1)
    moving = asyncio.Event()

    async def deleting(transfer: Transfer, intent: Fact, *details: Any) -> None:
        await intend(transfer, intent, *details)
        monkeypatch.setattr(Transfer, "_intend", intend)
        if elsewhere:
            await client.call(calls.AlterTopic(name="orders", config={"dead_letter_topic": elsewhere}))
        await client.call(calls.DeleteTopic(name="orders.dlq"))
        moving.set()
        if killed:
            await asyncio.Event().wait()

    async def work() -> None:
        nonlocal client
        client = await started(storage)
        monkeypatch.setattr(Transfer, "_intend", deleting)
        answers = asyncio.ensure_future(rejected(client, 3))
        await moving.wait()
        if killed:
            answers.cancel()
            client = await after_kill(client, storage)
        else:
            assert [list(answer) for answer in await answers] == [[2], [2], [2]]
        await eventually_async(lambda: _has_letters(client, 3))
        await client.broker.stop()

    client: Client
    run(work)


async def _has_letters(client: Client, count: int) -> bool:
    if client.broker.topics.registry.find("default", "orders.dlq") is None:
        return False
    return sorted(map(int, filter(None, await client.read_all("orders.dlq")))) == list(range(count))


def test_what_lies_behind_a_gap_is_found_although_its_segment_has_not_been_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it was taken for the end of the log, letters of messages that are there were thought to be gone."""

    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for _ in range(16):
            await publish(client, [bytes(15_000)])

    async def look(client: Client) -> None:
        await client.open_queue()
        partition = client.broker.topics.partition("default", "orders", 0)
        keeper = client.broker.queues._keepers[partition.uid]
        keeper.source.forget()
        segment = partition.log.cold_segment(0)
        assert segment is not None
        find = _Window.find
        monkeypatch.setattr(_Window, "find", lambda window, at: None if at == 0 else find(window, at))
        run = await keeper.run_at(0)
        assert run is not None
        assert run.base_offset == segment.next_offset

    lives(fill, look)
