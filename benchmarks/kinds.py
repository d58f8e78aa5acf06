"""What it costs that messages have more than a value: `python -m benchmarks.kinds [--quick] [--runs N] [--publish]`.

The other benchmarks send bytes, some of them with a key.  Programs send text, JSON, headers, priorities and times as
well, some messages with and some without, and read them as streams and as queues.  Each kind is published, read and
leased through one broker; what counts is processor time for a message, beside that of plain bytes in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

import millstream
from benchmarks.bodies import make_bodies
from benchmarks.contestants import Level, Millstream
from benchmarks.machine import describe_machine, settle_machine
from benchmarks.page import publish_section
from benchmarks.servers import Server, end_on_sigterm

_RESULTS: Final = Path(__file__).with_name("results")
_PAGE: Final = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"
_BYTES: Final = 100
_CHUNK: Final = 1000
_HEADERS: Final = {"content-type": "text/plain", "tenant": "north"}

#: What `send` is told of message number `at` with this body.
KINDS: Final[dict[str, Callable[[int, bytes], dict[str, Any]]]] = {
    "bytes": lambda _, body: {"value": body},
    "bytes, key": lambda at, body: {"value": body, "key": b"key-%d" % (at % 1000)},
    "text, key as text": lambda at, body: {"value": body.hex()[:_BYTES], "key": f"key-{at % 1000}"},
    "JSON": lambda at, body: {"json": {"number": at, "body": body.hex()[:70]}},
    "two headers": lambda _, body: {"value": body, "headers": _HEADERS},
    "a priority": lambda at, body: {"value": body, "priority": at % 5},
    "a time of its own": lambda at, body: {"value": body, "timestamp": 1_700_000_000 + at},
    "a time to live": lambda _, body: {"value": body, "ttl": 86_400},
    "a key, every second one": lambda at, body: {"value": body, "key": b"key-%d" % (at % 1000) if at % 2 else None},
    "a deletion marker, every second one": lambda at, body: {"value": body if at % 2 else None, "key": b"key"},
    "all of it": lambda at, body: {
        "value": body,
        "key": b"key-%d" % (at % 1000),
        "headers": _HEADERS,
        "priority": at % 5,
        "timestamp": 1_700_000_000 + at,
        "ttl": 86_400,
    },
}
#: What is measured, each with what the broker spends on it.
STEPS: Final = ("producer", "broker", "stream", "broker", "queue", "broker")


class Spent(NamedTuple):
    client_ns: float
    broker_ns: float


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kinds", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages, once")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--publish", action="store_true", help="also copy the table into docs/benchmarks.md")
    options = parser.parse_args()
    runs, count = (1, 20_000) if options.quick else (options.runs, 200_000)
    console = Console()
    if (why := Millstream().missing()) is not None:
        raise SystemExit(f"Millstream cannot run: {why}")
    _RESULTS.mkdir(exist_ok=True)
    measured: dict[str, list[list[Spent]]] = {kind: [] for kind in KINDS}
    settle_machine()
    with _broker() as server, millstream.connect(f"127.0.0.1:{server.port}") as client:
        _measure(client, server, "bytes", "warm-up", count)
        for number in range(runs):
            for kind in KINDS:
                spent = _measure(client, server, kind, f"kinds-{number}", count)
                measured[kind].append(spent)
                console.print(f"{kind:36}" + "".join(f"{one.client_ns:9,.0f} + {one.broker_ns:5,.0f}" for one in spent))
    _write(measured, count)
    console.print(f"written to {_RESULTS}")
    if options.publish:
        publish_section(_PAGE, "kinds", (_RESULTS / "kinds.md").read_text())


@contextmanager
def _broker() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        directory = Path(data) / "broker"
        directory.mkdir()
        server = Millstream().start(directory, Level.NORMAL)
        try:
            yield server
        finally:
            server.stop()


def _measure(client: Any, server: Server, kind: str, topic: str, count: int) -> list[Spent]:
    """Published, read as a stream, leased and acknowledged one by one; in a topic that is there for it alone."""
    messages = list(map(KINDS[kind], range(count), make_bodies(count, _BYTES)))
    client.create_topic(topic)
    gc.collect()
    gc.freeze()  # what was prepared here is not for the collector to go through again and again
    try:
        return [
            _spent(server, count, lambda: _publish(client, topic, messages)),
            _spent(server, count, lambda: _read(client, topic, count)),
            _spent(server, count, lambda: _work(client, topic, count)),
        ]
    finally:
        gc.unfreeze()
        client.delete_topic(topic)


def _spent(server: Server, count: int, work: Callable[[], None]) -> Spent:
    broker_ns, client_ns = server.usage().cpu_ns, time.process_time_ns()
    work()
    client_ns = time.process_time_ns() - client_ns
    return Spent(client_ns / count, (server.usage().cpu_ns - broker_ns) / count)


def _publish(client: Any, topic: str, messages: list[dict[str, Any]]) -> None:
    with client.producer(topic) as producer:
        send = producer.send
        for message in messages:
            send(**message)


def _read(client: Any, topic: str, count: int) -> None:
    with client.stream(topic, group="readers", start="earliest") as stream:
        messages = iter(stream)
        for _ in range(count // _CHUNK):
            for message in islice(messages, _CHUNK):
                _ = message.value


def _work(client: Any, topic: str, count: int) -> None:
    with client.queue(topic, group="workers", prefetch=20_000) as queue:
        for message in islice(queue, count):
            message.ack()


def _write(measured: dict[str, list[list[Spent]]], count: int) -> None:
    medians = {
        kind: [statistics.median(values) for values in zip(*map(_flat, runs), strict=True)]
        for kind, runs in measured.items()
    }
    raw = {"machine": describe_machine(_RESULTS), "count": count, "bytes": _BYTES, "ns": medians}
    (_RESULTS / "kinds.json").write_text(json.dumps(raw, indent=1) + "\n")
    plain = medians["bytes"]
    lines = [
        f"| ns a message of {_BYTES} B | " + " | ".join(STEPS) + " | all | x bytes |",
        "|---" + "|---:" * (len(STEPS) + 2) + "|",
    ]
    for kind, values in medians.items():
        cells = " | ".join(f"{value:,.0f}" for value in values)
        lines.append(f"| {kind} | {cells} | {sum(values):,.0f} | {sum(values) / sum(plain):.1f} |")
    (_RESULTS / "kinds.md").write_text("\n".join(lines) + "\n")


def _flat(spent: list[Spent]) -> list[float]:
    return [value for one in spent for value in one]


if __name__ == "__main__":
    main()
