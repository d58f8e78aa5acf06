"""One MQTT client: its bytes become packets for the broker's side of it, which sends through here.

Ten thousand of them may do nothing for days, so there is as little of it as can be: no task, no timer and no buffer of
its own.  A client that does not read what it is sent is not read from in the end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import structlog

from millstream.broker.mqtt.refusals import connect_reason
from millstream.errors import InternalError, MillstreamError, ProtocolViolation
from millstream.mqtt.packets import V5, Connack, Properties
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.reasons import CONNACK_OF_V4, MqttViolation
from millstream.mqtt.writer import encode
from millstream.server.connections import peer_of
from millstream.server.mqtt.deadlines import TICK_MS

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.server.mqtt.door import MqttDoor

__all__ = ["MqttConnection"]

_log = structlog.get_logger("millstream.mqtt")

#: Unsent bytes beyond which a client is not read from.  Well above what makes it slow: a client may have to get rid of
#: what it wants to say before it reads again.
_UNSENT_MAX: Final = 1024 * 1024
#: Packets are collected up to this much; it also makes room for the rest of a turn.
_OUTBOX_BYTES: Final = 64 * 1024
#: For the last bytes to reach a client that has stopped reading, and for one that is turned away to ask what for.
_GOODBYE_TICKS: Final = 5_000 // TICK_MS
#: For a client that broke the protocol to find out.
_LINGER_TICKS: Final = 1_000 // TICK_MS


class MqttConnection(asyncio.Protocol):
    """One client; a `Line` for the broker."""

    __slots__ = (
        "_client",
        "_closing",
        "_door",
        "_goes_on",
        "_heard",
        "_outbox",
        "_outbox_bytes",
        "_outbox_packets",
        "_patience",
        "_reader",
        "_reads",
        "_refusal",
        "_transport",
        "due",
        "is_slow",
    )

    def __init__(self, door: MqttDoor) -> None:
        self._door = door
        self._reader = PacketReader(bytes_max=door.packet_bytes_max)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        #: None if it was not let in, and when it has gone.
        self._client: Client | None = None
        #: Why it was not let in, which it is told when it has said who it is.
        self._refusal: MillstreamError | None = None
        self._closing = False
        #: What is for it and has not been written yet; None for most of the time.
        self._outbox: list[bytes] | None = None
        self._outbox_bytes = 0
        self._outbox_packets = 0
        self._reads = True
        #: Whether it is about to take what was left of a read.
        self._goes_on = False
        #: It does not read fast enough what it is sent.
        self.is_slow = False
        #: In ticks: when it was last heard of, and how long it may be silent; 0 before it was let in.
        self._heard = 0
        self._patience = 0
        self.due = 0

    # --- life ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        door = self._door
        self._refusal = door.connections.admit(self)
        if self._refusal is None:
            self._client = door.broker.mqtt.client(self, self.address)
            door.deadlines.set(self, door.deadlines.now + door.connect_ticks)
        elif door.turn_away(self):
            door.deadlines.set(self, door.deadlines.now + _GOODBYE_TICKS)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._closing = True
        self._door.deadlines.clear(self)
        self._door.forget(self)
        client, self._client = self._client, None  # not a ring for the collector to find
        if client is not None:
            client.lost()

    @property
    def unsent(self) -> int:
        """Bytes that the client has not read yet."""
        return 0 if self._closing else self._transport.get_write_buffer_size() + self._outbox_bytes

    @property
    def address(self) -> str:
        return peer_of(self._transport)

    @property
    def busy(self) -> bool:
        """Until the broker's side has finished and closed it."""
        return not self._closing

    def say_goodbye(self) -> None:
        if self._client is not None and not self._closing:
            self._stop_reading()
            self._client.shutting_down()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def look(self) -> None:
        """Called when its time may be over."""
        deadlines = self._door.deadlines
        if self._closing:
            self.abort()  # it does not read its last words
        elif not self._patience:
            if self._refusal is not None or not self._reader.version:
                self.close()  # it has not said who it is
        else:
            if not self._reads:  # while we do not listen its silence says nothing
                self._heard = deadlines.now
            if self._heard + self._patience > deadlines.now:
                deadlines.set(self, self._heard + self._patience)
            else:
                if self._client is not None:
                    self._client.silent()
                self.close()

    # --- bytes in ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            return
        self._heard = self._door.deadlines.now
        self._door.broker.metrics.mqtt_bytes_received += len(data)
        self._reader.feed(data)
        if self._reads:  # otherwise it comes behind what was left of an earlier read
            self._take_packets()

    def _take_packets(self) -> None:
        """What has come, or as much of it as the broker takes now."""
        client = self._client
        try:
            if client is not None:
                client.handle(self._reader.packets())
            elif any(self._reader.packets()):
                assert self._refusal is not None
                raise self._refusal
        except Exception as problem:
            self._fail(problem)
            return
        if self._reader.has_more or not self._has_room():
            self._stop_reading()
        if not self._reads:
            self.resume()

    def _fail(self, problem: Exception) -> None:
        """Say what was wrong, if it can be said."""
        if isinstance(problem, MillstreamError):
            if self._refusal is None:  # otherwise it was said when it came
                who = self._client.who if self._client is not None else None
                self._door.connections.refusals.note(self.address, problem, None if who is None else who.client_id)
            self._door.broker.metrics.protocol_errors += isinstance(problem, ProtocolViolation)
        else:
            _log.error("packet failed", address=self.address, exc_info=problem)
            problem = InternalError("the broker failed to handle a packet; its log has the details")
        if self._client is not None and self._client.version:
            self._client.violated(problem)
        else:
            self._refuse(problem)
        self._linger()

    def _refuse(self, why: MillstreamError) -> None:
        """Answer a CONNECT that cannot be read, or whatever a client says that was not let in."""
        version, reason = self._reader.version, connect_reason(why)
        # Version 3.1.1 has no answer to what is malformed.
        if version == V5 or (version and (reason in CONNACK_OF_V4 or not isinstance(why, MqttViolation))):
            self.send(encode(Connack(reason, properties=Properties(reason_string=str(why))), version))

    def _has_room(self) -> bool:
        if self.is_slow and self.unsent > _UNSENT_MAX:
            return False
        return self._client is None or not self._client.is_full()

    def _stop_reading(self) -> None:
        if self._reads and not self._closing:
            self._reads = False
            self._transport.pause_reading()

    # --- what the broker asks for --------------------------------------------------------------------------------

    def send(self, data: bytes, packets: int = 1) -> None:
        """With everything else that there is for the client by the end of this turn of the event loop."""
        if self._closing:
            return
        if self._outbox is None:
            self._outbox = [data]
            self._door.outgoing(self)
        else:
            self._outbox.append(data)
        self._outbox_bytes += len(data)
        self._outbox_packets += packets
        if self._outbox_bytes >= _OUTBOX_BYTES:
            self.flush()

    def flush(self) -> None:
        outbox, self._outbox = self._outbox, None
        size, self._outbox_bytes = self._outbox_bytes, 0
        packets, self._outbox_packets = self._outbox_packets, 0
        if outbox and not self._closing:
            metrics = self._door.broker.metrics
            metrics.mqtt_packets_sent += packets
            metrics.mqtt_bytes_sent += size
            self._transport.write(outbox[0] if len(outbox) == 1 else b"".join(outbox))

    def close(self) -> None:
        """After what was sent."""
        if not self._closing:
            self.flush()
            self._closing = True
            self._transport.close()
            self._door.deadlines.set(self, self._door.deadlines.now + _GOODBYE_TICKS)

    def _linger(self) -> None:
        """Close after what was sent, and hear it out: to a client that goes on talking its last words would be lost."""
        if self._closing or not self._transport.can_write_eof():
            self.close()
            return
        self.flush()
        self._closing = True
        self._transport.write_eof()
        if not self._reads:
            self._transport.resume_reading()
        self._door.deadlines.set(self, self._door.deadlines.now + _LINGER_TICKS)

    def set_keep_alive(self, seconds: int) -> None:
        """End it when it is silent for one and a half times as long; 0 lets it be silent for ever."""
        deadlines = self._door.deadlines
        if seconds:
            # A tick more: it may have been heard of at the end of one.
            self._patience = -(-seconds * 1500 // TICK_MS) + 1
            deadlines.set(self, deadlines.now + self._patience)
        else:
            self._patience = 0
            deadlines.clear(self)

    def resume(self) -> None:
        """Called when the broker's side is not full any more."""
        if self._reads or self._closing or self._door.connections.draining or not self._has_room():
            return
        if not self._reader.has_more:
            self._reads = True
            self._transport.resume_reading()
        elif not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what came together with something that left no room for it."""
        self._goes_on = False
        if not self._closing and self._has_room():
            self._take_packets()

    # --- what the transport asks for -----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self.is_slow = True

    def resume_writing(self) -> None:
        self.is_slow = False
        if self._client is not None and not self._closing:
            self._client.drained()
            self.resume()
