"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerForTests

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_publish_and_read(broker: BrokerForTests) -> None:
    lines = run("publish_and_read.py", broker.address).splitlines()
    assert lines[0].endswith("it survives: disk")
    assert lines[1:] == [
        "0 b'table-7' flat white",
        "1 b'table-7' espresso number 1",
        "2 b'table-7' espresso number 2",
        "3 b'table-7' espresso number 3",
    ]


def test_group_worker(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("jobs", partitions=4)
        client.publish_many("jobs", [f"job {number}" for number in range(5)])
    out = run("group_worker.py", broker.address, "5")
    assert "assigned [0, 1, 2, 3]" in out
    assert out.count("offset") == 5


def test_async_fan_out(broker: BrokerForTests) -> None:
    out = run("async_fan_out.py", broker.address).splitlines()
    expected = [f"{group}: signal {number}" for group in ("audit", "billing") for number in range(3)]
    assert sorted(out) == sorted(expected)


def test_work_queue(broker: BrokerForTests) -> None:
    assert run("work_queue.py", broker.address).splitlines() == [
        "paid c-0: 12 (delivery 1)",
        "paid c-1: 7 (delivery 1)",
        "paid c-3: 30 (delivery 2)",
        "dead: ['the amount makes no sense']",
    ]


def test_worker(broker: BrokerForTests) -> None:
    command = [sys.executable, str(EXAMPLES / "worker.py"), broker.address, "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        lines = {worker.stdout.readline() for _ in range(4)}
        assert lines == {f"done: job {number}\n" for number in (0, 1, 2, 4)}
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    with millstream.connect(broker.address) as client:
        assert client.queues.describe("jobs", "workers").depth == 0


def test_request_reply(broker: BrokerForTests) -> None:
    assert run("request_reply.py", broker.address).splitlines() == [
        "{'article': 'apple', 'price': 500}",
        "{'article': 'fig', 'price': 300}",
        "no reply came within 0.2 s",
    ]


def test_live_dashboard(broker: BrokerForTests) -> None:
    assert run("live_dashboard.py", broker.address).splitlines() == [
        "sensors.kitchen.temperature: 21.5",
        "alarms.fire.cellar: smoke",
        "missed: 0",
    ]


def test_every_example_has_a_test() -> None:
    tests = [Path(__file__), *(TESTS / "spark" / "ready").glob("test_*.py")]
    text = "".join(path.read_text() for path in tests)
    for path in EXAMPLES.glob("*.py"):
        assert path.name in text, f"{path.name} is not run by any test"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it(path: Path) -> None:
    assert "Usage: python examples/" in path.read_text()
