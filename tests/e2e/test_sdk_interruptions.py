"""Programs that are interrupted in the middle of a call: nothing stays behind that nobody looks after."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

import millstream
from millstream import aio
from millstream.testing.broker import BrokerForTests


class Interrupted(Exception):
    """Stands for a Ctrl-C: raised by the handler of a signal."""


def test_what_is_leased_for_a_task_that_was_cancelled_goes_back(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            async with client.queue("t") as queue:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(queue.lease(wait="10s"), 0.05)
                await client.publish("t", b"x")  # answers a request that nobody waits for any more
                message = await queue.next(5)
                assert message is not None
                assert message.delivery_count == 1
                await message.ack(wait=True)

    asyncio.run(main())


def test_what_is_leased_for_a_call_that_was_interrupted_goes_back(broker: BrokerForTests) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with millstream.connect(broker.address) as client:
            client.create_topic("t")
            with client.queue("t") as queue:
                main = threading.main_thread().ident
                assert main is not None
                threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
                with pytest.raises(Interrupted):
                    queue.lease(wait="10s")
                client.publish("t", b"x")
                message = queue.next(5)
                assert message is not None
                message.ack(wait=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
