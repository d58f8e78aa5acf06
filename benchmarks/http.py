"""HTTP: `python -m benchmarks.http [--quick] [--only requests overview cost]`.

How much of what the server could answer at all does a publish reach, how many messages a second go in with batches and
come out with leases, how long does the dashboard's overview take with a thousand topics, and what do traces cost?

Cases take turns in short windows, so that whatever else the machine does hits all of them.  Rates are medians over the
windows.  On a machine that is busy with other things look at the shares per processor second of the server: the load
generator and everybody else do not count in these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.request import Request, urlopen

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

import millstream
from benchmarks.contestants import Level
from benchmarks.contestants.millstream import Millstream
from benchmarks.machine import describe_machine
from benchmarks.servers import end_on_sigterm, free_port
from benchmarks.workloads import WORKLOADS, Scale, measure_workload
from millstream.testing.broker import BrokerProcess

_RESULTS = Path(__file__).with_name("results")
_CONNECTIONS = 128
_BATCH_CONNECTIONS = 8
_BATCH = 1_000
_LEASE = 100
_WINDOW_S = 0.7
_WARM_UP_S = 0.2
_TOPICS = 1_000
_OVERVIEWS = 50
_VALUE = "x" * 100
_API = "/api/v1"
_console = Console()


# --- figures -----------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    part: str
    name: str
    value: float
    unit: str
    #: What it should be: at least, or at most.
    least: float | None = None
    most: float | None = None

    @property
    def verdict(self) -> str:
        if self.least is None and self.most is None:
            return ""
        good = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        target = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{target}: {'yes' if good else 'NO'}"


# --- requests ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What a connection asks, again and again: a request, or a function that makes the next one of the last answer."""

    next_request: bytes | Callable[[bytes], bytes]
    #: What one answer stands for.
    messages: float = 1
    connections: int = _CONNECTIONS
    #: Messages that must be waiting before each window.
    backlog: int = 0


def _request(method: str, path: str, body: object = None, content_type: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {_API}{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class _Leased(msgspec.Struct):
    receipt: str


_leased = msgspec.json.Decoder(list[_Leased])


def _lease_and_ack(most: int) -> Callable[[bytes], bytes]:
    """Leases when the last answer was to an ack, and the other way round."""
    lease = _request("POST", "/queues/work/bench/lease", {"max": most, "wait_ms": 1_000})

    def next_request(answer: bytes) -> bytes:
        if b'"deadline_ms"' in answer:
            receipts = [message.receipt for message in _leased.decode(answer)]
            return _request("POST", "/queues/ack", {"receipts": receipts})
        return lease

    return next_request


_PUBLISH = "/topics/bench/messages"
_ONE = {"value": _VALUE}
_KEYED = [{**_ONE, "key": f"k{number}"} for number in range(_BATCH)]
_LINES = (json.dumps(_ONE).encode() + b"\n") * _BATCH
_NDJSON = "application/x-ndjson"
CASES = {
    "empty request": Case(_request("GET", "/health/live")),
    "publish one, JSON": Case(_request("POST", _PUBLISH, _ONE)),
    "publish one, raw": Case(_request("POST", _PUBLISH, _VALUE.encode(), "text/plain")),
    "publish 1000, JSON": Case(_request("POST", _PUBLISH, [_ONE] * _BATCH), _BATCH, _BATCH_CONNECTIONS),
    "publish 1000 with keys": Case(_request("POST", _PUBLISH, _KEYED), _BATCH, _BATCH_CONNECTIONS),
    "publish 1000, NDJSON": Case(_request("POST", _PUBLISH, _LINES, _NDJSON), _BATCH, _BATCH_CONNECTIONS),
    # Two requests for a message, or for a hundred.
    "lease and ack one": Case(_lease_and_ack(1), 0.5, _CONNECTIONS, 20_000),
    "lease and ack 100": Case(_lease_and_ack(_LEASE), _LEASE / 2, _BATCH_CONNECTIONS, 100_000),
}


class _Asker(asyncio.Protocol):
    """Sends a request whenever the answer to the last one is there."""

    def __init__(self, case: Case, answered: list[int]) -> None:
        self._next = case.next_request
        self._answered = answered
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask(b"")

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, _, length = head.lower().partition(b"content-length: ")
        if len(body) < int(length.partition(b"\r\n")[0]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self._received[:500])
        self._received = b""
        self._answered[0] += 1
        self._ask(body)

    def _ask(self, answer: bytes) -> None:
        self._transport.write(self._next if isinstance(self._next, bytes) else self._next(answer))


class Window(NamedTuple):
    per_s: float
    per_cpu_s: float


async def _window(case: Case, port: int, pid: int) -> Window:
    loop = asyncio.get_running_loop()
    answered = [0]
    transports = []
    for _ in range(case.connections):
        transport, _ = await loop.create_connection(lambda: _Asker(case, answered), "127.0.0.1", port)
        transports.append(transport)
    await asyncio.sleep(_WARM_UP_S)
    before, wall_s, cpu_s = answered[0], time.perf_counter(), _cpu_s(pid)
    await asyncio.sleep(_WINDOW_S)
    count = answered[0] - before
    if not count:
        raise SystemExit("the server does not answer as it should; what it said is above")
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s(pid) - cpu_s
    for transport in transports:
        transport.close()
    await asyncio.sleep(0.05)
    return Window(count / wall_s, count / max(cpu_s, 0.01))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def _requests(quick: bool) -> Iterator[Figure]:
    """Rates of requests, and their share of what an empty one reaches."""
    windows: dict[str, list[Window]] = {name: [] for name in CASES}
    with _broker() as (broker, port), millstream.connect(broker.address) as client:
        client.create_topic("work")
        for name, case in list(CASES.items()) * (2 if quick else 8):
            if case.backlog:
                client.publish_many("work", [_VALUE] * case.backlog)
            windows[name].append(uvloop.run(_window(case, port, broker.pid)))
    empty = _median(windows["empty request"])
    for name, its in windows.items():
        messages, rates = CASES[name].messages, _median(its)
        batch = name.startswith("publish 1000")
        yield Figure("requests", name, rates.per_s * messages, "msg/s", least=100_000 if batch else None)
        yield Figure("requests", f"{name}: per processor second", rates.per_cpu_s * messages, "msg")
        if name.startswith("publish one"):
            # Each pair of windows by itself: what disturbs one disturbs the other.
            pairs = zip(its, windows["empty request"], strict=True)
            share = statistics.median(one.per_s / other.per_s for one, other in pairs)
            yield Figure("requests", f"{name}: share of empty requests", share, "", least=0.5)
            cheap = rates.per_cpu_s / empty.per_cpu_s
            yield Figure("requests", f"{name}: the same per processor second", cheap, "", least=0.5)


def _median(windows: list[Window]) -> Window:
    return Window(*(statistics.median(values) for values in zip(*windows, strict=True)))


# --- the overview ------------------------------------------------------------------------------------------------


def _overview(quick: bool) -> Iterator[Figure]:
    """How long the dashboard's overview takes with a thousand topics that have messages and groups."""
    with _broker() as (broker, port), millstream.connect(broker.address) as client:
        for number in range(_TOPICS):
            client.publish(f"topic-{number}", _VALUE)
        for number in range(0, _TOPICS, 10):
            _ask(port, "POST", f"/queues/topic-{number}/bench/lease", {"max": 1})
        took_ms = []
        for _ in range(_OVERVIEWS // (5 if quick else 1)):
            began_s = time.perf_counter()
            _ask(port, "GET", "/stats/overview")
            took_ms.append((time.perf_counter() - began_s) * 1000)
            time.sleep(0.02)
    yield Figure("overview", f"with {_TOPICS} topics, median", statistics.median(took_ms), "ms", most=50)
    yield Figure("overview", f"with {_TOPICS} topics, slowest of {len(took_ms)}", max(took_ms), "ms")


def _ask(port: int, method: str, path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{port}{_API}{path}", data, method=method)
    with urlopen(request, timeout=60) as answer:
        read: bytes = answer.read()
    return read


# --- what traces cost --------------------------------------------------------------------------------------------


def _cost(quick: bool) -> Iterator[Figure]:
    """Processor time of the broker per message in W3 and W3q, with traces and without; rounds take turns."""
    brokers = {"on": Millstream(), "off": Millstream(settings=("traces.enabled=false",))}
    scale = Scale(seconds=1.0, trial_share=0.5)
    for workload in [workload for workload in WORKLOADS if workload.name in ("W3", "W3q")]:
        costs: dict[str, list[float]] = {"on": [], "off": []}
        with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
            servers = {name: one.start(Path(data, name), Level.NORMAL) for name, one in brokers.items()}
            try:
                # Who goes first has the colder machine; so they take turns in that as well.
                order = cycle([("on", "off"), ("off", "on")])
                for _ in range(3 if quick else 9):
                    for name in next(order):
                        outcome = measure_workload(workload, brokers[name], servers[name], 100, scale)
                        costs[name].append(outcome.broker_cpu_ns / outcome.count)
            finally:
                for server in servers.values():
                    server.stop()
        for name, values in costs.items():
            yield Figure("cost", f"{workload.name}, traces {name}", statistics.median(values), "ns/msg")
        ratio = statistics.median(costs["on"]) / statistics.median(costs["off"])
        yield Figure("cost", f"{workload.name}: with traces, times", ratio, "x", most=1.05)


# --- all of it ---------------------------------------------------------------------------------------------------

_PARTS: dict[str, Callable[[bool], Iterator[Figure]]] = {"requests": _requests, "overview": _overview, "cost": _cost}


@contextmanager
def _broker() -> Iterator[tuple[BrokerProcess, int]]:
    """A broker and its port for HTTP."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data,
        BrokerProcess(Path(data), arguments=("--http-port", str(port))) as broker,
    ):
        yield broker, port


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of everything")
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    options = parser.parse_args()
    _RESULTS.mkdir(exist_ok=True)
    machine = describe_machine(_RESULTS)
    figures: list[Figure] = []
    for part in options.only:
        found = list(_PARTS[part](options.quick))
        table = Table(part, "", "", "target")
        for figure in found:
            value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
            table.add_row(figure.name, value, figure.unit, figure.verdict)
        _console.print(table)
        figures += found
    _console.print(f"load when started {machine['load when started']}, now {os.getloadavg()[0]:.1f}")
    results: dict[str, Any] = {"machine": machine, "figures": [figure._asdict() for figure in figures]}
    (_RESULTS / "http.json").write_text(json.dumps(results, indent=1) + "\n")
    _console.print(f"written to {_RESULTS}")


if __name__ == "__main__":
    main()
