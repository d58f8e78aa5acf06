"""A broker in memory with all its doors, in virtual time, whose sockets are held by whoever fuzzes."""

from __future__ import annotations

import asyncio
import errno
import time
import zlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final, TypeVar
from unittest import mock

import uvicorn
from uvicorn.server import ServerState

from millstream.broker.broker import Broker
from millstream.broker.committer import Commit
from millstream.broker.webhooks import names
from millstream.config import Settings
from millstream.log.memory import MemoryStorage
from millstream.server.http.protocol import LimitedWebSocket, limited
from millstream.server.http.site import build
from millstream.server.mqtt.door import MqttDoor
from millstream.server.tcp import NativeConnection, NativeListener
from millstream.testing.virtual_loop import VirtualClock, VirtualLoop
from millstream.wire.frames import FrameType, encode_frame
from tests.fuzz.target import Harm, Target, notice

__all__ = ["DoorTarget", "World"]

T = TypeVar("T")

_SETTINGS: Final = Settings.model_validate(
    {
        "storage": {"free_bytes_min": 0, "segment_bytes": 65_536},
        "topics": {"max_topics": 1000},
        "webhooks": {"allow_private": False},
    }
)
_HELLO: Final = encode_frame(FrameType.HELLO, b'{"versions":[1],"client_id":"bystander"}', correlation=1)
_ASK: Final = encode_frame(FrameType.CALL, b'{"op":"namespace.list"}', correlation=2)


class _Loop(VirtualLoop):
    """Work that blocks is done on the spot."""

    #: Of the processor.
    longest_turn_s = 0.0

    def _run_once(self) -> None:
        began_s = time.process_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_turn_s = max(self.longest_turn_s, time.process_time() - began_s)

    def run_in_executor(self, _: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise ConnectionRefusedError(errno.ECONNREFUSED, "there is nobody else in this world")


def _resolve(_host: str) -> list[str]:
    """The address of a webhook's receiver, without asking anybody."""
    return ["192.0.2.3"]


class _Rounds:
    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def submit(self, commit: Commit, done: Callable[[Commit], None]) -> None:
        for file in commit.files():
            commit.sync(file)
        self._loop.call_soon(done, commit)

    async def close(self) -> None:
        """There is nothing to close."""


class Wire(asyncio.Transport):
    """What a connection takes for its socket; a client at the other end who reads slowly, if `slow`."""

    def __init__(self, loop: _Loop, protocol: Any, *, slow: bool = False) -> None:
        """Someone has just connected."""
        super().__init__({"peername": ("192.0.2.1", 40_000), "sockname": ("192.0.2.2", 1)})
        self._loop = loop
        self._slow = slow
        self._paused = False
        self.protocol = protocol
        self.reads = True
        self.closed = False
        self.lost = False
        self.unread = 0
        self.written = bytearray()
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data
            self.unread += len(data)
            if self._slow and not self._paused and self.unread > 16_384:
                self._paused = True
                self.protocol.pause_writing()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def catch_up(self) -> None:
        self.unread = 0
        if self._paused:
            self._paused = False
            if not self.lost:
                self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread if self._slow else 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It pauses when it likes."""

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """What is written is read anyway."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.call_soon(self.lose)

    abort = close

    def lose(self) -> None:
        if not self.lost:
            self.closed = self.lost = True
            self.protocol.connection_lost(None)

    def receive(self, data: bytes) -> None:
        """Bytes from the client."""
        if isinstance(self.protocol, asyncio.BufferedProtocol):
            at = 0
            while at < len(data) and not self.closed:
                room = self.protocol.get_buffer(len(data) - at)
                size = min(len(room), len(data) - at)
                room[:size] = data[at : at + size]
                self.protocol.buffer_updated(size)
                at += size
        elif not self.lost:
            self.protocol.data_received(data)


class World:
    """One broker."""

    def __init__(self) -> None:
        self.loop = _Loop()
        self.loop.set_exception_handler(self._failed)
        asyncio.set_event_loop(self.loop)
        self._names = mock.patch.object(names, "_resolve", _resolve)
        self._names.start()
        clock = VirtualClock(self.loop)
        self.process = self.loop.process("broker", clock)
        self.broker: Broker
        self.run(self._start(clock))
        self.bystander: Wire
        self.run(self._greet())

    def _failed(self, _loop: object, context: dict[str, Any]) -> None:
        notice(context.get("exception") or context.get("message"), "the event loop")

    async def _start(self, clock: VirtualClock) -> None:
        self.broker = Broker(_SETTINGS, MemoryStorage(), clock=clock, rng=Random(0), rounds=_Rounds(self.loop))
        await self.broker.start()
        self.native = NativeListener(self.broker, _SETTINGS, clock.monotonic_ms)
        self.mqtt = MqttDoor(self.broker, _SETTINGS, "mqtt")
        self.app = build(self.broker, _SETTINGS)
        self.app._checks_origin = False  # nothing would get past it
        config = uvicorn.Config(
            self.app,
            loop="none",
            http=limited(connections_max=1000, request_s=30.0, metrics=self.broker.metrics, refusals=self.app.refusals),
            ws=LimitedWebSocket,
            ws_max_size=_SETTINGS.server.frame_bytes_max,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        config.load()
        state = ServerState()
        self.http = lambda: config.http_protocol_class(config, state, {}, self.loop)  # type: ignore[operator, call-arg]

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(self.process.start(scenario))

    async def _greet(self) -> None:
        self.bystander = Wire(self.loop, NativeConnection(self.native))
        self.bystander.receive(_HELLO)
        await asyncio.sleep(0.01)

    async def look_at_bystander(self) -> None:
        """Somebody else, who has done nothing, is still served."""
        before = len(self.bystander.written)
        self.bystander.receive(_ASK)
        await asyncio.sleep(0.01)
        if self.bystander.closed or len(self.bystander.written) == before:
            raise Harm("another connection is not served any more")
        self.bystander.written.clear()

    def end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.process.bury()
        self._names.stop()
        asyncio.set_event_loop(None)
        self.loop.close()


class DoorTarget(Target):
    """A door: each input is what one client sends; the broker stays for a while."""

    _inputs_per_world = 150

    def __init__(self) -> None:
        self._world: World | None = None
        self._inputs = 0

    def sent(self, data: bytes) -> list[bytes]:
        """What goes through the socket, in pieces: one after the other, all at once, or cut anywhere."""
        chance = zlib.crc32(data) >> 16
        if chance & 1:
            return self.split(data)
        at = chance % (len(data) + 1)
        return [data] if chance & 2 else [data[:at], data[at:]]

    def renew(self) -> None:
        if self._world is not None:
            self._world.end()
            self._world = None
        self._inputs = 0

    def use(self, data: bytes) -> None:
        if self._world is None:
            self._world = World()
        self._inputs += 1
        self._world.loop.longest_turn_s = 0.0
        self._world.run(self._visit(self._world, data))

    def kept_waiting_s(self, _: float) -> float:
        """Between two turns of the loop everybody else is served."""
        return self._world.loop.longest_turn_s if self._world is not None else 0.0

    @property
    def is_worn(self) -> bool:  # type: ignore[override]
        return self._inputs >= self._inputs_per_world

    async def _visit(self, world: World, data: bytes) -> None:
        chance = zlib.crc32(data)
        wire = Wire(world.loop, self.protocol(world), slow=not chance & 7)
        self.begin(wire)
        if chance & 15:  # others do not wait to hear whether they are let in
            await asyncio.sleep(0.01)
        for piece in self.sent(data):
            if not await self._read_from(wire, world):
                break
            wire.receive(piece)
            await asyncio.sleep(0.01)
        wire.catch_up()
        # Mostly a moment, sometimes long enough for everything that waits to give up.
        await asyncio.sleep(70 if not chance % 97 else 0.2)
        await world.look_at_bystander()
        wire.close()
        await asyncio.sleep(0.01)

    async def _read_from(self, wire: Wire, world: World) -> bool:
        """Wait until more can be sent; False if what was asked for before is a stream, behind which the rest waits."""
        until_s, written = world.loop.time() + 600, len(wire.written)
        while not wire.reads and not wire.lost:
            wire.catch_up()
            await asyncio.sleep(0.01)
            if world.loop.time() > until_s:
                if len(wire.written) > written:
                    return False
                raise Harm("the client is not read from any more")
        return True

    def begin(self, wire: Wire) -> None:
        """What the client says in any case."""

    def protocol(self, world: World) -> Any:
        """The broker's end of a new connection."""
        raise NotImplementedError
