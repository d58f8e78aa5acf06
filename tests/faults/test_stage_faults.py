"""Batches on a disk that loses power, wherever that happens: published exactly once, as a whole or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from millstream.broker.stages import publishing
from millstream.broker.stages import stages as stages_module
from millstream.broker.transfer import Target
from millstream.errors import MillstreamError, StageLost, StorageFailed
from millstream.ids import SCHEDULES
from millstream.testing.storage import Fault, Operation, PowerCut, SimulatedStorage
from millstream.wire.calls import CreateTopic
from millstream.wire.stage_calls import AbortStages, ListStages, StagePart
from tests.simulated_broker import Client, started
from tests.staging import open_stage, publish, put, seen

T = TypeVar("T")

TOPICS = ("orders", "other")
#: More than a partition remembers of one producer, so that a repetition begins before that.
BATCHES = 20


def life(storage: SimulatedStorage, work: Callable[[Client], Awaitable[T]]) -> T:
    """One run of a broker, until the work is done or the power is gone, which may leave everybody waiting."""

    async def run() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # PowerCut may hit anywhere
        return await work(await started(storage))

    async def watched() -> T:
        running = asyncio.ensure_future(run())
        while not running.done():
            if not storage.is_up:
                raise PowerCut("somebody waits for an answer")
            await asyncio.wait((running,), timeout=0.005)
        return running.result()

    return asyncio.run(asyncio.wait_for(watched(), 30))


def world(seed: int = 0) -> SimulatedStorage:
    storage = SimulatedStorage(seed)

    async def prepare(client: Client) -> None:
        for topic in TOPICS:
            await client.call(CreateTopic(name=topic))
        await client.broker.stop()

    life(storage, prepare)
    return storage


def values_of(topic: str, batch: int) -> list[bytes]:
    return [f"{topic} {batch} {number}".encode() for number in range(BATCHES)]


async def stage(client: Client, batch: int) -> StagePart | None:
    """A stage with many batches for each of the topics; None when there is nothing to do any more."""
    stage_id = await open_stage(client, batch)
    if not stage_id:
        return None
    sent = [put(client, stage_id, [value], topic=topic) for topic in TOPICS for value in values_of(topic, batch)]
    await asyncio.gather(*sent)
    return StagePart(stage=stage_id, batches=len(sent), messages=len(sent))


async def staged(client: Client, batch: int) -> StagePart:
    part = await stage(client, batch)
    assert part is not None
    return part


async def drive(client: Client, batches: int, known: dict[int, StagePart]) -> None:
    """What a driver does, from wherever it was: stage what it has not staged, and publish one batch after the other."""
    for batch in range(batches):
        part = known.get(batch)
        if part is not None:
            with suppress(StageLost):  # its task has to run again
                await publish(client, batch, part)
                continue
        part = await stage(client, batch)
        if part is not None:
            known[batch] = part
            await publish(client, batch, part)


async def check(client: Client, batches: int) -> None:
    for topic in TOPICS:
        expected = [value for batch in range(batches) for value in values_of(topic, batch)]
        assert await client.read_all(topic) == expected


def test_batches_are_there_once_wherever_the_power_goes() -> None:
    """The power goes at one operation of the disk after the other, while three batches are staged and published."""
    cut, at = True, 1
    tried = 0
    while cut:
        cut = False
        storage = world(at)
        known: dict[int, StagePart] = {}
        storage.inject(Fault.POWER_CUT, at=storage.operations + at)
        try:
            life(storage, lambda client, known=known: drive(client, 3, known))  # type: ignore[misc]
        except (PowerCut, MillstreamError, TimeoutError):
            cut = True
        cut = cut or not storage.is_up
        storage.heal()
        if not storage.is_up:
            storage.restart(lose_everything=at % 3 == 0)
        tried += cut

        async def afterwards(client: Client, known: dict[int, StagePart] = known) -> None:
            await drive(client, 3, known)
            await check(client, 3)
            await client.broker.stop()

        life(storage, afterwards)
        life(storage, lambda client: check(client, 3))
        at += 3
    assert tried > 25, "the power went while there was something to lose"


@pytest.mark.parametrize("lose_everything", [False, True])
def test_what_is_recorded_is_published_although_nobody_asks_again(lose_everything: bool) -> None:
    storage = world()

    async def begin(client: Client) -> None:
        part = await staged(client, 0)

        async def move_nothing(*_: object) -> None:
            raise asyncio.CancelledError

        with pytest.MonkeyPatch.context() as patch, suppress(asyncio.CancelledError):
            patch.setattr(stages_module, "move_all", move_nothing)
            await publish(client, 0, part)
        assert await client.read_all() == []

    life(storage, begin)
    storage.power_cut(lose_everything=lose_everything)

    async def afterwards(client: Client) -> None:
        for topic in TOPICS:
            await seen(client, BATCHES, topic)
        await check(client, 1)
        assert (await publish(client, 0)).already
        (query,) = await client.call(ListStages())  # type: ignore[misc]
        assert (query.published, query.publishing) == (0, -1)

    life(storage, afterwards)


def test_some_targets_have_their_messages_and_others_not_when_the_power_goes() -> None:
    storage = world()

    async def begin(client: Client) -> None:
        part = await staged(client, 0)
        resolve = client.broker.topics.partition
        reached = asyncio.Event()

        def stuck(namespace: str, name: str, number: int) -> object:
            if Target(namespace, name, number).topic == "other":
                reached.set()
                raise StorageFailed("not now")
            return resolve(namespace, name, number)

        client.broker.topics.partition = stuck  # type: ignore[method-assign,assignment]
        publishing = asyncio.ensure_future(publish(client, 0, part))
        await reached.wait()
        client.broker.topics.partition = resolve  # type: ignore[method-assign]
        await seen(client, BATCHES)
        client.broker.topics.partition = stuck  # type: ignore[method-assign,assignment]
        assert not publishing.done()
        answer = await client.call(AbortStages(query="never", batch=0))
        assert not answer.published  # type: ignore[attr-defined]

    life(storage, begin)
    storage.power_cut(lose_everything=True)

    async def afterwards(client: Client) -> None:
        assert (await publish(client, 0)).already
        await check(client, 1)

    life(storage, afterwards)


def test_all_is_done_but_the_answer_is_lost() -> None:
    storage = world()

    async def begin(client: Client) -> StagePart:
        part = await staged(client, 0)
        await publish(client, 0, part)
        return part

    part = life(storage, begin)
    storage.power_cut(lose_everything=True)

    async def afterwards(client: Client) -> None:
        again = await publish(client, 0, part)
        assert again.already
        assert {it.topic: (it.first, it.until) for it in again.offsets} == dict.fromkeys(TOPICS, (0, BATCHES))
        assert (await client.call(AbortStages(query="q", batch=0))).published  # type: ignore[attr-defined]
        await check(client, 1)

    life(storage, afterwards)


def test_what_was_confirmed_is_staged_after_a_power_cut_and_what_was_aborted_is_not() -> None:
    storage = world()

    async def begin(client: Client) -> list[StagePart]:
        parts = [await staged(client, 0) for _ in range(2)]
        await client.call(AbortStages(query="q", batch=0, stages=[parts[1].stage]))
        await put(client, await open_stage(client, 7), [b"makes the disk hear of it"])
        return parts

    kept, dropped = life(storage, begin)
    storage.power_cut(lose_everything=True)

    async def afterwards(client: Client) -> None:
        with pytest.raises(StageLost):
            await publish(client, 0, dropped)
        assert (await publish(client, 0, kept)).messages == kept.messages
        await check(client, 1)

    life(storage, afterwards)


def test_whoever_asked_goes_away_and_the_batch_is_published_all_the_same() -> None:
    storage = world()

    async def scenario(client: Client) -> None:
        part = await staged(client, 0)
        asked = asyncio.ensure_future(publish(client, 0, part))
        await asyncio.sleep(0)
        asked.cancel()
        for topic in TOPICS:
            await seen(client, BATCHES, topic)
        await check(client, 1)

    life(storage, scenario)


def test_a_disk_that_is_full_refuses_the_batch_and_takes_it_later() -> None:
    storage = world()

    async def scenario(client: Client) -> None:
        part = await staged(client, 0)

        def in_state(operation: Operation) -> bool:
            return operation.path.startswith("state/stages")

        storage.inject(Fault.NO_SPACE, when=in_state, times=1000)
        with pytest.raises(StorageFailed):
            await publish(client, 0, part)
        with pytest.raises(StorageFailed, match="not known"):
            await client.call(AbortStages(query="q", batch=0))
        storage.heal()
        assert not (await publish(client, 0, part)).already
        await check(client, 1)
        # And where the target has no room, the batch waits for it.
        part = await staged(client, 1)
        storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("topics"), times=3)
        assert (await publish(client, 1, part)).lost == 0
        await check(client, 2)

    life(storage, scenario)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.WRITE_ERROR])
def test_a_write_that_is_refused_before_a_target_knows_the_query_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, times: int
) -> None:
    """Rounds are written ahead, and a target that has never heard of a producer takes any of them for the first."""
    monkeypatch.setattr(publishing, "_ROUND_BYTES", 64)
    storage = world()

    async def scenario(client: Client) -> None:
        part = await staged(client, 0)
        storage.inject(fault, when=lambda it: it.path.startswith("topics") and it.kind == "write", times=times)
        assert (await publish(client, 0, part)).lost == 0
        await check(client, 1)

    life(storage, scenario)


def test_a_put_that_the_disk_refuses_spoils_the_stage() -> None:
    storage = world()

    async def scenario(client: Client) -> None:
        stage_id = await open_stage(client)
        await put(client, stage_id, [b"a"])
        storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("stages"), times=2)
        with pytest.raises(StorageFailed):
            await put(client, stage_id, [b"b"])
        with pytest.raises(StorageFailed):
            await put(client, stage_id, [b"c"])
        assert (await client.read_all()) == []

    life(storage, scenario)


def test_a_stage_whose_beginning_the_disk_refuses_takes_nothing() -> None:
    """Otherwise what is put there would belong to no stage after a restart, and nobody would miss it."""
    storage = world()

    async def scenario(client: Client) -> None:
        await open_stage(client)  # the log of its query is there
        client.broker.flush()
        storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("stages"), times=1000)
        refused = await open_stage(client)
        client.broker.flush()
        storage.heal()
        with pytest.raises(StorageFailed):
            await put(client, refused, [b"a"])
        part = await staged(client, 0)
        assert (await publish(client, 0, part)).lost == 0
        await check(client, 1)

    life(storage, scenario)


def test_scheduled_messages_of_a_batch_come_once_after_a_power_cut() -> None:
    storage = world()

    async def begin(client: Client) -> None:
        stage_id = await open_stage(client)
        due_us = client.broker.now_us() + 300_000
        await put(client, stage_id, [b"one", b"two"], partition=SCHEDULES, deliver_at_us=[due_us, due_us])
        await publish(client, 0, StagePart(stage=stage_id, batches=1, messages=2))

    life(storage, begin)
    storage.power_cut(lose_everything=True)

    async def afterwards(client: Client) -> None:
        assert (await publish(client, 0)).already
        await seen(client, 2)
        await asyncio.sleep(0.1)
        assert await client.read_all() == [b"one", b"two"]

    life(storage, afterwards)


@pytest.mark.parametrize("at_once", [64, publishing._ROUND_BYTES])
def test_many_cuts_one_after_the_other(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A driver that is unlucky again and again gets there, and nothing is there twice.

    With little `at_once` every batch is a round of its own, and some of them are written ahead of what is confirmed.
    """
    monkeypatch.setattr(publishing, "_ROUND_BYTES", at_once)
    rng = random.Random(7)
    storage = world(3)
    known: dict[int, StagePart] = {}
    for _ in range(25):
        storage.inject(Fault.POWER_CUT, at=storage.operations + rng.randrange(1, 120))
        with suppress(PowerCut, MillstreamError, TimeoutError):
            life(storage, lambda client: drive(client, 6, known))
        storage.heal()
        if not storage.is_up:
            storage.restart(lose_everything=rng.random() < 0.3)
        if rng.random() < 0.5:  # the driver went down, too
            known.clear()

    async def afterwards(client: Client) -> None:
        await drive(client, 6, known)
        await check(client, 6)

    life(storage, afterwards)


def test_a_query_whose_stages_cannot_be_read_keeps_no_broker_from_starting_and_is_published_when_they_can() -> None:
    storage = world()
    known: list[StagePart] = []

    async def begin(client: Client) -> None:
        known.append(await staged(client, 0))

        async def move_nothing(*_: object) -> None:
            raise asyncio.CancelledError

        with pytest.MonkeyPatch.context() as patch, suppress(asyncio.CancelledError):
            patch.setattr(stages_module, "move_all", move_nothing)
            await publish(client, 0, known[0])

    life(storage, begin)
    storage.power_cut()
    storage.inject(Fault.NO_SPACE, times=1_000, when=lambda operation: operation.path.startswith("stages/"))

    async def afterwards(client: Client) -> None:
        await client.send([b"others go on"], topic="other")
        with pytest.raises(StorageFailed, match="No space left"):
            await publish(client, 0, known[0])
        with pytest.raises(StorageFailed, match="No space left"):
            await open_stage(client, 1)
        with pytest.raises(StorageFailed, match="No space left"):
            await client.call(AbortStages(query="q", batch=1))
        await client.broker.stages.sweep()
        assert await client.read_all() == []
        storage.heal()
        await client.broker.stages.sweep()
        await seen(client, BATCHES)
        await seen(client, BATCHES + 1, "other")
        assert (await publish(client, 0, known[0])).already
        assert await client.read_all() == values_of("orders", 0)
        await client.broker.stop()

    life(storage, afterwards)
