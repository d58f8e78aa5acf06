"""Small publishes that wait for the disk are written together when a round of syncs begins, whoever sent them."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import MillstreamError
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls
from tests.simulated_broker import Client, run, started

LOG = "topics/default/orders/0/"


async def with_topic(storage: SimulatedStorage) -> Client:
    client = await started(storage)
    await client.call(calls.CreateTopic(name="orders"))
    await client.send([b"first"])
    return client


def test_publishes_of_many_clients_share_a_write_and_each_is_answered() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topic(storage)
        before = storage.operations
        answers = await asyncio.gather(*(client.send([f"{number}".encode()]) for number in range(16)))
        operations = storage.operations - before
        assert operations < 8, f"{operations} operations of the disk for 16 publishes"
        assert answers == list(range(1, 17))
        assert await client.read_all() == [b"first", *(f"{number}".encode() for number in range(16))]
        await client.broker.stop()

    run(scenario)


def test_what_is_answered_survives_a_power_cut_and_what_is_not_was_refused() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topic(storage)
        storage.inject(Fault.WRITE_ERROR, when=lambda it: it.path.startswith(LOG) and it.kind == "write")
        results = await asyncio.gather(
            *(client.send([f"{number}".encode()]) for number in range(4)), return_exceptions=True
        )
        assert all(isinstance(result, MillstreamError) for result in results), "one write, so one fate"
        storage.heal()
        await client.send([b"last"])
        assert await client.read_all() == [b"first", b"last"]
        storage.power_cut(lose_everything=True)
        again = await started(storage)
        assert await again.read_all() == [b"first", b"last"]
        await again.broker.stop()

    run(scenario)


@pytest.mark.parametrize("size", [10, 10_000])
def test_the_order_of_a_producer_holds_whatever_the_size_of_its_batches(size: int) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topic(storage)
        sizes = [10, size, 10, size, 10]
        values = [f"{number} ".encode() + b"x" * length for number, length in enumerate(sizes)]
        await asyncio.gather(
            *(client.send([value], producer=5, sequence=number) for number, value in enumerate(values))
        )
        assert await client.read_all() == [b"first", *values]
        await client.broker.stop()

    run(scenario)


def test_a_batch_that_is_sent_again_while_it_waits_is_stored_once_and_answered_twice() -> None:
    """As by a producer whose connection was lost; found by the simulation (seed 106582)."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topic(storage)
        sent = [client.send([f"{number}".encode()], producer=5, sequence=number) for number in (0, 1, 0, 1, 2)]
        assert await asyncio.gather(*sent) == [1, 2, 1, 2, 3]
        assert await client.read_all() == [b"first", b"0", b"1", b"2"]
        await client.broker.stop()

    run(scenario)


def test_a_topic_that_goes_away_answers_what_waits_for_its_next_round() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topic(storage)
        sending = [client.send([b"late"]) for _ in range(3)]
        await client.call(calls.DeleteTopic(name="orders"))
        done, waiting = await asyncio.wait(sending, timeout=5)
        assert not waiting
        for answer in done:
            assert answer.exception() is None or isinstance(answer.exception(), MillstreamError)
        await client.broker.stop()

    run(scenario)
