"""What queues cost Millstream itself: `python -m benchmarks.queues [--quick] [--only overhead memory schedules]`.

Overhead: leasing and acknowledging a backlog with lanes, with order by key and with fair shares, against none of them.
Memory: what the broker holds for a backlog, and for each message in flight.  Schedules: how fast a million is taken in,
taken back and delivered.  The target beside each figure is what the project has set itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.bodies import make_bodies
from benchmarks.contestants import Level, Millstream
from benchmarks.machine import describe_machine, settle_machine
from benchmarks.servers import Server, end_on_sigterm
from benchmarks.workloads import WORKLOADS, Scale, measure_workload

_RESULTS: Final = Path(__file__).with_name("results")
_WORK_OFF: Final = next(workload for workload in WORKLOADS if workload.name == "W2q")
_KEYS: Final = 10_000
_VARIANTS: Final = {
    "plain": Millstream("interval"),
    "five lanes": Millstream("interval", lanes=True),
    "keys, not ordered by them": Millstream("interval", keys=_KEYS),
    "ordering=key": Millstream("interval", keys=_KEYS, ordering="key"),
    "fair_by a key prefix": Millstream("interval", keys=100, fair_by="key:-"),
}
_BODIES: Final = 1000  # different ones, sent again and again where nobody looks at them
_CANCEL_AT_ONCE: Final = 10_000
_INSERT_AT_ONCE: Final = 50_000
_INSERTS_LEAST: Final = 50_000  # a second


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and what it should be."""

    group: str
    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def target(self) -> str:
        if self.most is not None:
            return f"<= {self.most:,.0f}"
        return "" if self.least is None else f">= {self.least:,.0f}"

    @property
    def met(self) -> str:
        if self.most is None and self.least is None:
            return ""
        low = self.least is None or self.value >= self.least
        return "yes" if low and (self.most is None or self.value <= self.most) else "no"


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, once")
    parser.add_argument("--runs", type=int, default=3, help="runs of each overhead measurement; the median counts")
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS))
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    if (why := Millstream().missing()) is not None:
        raise SystemExit(f"Millstream cannot run: {why}")
    _RESULTS.mkdir(exist_ok=True)
    figures = []
    for name in options.only:
        for figure in _SECTIONS[name](options):
            figures.append(figure)
            console.print(f"{figure.group:>10}  {figure.name:44} {figure.value:>12,.1f} {figure.unit}  {figure.target}")
    _write(figures)
    console.print(f"written to {_RESULTS}")


# --- what lanes, order and fairness cost -----------------------------------------------------------------------------


def _overhead(options: argparse.Namespace) -> Iterator[Figure]:
    runs, seconds = (1, 0.4) if options.quick else (options.runs, 2.0)
    costs: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    rates: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for _ in range(runs):
        for name, contestant in _VARIANTS.items():
            with _broker(contestant) as server:
                outcome = measure_workload(_WORK_OFF, contestant, server, 100, Scale(seconds=seconds))
            rates[name].append(outcome.per_second)
            costs[name].append((outcome.broker_cpu_ns + (outcome.consumer_cpu_ns or 0)) / outcome.count)
    plain = statistics.median(rates["plain"])
    for name in _VARIANTS:
        rate = statistics.median(rates[name])
        yield Figure("overhead", f"{name}: lease and acknowledge", rate, "msg/s")
        yield Figure("overhead", f"{name}: processor, both sides", statistics.median(costs[name]), "ns/msg")
        if name != "plain":
            yield Figure("overhead", f"{name}: times as slow as plain", plain / rate, "x", most=3)


# --- what the broker holds -------------------------------------------------------------------------------------------


def _memory(options: argparse.Namespace) -> Iterator[Figure]:
    for count in (100_000, 1_000_000) if options.quick else (1_000_000, 10_000_000):
        with _broker(Millstream("interval")) as server, _client(server) as client:
            _warm_up(client)
            empty = server.usage().rss_bytes
            _fill(client, "backlog", count)
            with client.queue("backlog", prefetch=_BODIES) as queue:
                queue.ack(queue.lease(_BODIES, wait="5s"))
                more = (server.usage().rss_bytes - empty) / 1e6
            yield Figure("memory", f"a backlog of {count:,} messages", more, "MB more than empty", most=20)
    in_flight, first = (20_000, 10_000) if options.quick else (400_000, 100_000)
    for name, policy in {"as leased": {}, "ordering=key": {"ordering": "key"}}.items():
        with _broker(Millstream("interval")) as server, _client(server) as client:
            _warm_up(client)
            _fill(client, "flight", in_flight + _BODIES, keys=in_flight)
            with client.queue("flight", prefetch=in_flight, lease="10m", **policy) as queue:
                messages: list[Any] = []
                for count in (first, in_flight):  # the first of them come with buffers that do not grow any more
                    before = server.usage().rss_bytes
                    while len(messages) < count:
                        messages += queue.lease(min(5 * _BODIES, count - len(messages)), wait="5s")
                each = (server.usage().rss_bytes - before) / (in_flight - first)
                yield Figure("memory", f"a message in flight, {name}", each, "B", most=100)
                for at in range(0, len(messages), _BODIES):
                    queue.ack(messages[at : at + _BODIES : 2])
                each = (server.usage().rss_bytes - before) / ((in_flight - first) / 2)
                yield Figure("memory", f"a message in flight, {name}, every other one settled", each, "B", most=100)
                del messages


def _warm_up(client: Any) -> None:
    """Have the broker do everything once, so that only the messages make a difference from here on."""
    _fill(client, "warm-up", 20 * _BODIES, keys=_BODIES)
    with client.queue("warm-up", prefetch=20 * _BODIES) as queue:
        queue.ack(list(islice(queue, 20 * _BODIES)))
    client.delete_topic("warm-up")


def _fill(client: Any, topic: str, count: int, *, keys: int = 0) -> None:
    client.create_topic(topic, config={"fsync": "interval"})
    bodies = make_bodies(_BODIES, 100)
    with client.producer(topic, linger_ms=5) as producer:
        if keys:
            for body, number in islice(zip(cycle(bodies), cycle(range(keys)), strict=False), count):
                producer.send(body, key=b"key-%d" % number)
        else:
            for body in islice(cycle(bodies), count):
                producer.send(body)


# --- schedules -------------------------------------------------------------------------------------------------------


def _schedules(options: argparse.Namespace) -> Iterator[Figure]:
    from millstream import Outgoing

    count = 100_000 if options.quick else 1_000_000
    bodies = make_bodies(_BODIES, 100)
    with _broker(Millstream("interval")) as server, _client(server) as client:
        settle_machine()
        for topic in ("later", "never"):
            client.create_topic(topic, config={"fsync": "interval"})
            client.publish(topic, b"warm-up", delay="1h")
        # All due at one time, which is far enough away for all to be there by then.
        due = time.time() + 5 + count / _INSERTS_LEAST
        started = time.monotonic()
        with client.producer("later", linger_ms=5) as producer:
            for body in islice(cycle(bodies), count):
                producer.send(body, deliver_at=due)
        yield Figure("schedules", "inserted", count / (time.monotonic() - started), "a second", least=100_000)
        assert time.time() < due, "inserting took longer than expected"
        messages = iter(client.stream("later", start="earliest"))
        next(messages)
        assert time.time() >= due, "a message came early"
        seen = 1 + sum(1 for _ in islice(messages, count - 1))
        assert seen == count
        yield Figure("schedules", "fired and received", count / (time.time() - due), "a second", least=100_000)

        # Whoever wants to cancel needs receipts.
        receipts = []
        before = server.usage().rss_bytes
        started = time.monotonic()
        for _ in range(0, count, _INSERT_AT_ONCE):
            some = [Outgoing(value=body, delay="1d") for body in islice(cycle(bodies), _INSERT_AT_ONCE)]
            receipts += client.publish_many("never", some)
        yield Figure("schedules", "inserted, with receipts", count / (time.monotonic() - started), "a second")
        held = (server.usage().rss_bytes - before) / count
        yield Figure("schedules", "memory of one that is due tomorrow", held, "B", most=20)
        started = time.monotonic()
        for at in range(0, count, _CANCEL_AT_ONCE):
            answer = client.schedules.cancel_many(receipts[at : at + _CANCEL_AT_ONCE])
            assert answer.cancelled == _CANCEL_AT_ONCE, f"{len(answer.refused)} were refused"
        yield Figure("schedules", "cancelled", count / (time.monotonic() - started), "a second", least=100_000)


# --- frame -----------------------------------------------------------------------------------------------------------

_SECTIONS: Final[dict[str, Callable[[argparse.Namespace], Iterator[Figure]]]] = {
    "overhead": _overhead,
    "memory": _memory,
    "schedules": _schedules,
}


@contextmanager
def _broker(contestant: Millstream) -> Iterator[Server]:
    """A fresh one for each measurement, on a disk and not in the system's temporary directory, which may be memory."""
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        directory = Path(data) / "broker"
        directory.mkdir()
        server = contestant.start(directory, Level.NORMAL)
        try:
            yield server
        finally:
            server.stop()


def _client(server: Server) -> Any:
    import millstream

    return millstream.connect(f"127.0.0.1:{server.port}", timeout_s=120)


def _write(figures: list[Figure]) -> None:
    raw = {"machine": describe_machine(_RESULTS), "figures": [asdict(figure) for figure in figures]}
    (_RESULTS / "queues.json").write_text(json.dumps(raw, indent=1) + "\n")
    lines = ["| | | measured | | target | met |", "|---|---|---:|---|---|---|"]
    lines += [f"| {f.group} | {f.name} | {f.value:,.1f} | {f.unit} | {f.target} | {f.met} |" for f in figures]
    (_RESULTS / "queues.md").write_text("\n".join(lines) + "\n")
    _plot([figure for figure in figures if figure.unit in ("msg/s", "a second")])


def _plot(rates: list[Figure]) -> None:
    import matplotlib

    if not rates:
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rates) + 1))
    bars = axes.barh([rate.name for rate in rates], [rate.value for rate in rates], color="tab:orange")
    axes.bar_label(bars, labels=[f"{rate.value:,.0f}" for rate in rates], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title("messages a second, 100 B", fontsize=9)
    axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(_RESULTS / "queues.svg")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
