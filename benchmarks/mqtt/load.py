"""A client of bytes: packets prepared beforehand, one epoll for all connections, nothing that a broker would wait for.

Every contestant is driven by the same code.  It speaks MQTT 3.1.1, which all of them do.  All PUBLISH packets of a run
have the same length, so counting bytes is counting messages.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, NamedTuple

from benchmarks.mqtt.lines import CONNACK, RESET, SILENT_S_MAX, BrokerFailed, Line, connect, publish, text

__all__ = ["FanOut", "Publishers", "Storm", "Tally", "Work", "measure"]

_RECEIVE_BYTES: Final = 256 * 1024
_ACK_BYTES: Final = 4
_DISCONNECT: Final = bytes((0xE0, 0))
_WARM_UP_S: Final = 0.3
#: For so long a broker does next to nothing when it has done everything.
_REST_S: Final = 0.1
#: Of QoS 0, before one of QoS 1 whose answer says that all of them were taken.
_BLOCK: Final = 500


# --- what is measured --------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """What was done in one window."""

    per_second: float
    #: For each message: of the broker, until it has nothing left to do, and of this process.
    broker_cpu_us: float
    own_cpu_us: float
    #: How much of a processor this process has used: near 1 the broker may have waited for it.
    own_share: float


class Work:
    """Something that goes on until it is told to stop; `count` is how much of it was done."""

    count = 0

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.stopping = False
        self.stack = ExitStack()
        self.stack.callback(self.poll.close)

    def watch(self, file: socket.socket, handler: Callable[[int], None]) -> None:
        file.setblocking(False)
        self.handlers[file.fileno()] = handler
        self.poll.register(file.fileno(), select.EPOLLIN)

    def begin(self) -> None:
        """Send the first."""

    @property
    def is_done(self) -> bool:
        """Everything that was asked for has been answered."""
        raise NotImplementedError

    def run(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        handlers, poll = self.handlers, self.poll.poll
        while (now := time.perf_counter()) < until:
            for number, event in poll(until - now):
                handlers[number](event)

    def finish(self) -> None:
        """Start nothing new and wait for all that was started: what does not come was lost."""
        self.stopping = True
        before, silent_until = -1, 0.0
        while not self.is_done:
            if self.count != before:
                before, silent_until = self.count, time.perf_counter() + SILENT_S_MAX
            elif time.perf_counter() > silent_until:
                raise BrokerFailed("messages were lost, or came twice")
            self.run(0.02)

    def close(self) -> None:
        self.stack.close()


def measure(work: Work, seconds: float, cpu_ns: Callable[[], int]) -> Tally:
    """Let it run until everything is warm, then for `seconds`; `cpu_ns` is what the broker has used so far."""
    try:
        broker_ns, own_ns = cpu_ns(), time.process_time_ns()
        work.begin()
        work.run(min(_WARM_UP_S, seconds))
        before, began_s, share_ns = work.count, time.perf_counter(), time.process_time_ns()
        work.run(seconds)
        wall_s, share_ns = time.perf_counter() - began_s, time.process_time_ns() - share_ns
        rate = (work.count - before) / wall_s
        work.finish()
        own_ns = time.process_time_ns() - own_ns
        broker_ns = _rest(cpu_ns) - broker_ns
    finally:
        work.close()
    if not rate:
        raise BrokerFailed("nothing was answered")
    return Tally(rate, broker_ns / work.count / 1000, own_ns / work.count / 1000, share_ns / wall_s / 1e9)


def _rest(cpu_ns: Callable[[], int]) -> int:
    """Wait until a broker has done what it has confirmed already; what it has used by then."""
    used_ns = cpu_ns()
    until_s = time.perf_counter() + SILENT_S_MAX
    while time.perf_counter() < until_s:
        time.sleep(_REST_S)
        before_ns, used_ns = used_ns, cpu_ns()
        if used_ns - before_ns < _REST_S * 1e9 / 5:
            break
    return used_ns


class _Sender:
    """Sends whole units of prepared bytes, as many as it has leave for."""

    def __init__(self, line: Line, units: list[bytes], poll: select.epoll) -> None:
        self._socket = line.socket
        self._poll = poll
        self._size = len(units[0])
        self._cycle = len(units)
        # Twice, so that there is no seam.
        self._bytes = memoryview(b"".join(units) * 2)
        self._next = 0
        self._unsent = memoryview(b"")

    def send(self, count: int) -> None:
        while count > 0:
            some = min(count, self._cycle)
            start = self._next * self._size
            data = self._bytes[start : start + some * self._size]
            self._next = (self._next + some) % self._cycle
            count -= some
            if self._unsent:
                self._unsent = memoryview(bytes(self._unsent) + bytes(data))
            else:
                self._send(data)

    def go_on(self) -> None:
        self._send(self._unsent)
        if not self._unsent:
            self._poll.modify(self._socket.fileno(), select.EPOLLIN)

    def _send(self, data: memoryview) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        waited, self._unsent = bool(self._unsent), data[sent:]
        if self._unsent and not waited:
            self._poll.modify(self._socket.fileno(), select.EPOLLIN | select.EPOLLOUT)


class Publishers(Work):
    """Publish as fast as a window of unconfirmed messages allows.

    With QoS 0 blocks of messages end in one of QoS 1, so that there is an answer to wait for.
    """

    def __init__(self, port: int, topic: str, *, qos: int, clients: int = 1, window: int = 100) -> None:
        super().__init__()
        self._per_unit = 1 if qos else _BLOCK
        block = b"" if qos else publish(topic, 0) * (_BLOCK - 1)
        self._window = window if qos else 8
        ids = 10 * window if qos else self._window
        units = [block + publish(topic, 1, number) for number in range(1, ids + 1)]
        self._sent = self._answered = 0
        self._senders = [self._open(Line(port), units) for _ in range(clients)]
        self._rest = dict.fromkeys(self.handlers, 0)

    def _open(self, line: Line, units: list[bytes]) -> _Sender:
        self.stack.callback(line.close)
        sender = _Sender(line, units, self.poll)
        number, receive, buffer = line.socket.fileno(), line.socket.recv_into, bytearray(_RECEIVE_BYTES)

        def handle(event: int) -> None:
            if event & select.EPOLLOUT:
                sender.go_on()
            if event & ~select.EPOLLOUT:
                size = receive(buffer)
                if not size:
                    raise BrokerFailed("the broker has closed a connection")
                answered, self._rest[number] = divmod(self._rest[number] + size, _ACK_BYTES)
                self._answered += answered
                self.count += answered * self._per_unit
                if not self.stopping:
                    self._sent += answered
                    sender.send(answered)

        self.watch(line.socket, handle)
        return sender

    def begin(self) -> None:
        for sender in self._senders:
            self._sent += self._window
            sender.send(self._window)

    @property
    def is_done(self) -> bool:
        return self._answered == self._sent


class FanOut(Work):
    """One publishes, others receive; `window` messages are on their way at a time."""

    def __init__(self, port: int, topic: str, *, qos: int, subscribers: int, window: int) -> None:
        super().__init__()
        self._subscribers = subscribers
        self._window = window
        self._sent = 0
        ids = range(1, 10 * window + 1)
        units = [publish(topic, qos, number) for number in ids]
        for _ in range(subscribers):
            line = Line(port)
            self.stack.callback(line.close)
            line.subscribe(topic, qos)
            self.watch(line.socket, self._subscriber(line, qos, len(units[0]), len(text(topic)) + 2))
        line = Line(port)
        self.stack.callback(line.close)
        self._sender = _Sender(line, units, self.poll)
        self._acks = bytearray(_RECEIVE_BYTES)
        self.watch(line.socket, lambda event: self._published(line, event))

    def _published(self, line: Line, event: int) -> None:
        if event & select.EPOLLOUT:
            self._sender.go_on()
        if event & ~select.EPOLLOUT and not line.socket.recv_into(self._acks):
            raise BrokerFailed("the broker has closed a connection")

    def _subscriber(self, line: Line, qos: int, size: int, id_at: int) -> Callable[[int], None]:
        receive, send = line.socket.recv, line.socket.send
        rest = b""
        length = 0

        def at_most_once(_event: int) -> None:
            nonlocal length
            got = len(receive(_RECEIVE_BYTES))
            if not got:
                raise BrokerFailed("the broker has closed a connection")
            arrived, length = divmod(length + got, size)
            self.count += arrived
            self._go_on()

        def at_least_once(_event: int) -> None:
            nonlocal rest
            data = receive(_RECEIVE_BYTES)
            if not data:
                raise BrokerFailed("the broker has closed a connection")
            data = rest + data
            arrived = len(data) // size
            rest = data[arrived * size :]
            send(b"".join([b"\x40\x02" + data[at : at + 2] for at in range(id_at, arrived * size, size)]))
            self.count += arrived
            self._go_on()

        return at_least_once if qos else at_most_once

    def _go_on(self) -> None:
        free = self._window - self._sent + self.count // self._subscribers
        if free > 0 and not self.stopping:
            self._sent += free
            self._sender.send(free)

    def begin(self) -> None:
        self._go_on()

    @property
    def is_done(self) -> bool:
        return self.count == self._sent * self._subscribers


class Storm(Work):
    """Connect, be let in, say goodbye, again and again; `at_once` at a time."""

    def __init__(self, port: int, *, at_once: int = 100) -> None:
        super().__init__()
        self._address = ("127.0.0.1", port)
        self._at_once = at_once
        self._open: dict[int, socket.socket] = {}

    def begin(self) -> None:
        for _ in range(self._at_once):
            self._begin()

    def _begin(self) -> None:
        line = socket.socket()
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        line.connect_ex(self._address)
        number = line.fileno()
        self._open[number] = line
        hello = connect()

        def handle(event: int) -> None:
            if event == select.EPOLLOUT:
                line.send(hello)
                self.poll.modify(number, select.EPOLLIN)
                return
            if line.recv(16) != CONNACK:
                raise BrokerFailed("the broker does not let a client in")
            line.send(_DISCONNECT)
            del self._open[number]
            line.close()
            self.count += 1
            if not self.stopping:
                self._begin()

        self.handlers[number] = handle
        self.poll.register(number, select.EPOLLOUT)

    @property
    def is_done(self) -> bool:
        return not self._open

    def close(self) -> None:
        for line in self._open.values():
            line.close()
        super().close()
