"""The asynchronous client among many tasks, and when it is closed by several of them or in the middle of something."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque

import pytest
from async_scenarios import fill, run
from fake_broker import FakeBroker, Fault

from millstream import aio
from millstream.client.address import Target
from millstream.errors import ConnectionLost


@pytest.mark.parametrize("many", ["calls", "topics"])
def test_tasks_do_not_wait_for_the_patience_of_those_before_them(many: str) -> None:
    """A broker that takes connections and says nothing: all who ask it hear of that when their own time is up."""

    async def main() -> float:
        with socket.create_server(("127.0.0.1", 0), backlog=200) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            client = aio.Client(
                Target.of(address, namespace="default", client_id=None, key=None, timeout_s=0.2, tls=None, ca=None)
            )
            asked = [client.topics() if many == "calls" else client.publish(f"t{at}", b"x") for at in range(40)]
            before_s = time.monotonic()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            took_s = time.monotonic() - before_s
            assert {type(answer) for answer in answers} == {ConnectionLost}
            await client.close()
            return took_s

    took_s = min(asyncio.run(main()) for _ in range(3))
    assert took_s < 1.2, "one after the other it is at least two seconds"


def test_a_client_whose_close_was_cancelled_can_be_closed(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"x")
        fake.faults = deque([Fault(silent=True)])
        late = asyncio.ensure_future(client.publish("t", b"y"))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        await client.close()
        assert client._link.closed
        await asyncio.gather(late, return_exceptions=True)

    run(fake, scenario)


def test_a_stream_that_is_closed_twice_at_a_time_is_revoked_once(fake: FakeBroker) -> None:
    revoked: list[object] = []
    fill(fake)

    async def main() -> None:
        async def on_revoked(partitions: object, lost: bool) -> None:
            revoked.append(partitions)
            assert len(revoked) == 1
            await stream.close()

        async with aio.connect(fake.address) as client:
            stream = await client.stream("t", group="g", on_revoked=on_revoked)
            assert await stream.next(5) is not None
            await asyncio.gather(stream.close(), stream.close())

    asyncio.run(main())
    assert len(revoked) == 1


def test_a_callback_that_raises_does_not_keep_the_client_from_closing_the_rest(fake: FakeBroker) -> None:
    def on_revoked(_: object, lost: bool) -> None:
        raise ValueError("no")

    fill(fake)

    async def main() -> None:
        client = await aio.connect(fake.address)
        stream = await client.stream("t", group="g", on_revoked=on_revoked)
        assert await stream.next(5) is not None
        producers = [await client.producer(f"t{number}", partition=0, linger_ms=60_000) for number in range(8)]
        for producer in producers:
            await producer.send(b"x")
        with pytest.raises(ValueError, match="no"):
            await client.close()

    asyncio.run(main())
    assert [len(fake.values(f"t{number}")) for number in range(8)] == [1] * 8
