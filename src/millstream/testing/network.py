"""A network in memory: the real protocol objects of broker and clients, without sockets, from one seed.

Each direction of a connection is a byte stream that keeps its order, as TCP does, and nothing else is promised: bytes
arrive in pieces cut anywhere, late, in bursts after a stall, or not at all because the connection was cut or its other
end died.  What was written before a cut may still arrive, wholly or in part: so a request can be carried out and its
answer lost, which is how clients come to repeat themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Final, cast

from millstream.testing.processes import Process, current_process
from millstream.testing.virtual_loop import VirtualLoop

__all__ = ["Connection", "Network", "Weather"]

_BUFFER_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network is at the moment.  The default is perfect: everything arrives at once and whole."""

    delay_s: float = 0.0
    #: The share of writes that are cut into pieces, and of pieces that are held up for `stall_s` at most.
    cuts: float = 0.0
    stalls: float = 0.0
    stall_s: float = 0.0


class Network:
    """Who listens where, and every connection that is open."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.weather = Weather()
        self.connections: dict[Connection, None] = {}
        #: When a connection of which client was over, for one of its ends.
        self.losses: list[tuple[float, str]] = []
        #: The longest delay so far.
        self.worst_s = 0.0
        self._doors: dict[str, tuple[Callable[[], Any], Process]] = {}
        self._ports = 40_000
        loop.network = self

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> Server:
        if not port:
            self._ports += 1
            port = self._ports
        address, process = f"{host}:{port}", current_process()
        if address in self._doors:
            raise OSError(98, f"{address} is in use")
        if process.alive:  # the last step of one that was killed goes on to its end, and is of no consequence
            self._doors[address] = factory, process
            process.on_death.append(lambda: self._close(address, process))
        return Server(self, host, port)

    def close_door(self, address: str) -> None:
        self._doors.pop(address, None)

    def _close(self, address: str, process: Process) -> None:
        if address in self._doors and self._doors[address][1] is process:
            del self._doors[address]

    async def connect(self, factory: Callable[[], Any], address: str) -> tuple[asyncio.Transport, Any]:
        await asyncio.sleep(self.delay_s())
        door = self._doors.get(address)
        if door is None:
            raise ConnectionRefusedError(111, f"nobody listens at {address}")
        serve, server = door
        self._ports += 1
        connection = Connection(self, current_process(), server, f"client:{self._ports}", address)
        near, far = connection.ends
        # Both ends get to know in the context of their own process, which is what they live and die in.
        far.protocol = server.context.copy().run(serve)
        near.protocol = factory()
        self.loop.call_soon(far.open, context=server.context)
        near.open()
        return near, near.protocol

    def delay_s(self) -> float:
        weather = self.weather
        if not weather.delay_s:
            return 0.0
        delay_s = self.random.expovariate(1 / weather.delay_s)
        if self.random.random() < weather.stalls:
            delay_s += self.random.uniform(0, weather.stall_s)
        self.worst_s = max(self.worst_s, delay_s)
        return delay_s

    def pieces(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or self.random.random() >= self.weather.cuts:
            return [data]
        at = self.random.randrange(1, len(data))
        return [data[:at], data[at:]]


class Server:
    """What `create_server` returns: as much of asyncio's as is used."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self._network = network
        self._name = host, port
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._network.close_door(f"{self._name[0]}:{self._name[1]}")


class Connection:
    """Two ends and what is between them."""

    def __init__(self, network: Network, client: Process, server: Process, here: str, there: str) -> None:
        self.client = client.name
        self.name = f"{client.name}-{server.name}"
        near, far = End(network, self, client, peer=there), End(network, self, server, peer=here)
        near.other, far.other = far, near
        self.ends = near, far
        self._network = network
        network.connections[self] = None
        for end in self.ends:
            end.process.on_death.append(end.die)

    def cut(self) -> None:
        """End it as a router that forgets does: a part of what is under way arrives, then each side finds out."""
        self.lost()
        for end in self.ends:
            end.lose_some()
            end.tell_lost(ConnectionResetError(104, "Connection reset by peer"), self._network.delay_s())

    def lost(self) -> None:
        self._network.losses.append((self._network.loop.time(), self.client))

    def closed(self) -> None:
        self.lost()
        if all(end.is_closed for end in self.ends):
            self._network.connections.pop(self, None)
            for end in self.ends:
                if end.die in end.process.on_death:
                    end.process.on_death.remove(end.die)


class End(asyncio.Transport):
    """One side of a connection, as its protocol sees it: a transport."""

    def __init__(self, network: Network, connection: Connection, process: Process, *, peer: str) -> None:
        super().__init__({"peername": (peer.split(":")[0], int(peer.split(":")[1]))})
        self._network = network
        self._loop = network.loop
        self._connection = connection
        self.process = process
        self.other: End = cast(End, None)
        self.protocol: Any = None
        #: No more is written; the protocol has been told that it is over.
        self._closing = False
        self.is_closed = False
        #: On its way to this end, with the timers of the arrivals; None is the end of the stream.
        self._arriving: deque[tuple[bytes | None, asyncio.TimerHandle]] = deque()
        self._last_arrival_s = 0.0
        self._broken = False
        self._reading = True
        self._held: deque[bytes | None] = deque()
        self._in_flight_bytes = 0
        self._high_bytes = _BUFFER_BYTES
        self._writing_paused = False

    def open(self) -> None:
        if not self.is_closed:
            self.protocol.connection_made(self)

    # --- what protocols call -----------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing or not self.process.alive or not data:
            return
        data = bytes(data)
        self._in_flight_bytes += len(data)
        for piece in self._network.pieces(data):
            self.other._send_here(piece)
        if self._in_flight_bytes > self._high_bytes and not self._writing_paused:
            self._writing_paused = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:  # noqa: ARG002
        self._high_bytes = _BUFFER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._in_flight_bytes

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._take_held, context=self.process.context)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """What was written still arrives, then the end of it."""
        if not self._closing and self.process.alive:
            self._closing = True
            self.other._send_here(None)
            self.tell_lost(None, 0.0)

    def abort(self) -> None:
        if not self._closing and self.process.alive:
            self._closing = True
            self.other.lose_some()
            self.other.tell_lost(ConnectionResetError(104, "Connection reset by peer"), self._network.delay_s())
            self.tell_lost(None, 0.0)

    # --- what the network does ---------------------------------------------------------------------------------------

    def _send_here(self, piece: bytes | None) -> None:
        """Bytes, or None for the end of them, are on their way to this end; they keep their order."""
        if self._broken:
            return
        now_s = self._loop.time()
        self._last_arrival_s = max(self._last_arrival_s, now_s + self._network.delay_s())
        timer = self._loop.call_at(self._last_arrival_s, self._arrive, context=self.process.context)
        self._arriving.append((piece, timer))

    def _arrive(self) -> None:
        # The first in the queue, not one that came with the timer: timers of the same moment have no order.
        piece, _ = self._arriving.popleft()
        if self._reading and not self._held:
            self._take(piece)
        else:
            self._held.append(piece)

    def _take_held(self) -> None:
        while self._held and self._reading and not self.is_closed:
            self._take(self._held.popleft())

    def _take(self, piece: bytes | None) -> None:
        if self.is_closed or self._closing:
            return
        if piece is None:
            self.close()
            return
        self.other._delivered(len(piece))
        at = 0
        while at < len(piece) and not self._closing:
            room = self.protocol.get_buffer(len(piece) - at)
            size = min(len(room), len(piece) - at)
            room[:size] = piece[at : at + size]
            self.protocol.buffer_updated(size)
            at += size

    def _delivered(self, size: int) -> None:
        self._in_flight_bytes -= size
        if self._writing_paused and self._in_flight_bytes <= self._high_bytes // 4:
            self._writing_paused = False
            if not self.is_closed:
                self._loop.call_soon(self.protocol.resume_writing, context=self.process.context)

    def lose_some(self) -> None:
        """Of what is on its way here a first part arrives and the rest never does."""
        self._broken = True
        kept = self._network.random.randrange(len(self._arriving) + 1)
        while len(self._arriving) > kept:
            _, timer = self._arriving.pop()
            timer.cancel()

    def tell_lost(self, error: Exception | None, delay_s: float) -> None:
        """Tell the protocol that it is over, after what still arrives."""
        at_s = self._loop.time() + delay_s
        if self._arriving and not self._closing:
            at_s = max(at_s, self._last_arrival_s)
        self._loop.call_at(at_s, self._lost, error, context=self.process.context)

    def _lost(self, error: Exception | None) -> None:
        if not self.is_closed:
            self._closing = self.is_closed = True
            self.protocol.connection_lost(error)
            self._connection.closed()

    def die(self) -> None:
        """The process behind this end is dead: the other side finds out some time later."""
        self._closing = self.is_closed = True
        self.other.lose_some()
        self.other.tell_lost(ConnectionResetError(104, "Connection reset by peer"), self._network.delay_s())
        self._connection.closed()
