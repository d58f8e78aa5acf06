"""What a second processor is worth: `python -m benchmarks.cores [--quick] [--runs N] [--publish]`.

Publishing and consuming, on one processor and on two, by one client and by two; and the same with two brokers side by
side that share nothing, which is the most that spreading partitions over worker processes could bring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count as counter
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from benchmarks.contestants import Level, Millstream
from benchmarks.machine import describe_machine, settle_machine
from benchmarks.measure import Consume, Publish, Worker, declare
from benchmarks.page import publish_section
from benchmarks.servers import Server, end_on_sigterm

_RESULTS: Final = Path(__file__).with_name("results")
_PAGE: Final = Path(__file__).resolve().parent.parent / "docs/scale.md"
_CHUNK: Final = 1000
_numbers = counter()


class Layout(NamedTuple):
    title: str
    processors: int
    brokers: int
    clients: int


LAYOUTS: Final = (
    Layout("one processor, one client", 1, 1, 1),
    Layout("two processors, one client", 2, 1, 1),
    Layout("two processors, two clients", 2, 1, 2),
    Layout("two processors, two clients, two brokers", 2, 2, 2),
)


class Measured(NamedTuple):
    per_second: float
    client_ns: float
    broker_ns: float
    #: How much of a processor a broker has used, of those there were.
    busy: float


@dataclass(frozen=True, slots=True)
class _World:
    contestant: Millstream
    servers: list[Server]
    layout: Layout
    processors: Set[int]

    def places(self) -> list[tuple[int, str]]:
        """A topic for each client: the port of its broker, and its name."""
        found = []
        for number in range(self.layout.clients):
            port = self.servers[number % len(self.servers)].port
            topic = f"cores-{next(_numbers)}"
            declare(self.contestant, port, topic)
            found.append((port, topic))
        return found

    def publish(self, places: list[tuple[int, str]], count: int, size: int) -> Measured:
        with ExitStack() as stack:
            workers = [stack.enter_context(self._worker(*place, Publish(count, size, _CHUNK))) for place in places]
            for worker in workers:
                worker.wait_until_ready()
            return self._measure(workers, told=True)

    def consume(self, places: list[tuple[int, str]], count: int) -> Measured:
        with ExitStack() as stack:
            jobs = [Consume(count, _CHUNK, _CHUNK) for _ in places]
            workers = [stack.enter_context(self._worker(*place, job)) for place, job in zip(places, jobs, strict=True)]
            return self._measure(workers, told=False)

    def _worker(self, port: int, topic: str, job: Publish | Consume) -> Worker:
        return Worker(self.contestant, port, topic, job, processors=self.processors)

    def _measure(self, workers: list[Worker], *, told: bool) -> Measured:
        before = sum(server.usage().cpu_ns for server in self.servers)
        for worker in workers:
            worker.go() if told else worker.wait_until_ready()
        reports = [worker.report() for worker in workers]
        broker_ns = sum(server.usage().cpu_ns for server in self.servers) - before
        done = sum(report.count for report in reports)
        took_ns = max(report.ended_ns for report in reports) - min(report.started_ns for report in reports)
        client_ns = sum(report.cpu_ns for report in reports)
        return Measured(done * 1e9 / took_ns, client_ns / done, broker_ns / done, broker_ns / took_ns)


def measure(layout: Layout, size: int, messages: int) -> dict[str, Measured]:
    """Publish and consume with a layout."""
    settle_machine()
    everywhere = os.sched_getaffinity(0)
    processors = set(sorted(everywhere)[: layout.processors])
    contestant = Millstream()
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data, ExitStack() as stack:
        servers = []
        for number in range(layout.brokers):
            directory = Path(data) / f"broker-{number}"
            directory.mkdir()
            server = contestant.start(directory, Level.NORMAL)
            stack.callback(server.stop)
            server.place(processors)
            servers.append(server)
        world = _World(contestant, servers, layout, processors)
        each = messages // layout.clients // _CHUNK * _CHUNK
        world.publish(world.places(), each // 10 // _CHUNK * _CHUNK, size)  # until everything is warm
        places = world.places()
        return {
            "publish": world.publish(places, each, size),
            "consume": world.consume(places, each - _CHUNK),
        }


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--publish", action="store_true", help="also copy the table into docs/scale.md")
    options = parser.parse_args()
    runs, share = (1, 0.1) if options.quick else (options.runs, 1.0)
    console = Console(width=160)
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this compares two processors with one, and there is only one")
    _RESULTS.mkdir(exist_ok=True)
    found: dict[tuple[int, str, str], list[Measured]] = {}
    for number in range(runs):
        for size, messages in ((100, 3_000_000), (1000, 800_000)):
            for layout in LAYOUTS:
                for work, measured in measure(layout, size, int(messages * share)).items():
                    found.setdefault((size, work, layout.title), []).append(measured)
                    console.print(f"{number + 1}: {work} {size} B, {layout.title}: {measured.per_second:,.0f} msg/s")
    table = _table(found, runs)
    raw = {"machine": describe_machine(_RESULTS), "found": [[*key, rows] for key, rows in found.items()]}
    (_RESULTS / "cores.json").write_text(json.dumps(raw, indent=1) + "\n")
    (_RESULTS / "cores.md").write_text(table)
    console.print(table)
    if options.publish:
        publish_section(_PAGE, "cores", table)


def _table(found: dict[tuple[int, str, str], list[Measured]], runs: int) -> str:
    lines = [
        f"Median of {runs}; fsync before confirm. *Busy*: how many processors' worth the brokers have used.",
        "",
        "| | msg/s | x one processor | client ns/msg | broker ns/msg | brokers busy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    medians = {
        key: Measured(*(statistics.median(column) for column in zip(*rows, strict=True))) for key, rows in found.items()
    }
    for (size, work, title), middle in sorted(medians.items(), key=lambda item: (item[0][1] != "publish", item[0][0])):
        alone = medians[size, work, LAYOUTS[0].title].per_second
        lines.append(
            f"| {work} {size} B, {title} | {middle.per_second:,.0f} | {middle.per_second / alone:.2f} "
            f"| {middle.client_ns:,.0f} | {middle.broker_ns:,.0f} | {middle.busy:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
