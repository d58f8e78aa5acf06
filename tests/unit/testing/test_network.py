"""The network in memory keeps what TCP promises, and breaks everything else."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from millstream.testing.network import Network, Weather
from millstream.testing.virtual_loop import VirtualLoop, run

STORM = Weather(delay_s=0.05, cuts=0.9, stalls=0.1, stall_s=2.0)


class Peer(asyncio.BufferedProtocol):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.lost: list[Exception | None] = []
        self._room = bytearray(7)
        self.transport: Any = None
        self.paused = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._room)

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += self._room[:nbytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.paused -= 1


async def connected(loop: VirtualLoop, seed: int = 0) -> tuple[Network, Peer, Peer]:
    network, server = Network(loop, Random(seed)), Peer()
    await loop.create_server(lambda: server, "host", 1)
    _, client = await loop.create_connection(Peer, "host", 1)
    await asyncio.sleep(0.1)
    return network, client, server


@pytest.mark.parametrize("seed", range(10))
def test_bytes_arrive_in_order_whatever_the_weather(seed: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        network, client, server = await connected(loop, seed)
        network.weather = STORM
        sent = b""
        for number in range(50):
            data = b"%d," % number
            sent += data
            client.transport.write(data)
            await asyncio.sleep(network.random.random() / 100)
        client.transport.close()
        await asyncio.sleep(100)
        assert bytes(server.heard) == sent
        assert server.lost == [None]
        assert client.lost == [None]

    run(main)


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_delivers_the_first_part_of_what_was_sent_and_tells_both(seed: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        network, client, server = await connected(loop, seed)
        network.weather = STORM
        for number in range(50):
            client.transport.write(b"%d," % number)
        (connection,) = network.connections
        connection.cut()
        client.transport.write(b"after the cut")
        await asyncio.sleep(100)
        whole = b"".join(b"%d," % number for number in range(50))
        assert whole.startswith(bytes(server.heard))
        assert [type(error) for error in (*client.lost, *server.lost)] == [ConnectionResetError] * 2
        assert not network.connections

    run(main)


def test_who_does_not_read_is_not_sent_more_than_fits() -> None:
    async def main(loop: VirtualLoop) -> None:
        _, client, server = await connected(loop)
        server.transport.pause_reading()
        client.transport.write(bytes(100_000))
        assert client.paused
        await asyncio.sleep(1)
        assert not server.heard
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert len(server.heard) == 100_000
        assert not client.paused

    run(main)


def test_the_peer_of_a_dead_process_is_told() -> None:
    async def main(loop: VirtualLoop) -> None:
        network, server = Network(loop, Random(0)), Peer()
        process = loop.process("server")

        async def serve() -> None:
            await loop.create_server(lambda: server, "host", 1)

        await process.start(serve())
        _, client = await loop.create_connection(Peer, "host", 1)
        await asyncio.sleep(1)
        process.kill()
        client.transport.write(b"anybody there?")
        await asyncio.sleep(1)
        assert isinstance(client.lost[0], ConnectionResetError)
        assert not server.heard
        assert not server.lost, "the dead are not told anything"
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Peer, "host", 1)
        assert not network.connections

    run(main)


def test_who_is_killed_in_the_middle_of_a_step_listens_nowhere_after_it() -> None:
    """What was on the stack goes on to the end of its step; the next one to come must find the place free."""

    async def main(loop: VirtualLoop) -> None:
        Network(loop, Random(1))
        doomed = loop.process("doomed")

        async def listen() -> None:
            doomed.kill()
            await loop.create_server(Peer, "host", 1)

        doomed.start(listen())
        await asyncio.sleep(1)
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Peer, "host", 1)
        await loop.create_server(Peer, "host", 1)
        await loop.create_connection(Peer, "host", 1)

    run(main)
