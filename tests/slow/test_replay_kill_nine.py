"""Replays and purges under kill -9, long enough for journals to roll: each letter is sent once, in order, or stays.

Rounds and seed can be set: `MILLSTREAM_KILL_ROUNDS=100 MILLSTREAM_SEED=7 make test-slow`.
"""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerProcess

ROUNDS = int(os.environ.get("MILLSTREAM_KILL_ROUNDS", "30"))
SEED = int(os.environ.get("MILLSTREAM_SEED", "20261115"))
LETTERS, KEYS, PARTITIONS = 12_000, 23, 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replays_survive_kill_nine_exactly_once_and_in_order(tmp_path: Path) -> None:
    print(f"seed {SEED}, {ROUNDS} rounds")
    rng = random.Random(SEED)
    with BrokerProcess(tmp_path, port=free_port()) as broker, millstream.connect(broker.address) as client:
        client.create_topic("orders", partitions=PARTITIONS)
        client.create_topic("orders.dlq", partitions=PARTITIONS)
        padding = "x" * 1000
        sent = client.publish_many(
            "orders", [millstream.Outgoing(value="", key=f"k{n % KEYS}") for n in range(LETTERS)]
        )
        dead = [
            millstream.Outgoing(
                value=f"{n}:{padding}",
                key=f"k{n % KEYS}",
                headers={"millstream-dead-topic": "orders", "millstream-dead-id": sent[n].id, "odd": str(n % 10 == 7)},
            )
            for n in range(LETTERS)
        ]
        rng.shuffle(dead)
        client.publish_many("orders.dlq", dead)
        before = client.offsets("orders")
        replay = client.dead_letters.replay(headers={"odd": "False"}, rate=LETTERS / (ROUNDS * 0.25))
        for _ in range(ROUNDS):
            time.sleep(rng.uniform(0.1, 1.2))
            broker.kill()
            broker.start()
        info = replay.wait(300)
        wanted = {n for n in range(LETTERS) if n % 10 != 7}
        assert (info.status, info.failed, info.replayed) == ("completed", 0, len(wanted))
        assert sum(client.offsets("orders").values()) == LETTERS + len(wanted), "lost or sent twice"
        seen: dict[bytes, list[int]] = {}
        with client.stream("orders", start=before, timeout_s=10) as stream:
            for _ in range(len(wanted)):
                message = stream.next(timeout_s=10)
                assert message is not None
                assert message.key is not None
                seen.setdefault(message.key, []).append(int(message.text.partition(":")[0]))
        for key, numbers in seen.items():
            assert numbers == sorted(numbers), f"the order of {key!r} was lost"
        assert {n for numbers in seen.values() for n in numbers} == wanted
        assert client.dead_letters.stats().total == LETTERS - len(wanted)
