"""What this machine can do at best: loopback, disk and memory, measured in the same run as the brokers.

A ratio to the best peer says who is faster; a ratio to what the machine can do says how much is left.  The
clients and servers here are plain Python sockets that do nothing but move bytes, so the figures are a floor for
anything that is written in Python, and not for what C could do.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.machine import settle_machine

__all__ = ["Limit", "Limits", "limits_of", "measure_limits", "median_limits"]

_CLIENTS = 16
_BODY = bytes(100)
_PIECE_BYTES = 1 << 20
_PACED_RATE = 1000
_FILE_BYTES = 1 << 30
_SYNCED_BYTES = 4096
_COPIED_BYTES = 256 << 20
_SILENT_SECONDS_MAX = 60.0

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Limits:
    """The figures of one round, or their medians."""

    loopback_bytes: float  # a second, one way, one connection
    round_trips: float  # a second, one client, wherever the scheduler puts the two processes
    round_trips_apart: float  # the same on two processors
    round_trips_shared: float  # the same on one processor
    round_trips_of_16: float  # a second, of sixteen clients together
    paced_p50_us: float  # of a round trip when there are a thousand a second
    paced_p99_us: float
    write_bytes: float  # a second, in sequence, until a final fdatasync is through
    syncs: float  # a second: 4 KiB within a file, then fdatasync
    sync_p99_us: float
    syncs_appending: float  # the same where each makes the file longer
    paced_sync_p50_us: float  # of a sync when there are a thousand a second
    paced_sync_p99_us: float
    copy_bytes: float  # a second, from memory to memory

    def rows(self) -> list[tuple[str, str]]:
        """What to print: each figure and its name."""
        return [
            ("loopback TCP, one connection, one way", f"{self.loopback_bytes / 1e9:.2f} GB/s"),
            ("round trips of 100 B, one client", f"{self.round_trips:,.0f}/s"),
            ("… client and server on two processors", f"{self.round_trips_apart:,.0f}/s"),
            ("… both on one processor", f"{self.round_trips_shared:,.0f}/s"),
            ("… sixteen clients", f"{self.round_trips_of_16:,.0f}/s"),
            ("… at 1,000 a second", f"p50 {self.paced_p50_us:,.0f} us, p99 {self.paced_p99_us:,.0f} us"),
            ("disk, written in sequence with a final fdatasync", f"{self.write_bytes / 1e6:,.0f} MB/s"),
            ("fdatasync after 4 KiB within a file", f"{self.syncs:,.0f}/s, p99 {self.sync_p99_us:,.0f} us"),
            ("… that make the file longer", f"{self.syncs_appending:,.0f}/s"),
            ("… at 1,000 a second", f"p50 {self.paced_sync_p50_us:,.0f} us, p99 {self.paced_sync_p99_us:,.0f} us"),
            ("memory to memory", f"{self.copy_bytes / 1e9:.1f} GB/s"),
        ]


@dataclass(frozen=True, slots=True)
class Limit:
    """What the rate or, in W4, the latency of a workload is compared with."""

    value: float  # messages a second, or microseconds
    column: str
    name: str
    latency: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.value:,.0f} {'us' if self.latency else 'a second'}"


def limits_of(workload: str, size: int, limits: Limits) -> list[Limit]:
    """What concerns a workload with bodies of `size`, the nearest first."""
    loopback = Limit(limits.loopback_bytes / size, "of loopback", f"bodies of {size} B through loopback TCP")
    disk = Limit(limits.write_bytes / size, "of the disk", f"bodies of {size} B written to disk")
    if workload.startswith(("W1", "W3", "W6p")):
        return [min(loopback, disk, key=lambda limit: limit.value)]
    if workload.startswith("W2"):
        return [loopback]
    if workload == "W4":
        name = "p99 of a bare round trip at the same rate"
        # What is delivered after a sync cannot be there sooner than the sync is through.
        synced = Limit(limits.paced_sync_p99_us, "p99 x sync p99", "p99 of an fdatasync at the same rate", latency=True)
        return [Limit(limits.paced_p99_us, "p99 x bare p99", name, latency=True), synced]
    if workload in ("W6", "W6c"):
        # A sync serves everyone who waits, so there may be sixteen messages to each.
        syncs = Limit(max(limits.syncs, limits.syncs_appending), "x fdatasync", "fdatasync")
        if workload == "W6c":
            return [syncs]
        return [Limit(limits.round_trips_of_16, "of round trips", "bare round trips of sixteen clients"), syncs]
    rate, where = {
        "W5": (limits.round_trips, ""),
        "W5a": (limits.round_trips_apart, " between two processors"),
        "W5s": (limits.round_trips_shared, " on one processor"),
    }[workload]
    return [Limit(rate, "of round trips", f"bare round trips{where}")]


def median_limits(measured: Sequence[Limits]) -> Limits:
    return Limits(*(statistics.median(getattr(limits, name) for limits in measured) for name in Limits.__slots__))


def measure_limits(data: Path, seconds: float = 1.0) -> Limits:
    """Measure everything once, each for about so long; files go below `data`."""
    settle_machine()
    everywhere = os.sched_getaffinity(0)
    one = {max(everywhere)}
    others = everywhere - one or one
    paced = _ask(_echo, _pace, seconds=2 * seconds)[0]
    syncs = _syncs(data, seconds, appending=False)
    appended = _syncs(data, seconds, appending=True)
    paced_syncs = _syncs(data, 2 * seconds, appending=False, rate=_PACED_RATE)
    return Limits(
        loopback_bytes=_ask(_swallow, _pour, seconds=seconds)[0][0],
        round_trips=_ask(_echo, _ping, seconds=seconds)[0][0],
        round_trips_apart=_ask(_echo, _ping, seconds=seconds, server=others, client=one)[0][0],
        round_trips_shared=_ask(_echo, _ping, seconds=seconds, server=one, client=one)[0][0],
        round_trips_of_16=sum(count for (count,) in _ask(_echo, _ping, seconds=seconds, clients=_CLIENTS)),
        paced_p50_us=_point(paced, 0.5) * 1e6,
        paced_p99_us=_point(paced, 0.99) * 1e6,
        write_bytes=_write_bytes(data, seconds),
        syncs=len(syncs) / sum(syncs),
        sync_p99_us=_point(syncs, 0.99) * 1e6,
        syncs_appending=len(appended) / sum(appended),
        paced_sync_p50_us=_point(paced_syncs, 0.5) * 1e6,
        paced_sync_p99_us=_point(paced_syncs, 0.99) * 1e6,
        copy_bytes=_copy_bytes(seconds / 2),
    )


def _point(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


# --- sockets: a server process, client processes, and their answers -------------------------------------------------

_Serve = Callable[[socket.socket, int], None]
_Drive = Callable[[socket.socket, float], list[float]]


def _ask(
    serve: _Serve,
    drive: _Drive,
    *,
    seconds: float,
    clients: int = 1,
    server: Set[int] = frozenset(),
    client: Set[int] = frozenset(),
) -> list[list[float]]:
    """Let clients talk to a server for some seconds; returns what each of them has to say."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=clients)
    pipes, started = [], []
    try:
        started.append(_processes.Process(target=_run_server, args=(serve, listener, clients, server)))
        for _ in range(clients):
            pipe, theirs = _processes.Pipe()
            place = (drive, listener.getsockname(), seconds, client, theirs)
            started.append(_processes.Process(target=_run_client, args=place))
            pipes.append(pipe)
        for process in started:
            process.start()
        for pipe in pipes:
            _receive(pipe)  # it is connected
        for pipe in pipes:
            pipe.send("go")
        return [_receive(pipe) for pipe in pipes]
    finally:
        listener.close()
        for process in started:
            process.join(5)
            process.kill()


def _receive(pipe: Connection) -> list[float]:
    if not pipe.poll(_SILENT_SECONDS_MAX):
        raise TimeoutError("a process that measures the machine fell silent")
    answer: list[float] = pipe.recv()
    return answer


def _run_server(serve: _Serve, listener: socket.socket, clients: int, processors: Set[int]) -> None:
    if processors:
        os.sched_setaffinity(0, processors)
    serve(listener, clients)


def _run_client(
    drive: _Drive, address: tuple[str, int], seconds: float, processors: Set[int], pipe: Connection
) -> None:
    if processors:
        os.sched_setaffinity(0, processors)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send([])
        pipe.recv()
        answer = drive(connection, seconds)
    pipe.send(answer)


def _accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _echo(listener: socket.socket, clients: int) -> None:
    connections = [_accept(listener) for _ in range(clients)]
    if clients == 1:
        (connection,) = connections
        while data := connection.recv(65536):
            connection.sendall(data)
        return
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while clients:
            for ready, _ in selector.select():
                if data := ready.data.recv(65536):
                    ready.data.sendall(data)
                else:
                    selector.unregister(ready.data)
                    clients -= 1


def _ping(connection: socket.socket, seconds: float) -> list[float]:
    """As many round trips as it goes; says how many a second."""
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        for _ in range(10):
            connection.sendall(_BODY)
            connection.recv(65536)
        count += 10
    return [count / took]


def _pace(connection: socket.socket, seconds: float) -> list[float]:
    """A round trip each millisecond; says how long each of them took."""
    took = []
    due = time.perf_counter()
    for _ in range(int(seconds * _PACED_RATE)):
        due += 1 / _PACED_RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        started = time.perf_counter()
        connection.sendall(_BODY)
        connection.recv(65536)
        took.append(time.perf_counter() - started)
    return took


def _swallow(listener: socket.socket, _clients: int) -> None:
    connection = _accept(listener)
    buffer = bytearray(_PIECE_BYTES)
    while connection.recv_into(buffer):
        pass
    connection.sendall(b"!")


def _pour(connection: socket.socket, seconds: float) -> list[float]:
    """As many bytes as it goes; says how many a second have arrived at the other side."""
    piece, count = bytes(_PIECE_BYTES), 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        connection.sendall(piece)
        count += len(piece)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    return [count / (time.perf_counter() - started)]


# --- disk and memory -------------------------------------------------------------------------------------------------


def _write_bytes(data: Path, seconds: float) -> float:
    piece, probe, count = os.urandom(_PIECE_BYTES), data / "write.probe", 0
    with probe.open("wb", buffering=0) as file:
        started = time.perf_counter()
        # More than a moment's worth: what fits into the page cache would otherwise hide the disk.
        while count < _FILE_BYTES * min(seconds, 1.0):
            count += file.write(piece)
        os.fdatasync(file.fileno())
        took = time.perf_counter() - started
    probe.unlink()
    return count / took


def _syncs(data: Path, seconds: float, *, appending: bool, rate: int = 0) -> list[float]:
    """How long each fdatasync took, with the write before it; so many a second, or one after the other."""
    probe, took = data / "fdatasync.probe", []
    piece = os.urandom(_SYNCED_BYTES)
    with probe.open("wb", buffering=0) as file:
        if not appending:
            file.write(bytes(64 << 20))
            os.fsync(file.fileno())
            file.seek(0)
        started = time.perf_counter()
        while (now := time.perf_counter()) - started < seconds:
            if rate and (early := started + len(took) / rate - now) > 0:
                time.sleep(early)
                now = time.perf_counter()
            file.write(piece)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - now)
    probe.unlink()
    return took


def _copy_bytes(seconds: float) -> float:
    source, target = bytearray(_COPIED_BYTES), bytearray(_COPIED_BYTES)
    view, count = memoryview(target), 0
    view[:] = source
    started = time.perf_counter()
    while (took := time.perf_counter() - started) < seconds or not count:
        view[:] = source
        count += len(source)
    return count / took
