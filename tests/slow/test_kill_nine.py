"""kill -9 under load, again and again: what was confirmed is stored exactly once, in order.

Rounds and seed can be set: `MILLSTREAM_KILL_ROUNDS=1000 MILLSTREAM_SEED=7 make test-slow`.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

import millstream
from millstream.errors import MillstreamError
from millstream.testing.broker import BrokerProcess

ROUNDS = int(os.environ.get("MILLSTREAM_KILL_ROUNDS", "200"))
SEED = int(os.environ.get("MILLSTREAM_SEED", "20261115"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Producer(threading.Thread):
    """Sends numbered messages of its own key for as long as it lives, and remembers how many were confirmed."""

    def __init__(self, address: str, name: str, fsync: str) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._topic = f"kill-{fsync}"
        self.sent = 0
        self.confirmed = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            with (
                millstream.connect(self._address) as client,
                client.producer(self._topic, linger_ms=1, batch_bytes=4096) as producer,
            ):
                while not self.stopping.is_set():
                    for _ in range(50):
                        producer.send(f"{self.name}:{self.sent}", key=self.name.encode())
                        self.sent += 1
                    producer.flush()
                    self.confirmed = self.sent
        except BaseException as error:
            self.failure = error


def single_publisher(address: str, name: str, topic: str, confirmed: list[int], stopping: threading.Event) -> None:
    """publish() one at a time: each confirmed message must be there, each at most once."""
    with millstream.connect(address) as client:
        number = 0
        while not stopping.is_set():
            try:
                client.publish(topic, f"{name}:{number}", key=name.encode())
            except MillstreamError:
                return
            confirmed[0] = number + 1
            number += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fsync", ["group", "interval"])
def test_confirmed_messages_survive_kill_nine_exactly_once_and_in_order(tmp_path: Path, fsync: str) -> None:
    print(f"seed {SEED}, {ROUNDS} rounds")
    rng = random.Random(SEED)
    port = free_port()
    address = f"127.0.0.1:{port}"
    topic = f"kill-{fsync}"

    broker = BrokerProcess(tmp_path, port=port).start()
    with millstream.connect(address) as client:
        client.create_topic(topic, partitions=2, config={"fsync": fsync, "segment_bytes": 262_144})
    producers = [Producer(address, f"p{i}", fsync) for i in range(3)]
    for producer in producers:
        producer.start()
    one_by_one = [0]
    stopping = threading.Event()
    single = threading.Thread(target=single_publisher, args=(address, "single", topic, one_by_one, stopping))
    single.start()
    for _ in range(ROUNDS):
        time.sleep(rng.uniform(0.01, 0.25))
        broker.kill()
        broker.start()
    for producer in producers:
        producer.stopping.set()
    stopping.set()
    for thread in [*producers, single]:
        thread.join(60)
        assert not thread.is_alive()
    for producer in producers:
        assert producer.failure is None, f"{producer.name}: {producer.failure!r}"
        assert producer.confirmed > 0

    seen: dict[str, list[int]] = {}
    with millstream.connect(address) as client:
        ends = client.offsets(topic)
        left = sum(ends.values())
        stream = client.stream(topic, start="earliest")
        while left:
            message = stream.next(timeout_s=10)
            assert message is not None, f"{left} messages are missing from the log"
            name, number = message.text.split(":")
            seen.setdefault(name, []).append(int(number))
            left -= 1
        stream.close()
    for producer in producers:
        numbers = seen[producer.name]
        assert numbers == list(range(len(numbers))), f"{producer.name}: lost, repeated or reordered"
        assert len(numbers) >= producer.confirmed
    assert seen["single"] == list(range(len(seen["single"])))
    assert len(seen["single"]) >= one_by_one[0]
    assert broker.stop() == 0
