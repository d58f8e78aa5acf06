"""What is asked to be flushed by the next one who reads from a socket, in a broker that nobody may talk to for days."""

from __future__ import annotations

from millstream.testing.storage import SimulatedStorage
from millstream.wire.calls import CreateTopic
from millstream.wire.queue_calls import DeleteQueue
from tests.simulated_broker import Client, run, started


def test_what_the_broker_writes_itself_waits_for_nobody_to_flush_it() -> None:
    """Such a broker remembers, measures and moves messages all the same, and must not note each of them in vain."""

    async def scenario() -> None:
        client = await started(SimulatedStorage(3))
        await client.call(CreateTopic(name="orders"))
        await client.send([b"1"])
        for number in range(20):
            await use(client, f"group-{number}")
        assert client.broker._to_flush == []
        await client.broker.stop()

    async def use(client: Client, group: str) -> None:
        """A state log, a journal that is awaited, and one that is not."""
        consumer = await client.open_queue(group=group)
        assert [message.value for message in await client.lease(consumer)] == [b"1"]
        await client.call(DeleteQueue(topic="orders", group=group, force=True))

    run(scenario)
