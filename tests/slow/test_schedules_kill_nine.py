"""Schedules under kill -9, again and again, and ten million of them at once.

Rounds and seed can be set: `MILLSTREAM_KILL_ROUNDS=1000 MILLSTREAM_SEED=7 make test-slow`.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import millstream
from millstream.errors import MillstreamError, ScheduleFired
from millstream.testing.broker import BrokerProcess

ROUNDS = int(os.environ.get("MILLSTREAM_KILL_ROUNDS", "100"))
SEED = int(os.environ.get("MILLSTREAM_SEED", "20261116"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Scheduler(threading.Thread):
    """Publishes messages for soon and for a little later, and takes some of them back."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._random = random.Random(f"{SEED} {name}")
        self.confirmed: set[str] = set()
        self.sent: set[str] = set()
        self.cancelled: set[str] = set()
        #: Whether they were cancelled, nobody said.
        self.doubtful: set[str] = set()
        self.stopping = threading.Event()

    def run(self) -> None:
        with millstream.connect(self._address, timeout_s=60) as client:
            number = 0
            while not self.stopping.is_set():
                text = f"{self.name}:{number}"
                number += 1
                self.sent.add(text)
                try:
                    receipt = client.publish("kill", text, delay=self._random.choice((0.02, 0.2, 1.0, 5.0)))
                    self.confirmed.add(text)
                except MillstreamError:
                    continue  # in doubt: it may or may not come, but not twice
                if self._random.random() < 0.1:
                    try:
                        client.schedules.cancel(receipt)
                        self.cancelled.add(text)
                    except ScheduleFired:
                        continue
                    except MillstreamError:
                        self.doubtful.add(text)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_schedules_survive_kill_nine_exactly_once(tmp_path: Path) -> None:
    print(f"seed {SEED}, {ROUNDS} rounds")
    chance = random.Random(SEED)
    port = free_port()
    address = f"127.0.0.1:{port}"
    broker = BrokerProcess(tmp_path, port=port).start()
    with millstream.connect(address) as client:
        client.create_topic("kill", partitions=2, config={"segment_bytes": 65_536})
    schedulers = [Scheduler(address, f"s{number}") for number in range(3)]
    for scheduler in schedulers:
        scheduler.start()
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(0.05, 0.6))
        broker.kill()
        broker.start()
    for scheduler in schedulers:
        scheduler.stopping.set()
        scheduler.join(60)
        assert not scheduler.is_alive()
        assert scheduler.cancelled, "some were taken back in time"
    with millstream.connect(address) as client:
        while client.schedules.stats("kill")[0].pending:
            time.sleep(0.1)
        with client.stream("kill", start="earliest") as stream:
            seen = Counter(
                message.text for _ in range(sum(client.offsets("kill").values())) if (message := stream.next(10))
            )
    twice = [text for text, count in seen.items() if count > 1]
    assert not twice, f"delivered more than once: {twice[:10]}"
    for scheduler in schedulers:
        missing = scheduler.confirmed - scheduler.cancelled - scheduler.doubtful - seen.keys()
        assert not missing, f"confirmed and never delivered: {sorted(missing)[:10]}"
        assert not scheduler.cancelled & seen.keys(), "cancelled and delivered"
    assert seen.keys() <= set().union(*(scheduler.sent for scheduler in schedulers))
    assert broker.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_pending_messages_take_little_memory_and_a_short_restart(tmp_path: Path) -> None:
    count = 10_000_000

    def memory_mb(what: str) -> int:
        lines = Path(f"/proc/{broker.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) // 1000

    broker = BrokerProcess(tmp_path).start()
    chance = random.Random(SEED)
    with millstream.connect(broker.address, timeout_s=300) as client:
        from_s = time.time() + 3600
        with client.producer("pending") as producer:
            for _ in range(count):
                producer.send(b"x", deliver_at=from_s + chance.random() * 30 * 86_400)
        assert client.schedules.stats("pending")[0].pending == count
    assert memory_mb("VmHWM") < 200
    broker.kill()
    started_s = time.time()
    broker.start()
    with millstream.connect(broker.address, timeout_s=300) as client:
        assert client.schedules.stats("pending")[0].pending == count
    assert time.time() - started_s < 10
    assert memory_mb("VmHWM") < 200
    assert broker.stop() == 0
