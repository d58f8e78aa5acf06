"""Connections that are cut at every single point of a conversation: what was promised is kept, and nobody hangs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from millstream import aio
from millstream.errors import ConnectionLost
from millstream.testing import VirtualBroker, virtual_broker
from millstream.testing.network import End
from millstream.testing.virtual_loop import VirtualLoop, run

POINTS = 40


def cut_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Cut a connection right behind the piece of data with this number, before anybody can act on that."""
    honest, taken = End._take, 0

    def take(self: End, piece: bytes | None) -> None:
        nonlocal taken
        honest(self, piece)
        taken += 1
        if taken == number:
            self._connection.cut()
            self._lost(ConnectionResetError(104, "Connection reset by peer"))

    monkeypatch.setattr(End, "_take", take)


async def connected(broker: VirtualBroker) -> aio.Client:
    """Opening something is the one moment at which a lost connection is the user's to deal with."""
    try:
        return await broker.connect()
    except ConnectionLost:
        return await broker.connect()


async def consume(broker: VirtualBroker) -> None:
    client = await connected(broker)
    await client.publish("orders", b"1")
    try:
        queue = await client.queue("orders", lease="1s")
    except ConnectionLost:
        queue = await client.queue("orders", lease="1s")
    message = await queue.next(timeout_s=60)
    assert message is not None, "the consumer hangs"
    message.ack()
    await queue.close()


async def publish(broker: VirtualBroker) -> None:
    client = await connected(broker)
    for number in range(3):
        await client.publish("orders", b"%d" % number)
    values = [message.value async for message in client.stream("orders", start="earliest", timeout_s=20)]
    assert values == [b"0", b"1", b"2"], "each is stored once, in order"


async def read_in_a_group(broker: VirtualBroker) -> None:
    client = await connected(broker)
    await client.publish("orders", b"1")
    async with client.stream("orders", group="readers", start="earliest") as stream:
        message = await stream.next(timeout_s=60)
        assert message is not None, "the reader hangs"


@pytest.mark.parametrize("scenario", [consume, publish, read_in_a_group])
def test_a_cut_at_any_point_is_survived(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[VirtualBroker], Awaitable[None]]
) -> None:
    async def main(_: VirtualLoop) -> None:
        async with virtual_broker() as broker:
            await scenario(broker)

    for number in range(1, POINTS):
        with monkeypatch.context() as patch:
            cut_after(patch, number)
            try:
                run(main)
            except Exception as error:
                raise AssertionError(f"cut behind piece {number}: {error!r}") from error
