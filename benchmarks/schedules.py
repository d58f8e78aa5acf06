"""Schedules: `python -m benchmarks.schedules [--quick] [--pending 10000000]`.

Two questions.  How late does a message come on an idle broker?  What do ten million that wait cost in memory, and how
long does a restart take with them?  (How many can be published, cancelled and fired a second: benchmarks.queues.)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import millstream
from benchmarks.machine import describe_machine
from benchmarks.servers import end_on_sigterm
from millstream.testing.broker import BrokerProcess

_RESULTS = Path(__file__).with_name("results")
_VALUE = bytes(100)
_DAY_S = 86_400
_console = Console()


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--pending", type=int, default=10_000_000, help="messages that wait while memory is measured")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    _RESULTS.mkdir(exist_ok=True)
    results = {
        "machine": describe_machine(_RESULTS),
        "lag": _with_broker(_lag),
        "pending": _with_broker(lambda broker: _pending(broker, options.pending // part)),
    }
    (_RESULTS / "schedules.json").write_text(json.dumps(results, indent=1) + "\n")
    _console.print(f"written to {_RESULTS}")


def _with_broker(measure: Callable[[BrokerProcess], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data, BrokerProcess(Path(data)) as broker:
        result = measure(broker)
    _console.print(result)
    return result


def _lag(broker: BrokerProcess) -> dict[str, Any]:
    lags_ms: list[float] = []
    with millstream.connect(broker.address) as client:
        client.create_topic("lag")
        with client.stream("lag") as stream:
            for _ in range(50):
                due_s = time.time() + 0.05
                client.publish("lag", _VALUE, deliver_at=due_s)
                stream.next(timeout_s=10)
                lags_ms.append((time.time() - due_s) * 1000)
    return {"lag_ms_median": statistics.median(lags_ms), "lag_ms_min": min(lags_ms), "lag_ms_max": max(lags_ms)}


def _pending(broker: BrokerProcess, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"pending": count, "empty_mb": _memory_mb(broker, "VmRSS")}
    chance = random.Random(1)
    with millstream.connect(broker.address, timeout_s=300) as client:
        client.create_topic("pending")
        from_s = time.time() + 3600
        with client.producer("pending") as producer:
            for _ in range(count):
                producer.send(_VALUE, deliver_at=from_s + chance.random() * 30 * _DAY_S)
        assert client.schedules.stats("pending")[0].pending == count
    result |= {"full_mb": _memory_mb(broker, "VmRSS"), "peak_mb": _memory_mb(broker, "VmHWM")}
    for how in ("stop", "kill"):
        getattr(broker, how)()
        started_s = time.time()
        broker.start()
        with millstream.connect(broker.address, timeout_s=300) as client:
            assert client.schedules.stats("pending")[0].pending == count
        result[f"restart_s_after_{how}"] = time.time() - started_s
        result[f"restarted_mb_after_{how}"] = _memory_mb(broker, "VmHWM")
    return result


def _memory_mb(broker: BrokerProcess, what: str) -> float:
    lines = Path(f"/proc/{broker.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1000


if __name__ == "__main__":
    main()
