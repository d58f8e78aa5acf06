"""MQTT against Mosquitto and amqtt: `python -m benchmarks.mqtt [--quick] [--runs N] [--only CASE ...] [--publish]`.

How fast messages go in (QoS 0 and 1) and come out (1 to 1, 10 and 1,000 subscribers), how fast clients connect, and
what a connection that does nothing costs.  All brokers run all the time and take turns in short windows, so that
whatever else the machine does hits all of them.  The load comes from one process, the same for all (`load.py`).  On a
busy machine look at the broker's processor time per message: it depends least on what the others do.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.machine import describe_machine
from benchmarks.mqtt.brokers import BROKERS, CONTESTANTS, STORED, Broker, Contestant, install_amqtt
from benchmarks.mqtt.lines import BrokerFailed, idle
from benchmarks.mqtt.load import FanOut, Publishers, Storm, Work, measure
from benchmarks.mqtt.report import Case, Measured, Results, Target, print_tables, publish_results, write_results
from benchmarks.servers import Server, StartFailed, end_on_sigterm

_RESULTS: Final = Path(__file__).resolve().parent.parent / "results"
_PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs/benchmarks.md"
_WINDOW: Final = 100
_IDLE: Final = 10_000
_IDLE_AT_LEAST: Final = 5_000
#: Beside those of clients.
_OTHER_FILES: Final = 500
_PER_MOSQUITTO: Final = Target("Mosquitto", 0.3)
_PER_AMQTT: Final = Target("amqtt", 5.0)


@dataclass(frozen=True, slots=True)
class _Load:
    """A case, and the load that it is."""

    case: Case
    make: Callable[[int, str], Work]


_LOADS: Final = (
    _Load(Case("qos0", "Publish with QoS 0"), lambda port, topic: Publishers(port, topic, qos=0)),
    _Load(
        Case("qos1", "Publish with QoS 1, one client", targets=(_PER_MOSQUITTO, _PER_AMQTT)),
        lambda port, topic: Publishers(port, topic, qos=1, window=_WINDOW),
    ),
    _Load(
        Case("qos1x10", "Publish with QoS 1, ten clients", targets=(_PER_MOSQUITTO, _PER_AMQTT)),
        lambda port, topic: Publishers(port, topic, qos=1, window=_WINDOW, clients=10),
    ),
    _Load(
        Case("1to1-qos0", "One to one, QoS 0"),
        lambda port, topic: FanOut(port, topic, qos=0, subscribers=1, window=1000),
    ),
    _Load(
        Case("1to1-qos1", "One to one, QoS 1"),
        lambda port, topic: FanOut(port, topic, qos=1, subscribers=1, window=_WINDOW),
    ),
    _Load(
        Case("1to10", "One to ten, QoS 0", unit="deliveries"),
        lambda port, topic: FanOut(port, topic, qos=0, subscribers=10, window=100),
    ),
    _Load(
        Case("1to1000", "One to 1,000, QoS 0", unit="deliveries", targets=(_PER_MOSQUITTO,)),
        lambda port, topic: FanOut(port, topic, qos=0, subscribers=1000, window=10),
    ),
    _Load(
        Case("1to1000-single", "One to 1,000, QoS 0, one message at a time", unit="deliveries"),
        lambda port, topic: FanOut(port, topic, qos=0, subscribers=1000, window=1),
    ),
    _Load(Case("storm", "Connect and disconnect", unit="connections", by_topic=False), lambda port, _: Storm(port)),
)
_IDLES: Final = {
    Case("idle", "Memory of an idle connection", unit="KB", by_topic=False, most=10.0): False,
    Case("idle-subscribed", "The same with a subscription of its own", unit="KB", by_topic=False): True,
}
_CASES: Final = (*(load.case for load in _LOADS), *_IDLES)


def main() -> None:
    end_on_sigterm()
    options = _parse_options()
    if options.install_peers:
        install_amqtt()
        return
    console = Console() if sys.stdout.isatty() else Console(width=200)
    missing = {broker.name: why for broker in BROKERS if (why := broker.missing()) is not None}
    for name, how in missing.items():
        console.print(f"skipping {name}: {how}")
    brokers = [broker for broker in BROKERS if broker.name not in missing]
    contestants = [contestant for contestant in CONTESTANTS if contestant.broker in brokers]
    clients = _raise_limit()
    _RESULTS.mkdir(exist_ok=True)
    results = Results(
        machine=describe_machine(_RESULTS),
        runs=options.runs,
        idle_connections=clients,
        cases=[case for case in _CASES if case.name in options.only],
        versions={broker.name: broker.version() for broker in brokers},
        promises={contestant.name: contestant.promise for contestant in contestants},
    )
    with _progress(console) as progress:
        _measure_loads(results, contestants, options.seconds, progress)
        _measure_idle(results, brokers, clients, progress)
    print_tables(results, console)
    write_results(results, _RESULTS)
    console.print(f"written to {_RESULTS}")
    if options.publish:
        publish_results(_RESULTS, _PAGE)


def _raise_limit() -> int:
    """So many connections this process may have, and each broker as well: they inherit the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # only root may have more than it was given
        most = max(most, 2 * _IDLE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < _IDLE_AT_LEAST + _OTHER_FILES:
        raise SystemExit(f"{most} open files are too few; `ulimit -n {_IDLE + _OTHER_FILES}` and start again")
    return _IDLE if most >= _IDLE + _OTHER_FILES else _IDLE_AT_LEAST


# --- rates -------------------------------------------------------------------------------------------------------


def _measure_loads(results: Results, contestants: Sequence[Contestant], seconds: float, progress: Progress) -> None:
    loads = [load for load in _LOADS if load.case in results.cases]
    if not loads:
        return
    task = progress.add_task("rates", total=results.runs * len(loads) * len(contestants))
    for _ in range(results.runs):
        # Anew in each round: not everybody forgets clients that are gone.
        with contextlib.ExitStack() as stack:
            brokers = dict.fromkeys(contestant.broker for contestant in contestants)
            servers = {broker: stack.enter_context(_running(broker)) for broker in brokers}
            for load in loads:
                for contestant in contestants:
                    name = contestant.name if load.case.by_topic else contestant.broker.name
                    progress.update(task, description=f"{load.case.name}, {name}", refresh=True)
                    if load.case.by_topic or contestant.topic == STORED or contestant.broker.name != "Millstream":
                        _measure_load(results, load, contestant, name, servers[contestant.broker], seconds)
                    progress.update(task, advance=1, refresh=True)


def _measure_load(
    results: Results, load: _Load, contestant: Contestant, name: str, server: Server, seconds: float
) -> None:
    try:
        work = load.make(server.port, contestant.topic)
        tally = measure(work, seconds, lambda: server.usage().cpu_ns)
    except (BrokerFailed, OSError) as error:
        results.problems[load.case.name, name] = str(error)
    else:
        found = Measured(tally.per_second, tally.broker_cpu_us, tally.own_cpu_us, tally.own_share)
        results.add(load.case, name, found)


@contextlib.contextmanager
def _running(broker: Broker) -> Iterator[Server]:
    """On a disk, and not in the system's temporary directory, which may be memory."""
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        server = broker.start(Path(data))
        try:
            yield server
        finally:
            server.stop()


# --- memory ------------------------------------------------------------------------------------------------------


def _measure_idle(results: Results, brokers: Sequence[Broker], clients: int, progress: Progress) -> None:
    cases = [case for case in _IDLES if case in results.cases]
    task = progress.add_task("memory", total=results.runs * len(cases) * len(brokers), visible=bool(cases))
    for _ in range(results.runs):
        for case in cases:
            for broker in brokers:
                progress.update(task, description=f"{case.name}, {broker.name}", refresh=True)
                # A process of its own each time: what one has given back another would not have to ask for.
                with _running(broker) as server:
                    some = min(clients, broker.clients_max)
                    open_clients = partial(idle, server.port, subscribed=_IDLES[case])
                    try:
                        with open_clients(100):
                            pass
                        time.sleep(0.5)
                        before = server.usage().rss_bytes
                        with open_clients(some):
                            time.sleep(1.0)
                            each = (server.usage().rss_bytes - before) / some
                        results.add(case, broker.name, Measured(each / 1000))
                    except (BrokerFailed, OSError) as error:
                        results.problems[case.name, broker.name] = str(error)
                progress.update(task, advance=1, refresh=True)


# --- frame -------------------------------------------------------------------------------------------------------


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between measurements, never during one.
    return Progress(*columns, console=console, auto_refresh=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mqtt", description=__doc__)
    names = [case.name for case in _CASES]
    parser.add_argument("--quick", action="store_true", help="one short window of everything")
    parser.add_argument("--runs", type=int, help="rounds; the median is reported (default 5)")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--publish", action="store_true", help="also copy tables and plot into docs/benchmarks.md")
    parser.add_argument("--install-peers", action="store_true", help="install amqtt, then end; Mosquitto is Debian's")
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 5)
    options.seconds = 0.5 if options.quick else 1.5
    return options


if __name__ == "__main__":
    try:
        main()
    except StartFailed as error:
        raise SystemExit(str(error)) from None
