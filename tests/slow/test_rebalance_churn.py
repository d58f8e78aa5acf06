"""Members of a group as processes that join, leave, stall and die while messages flow: none is lost.

A message may come twice only where the rules say so: its reader died or stalled before it could commit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerProcess

SEED = int(os.environ.get("MILLSTREAM_SEED", "20261115"))
PARTITIONS = 6
WORKER = """
import signal, sys
import millstream

address, out, protocol = sys.argv[1:]
with millstream.connect(address) as client, open(out, "a", buffering=1) as record:
    stream = client.stream("work", group="g", start="earliest", commit_interval_s=0.2, session_ms=2000,
                           rebalance_ms=3000, protocol=protocol, timeout_s=3600)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for message in stream:
            record.write(f"{message.partition} {message.offset}\\n")
    finally:
        stream.close()
"""


class Worker:
    def __init__(self, address: str, out: Path, protocol: str) -> None:
        self.out = out
        self.violent = False  # killed or stalled: what it had in hand may come again
        self._process = subprocess.Popen([sys.executable, "-c", WORKER, address, str(out), protocol])

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> None:
        self._process.wait(30)

    def read(self) -> list[tuple[int, int]]:
        if not self.out.exists():
            return []
        lines = self.out.read_text().splitlines()
        return [(int(partition), int(offset)) for partition, offset in map(str.split, lines)]


def churn(rng: random.Random, workers: list[Worker], start: object, *, violent: bool, steps: int) -> list[Worker]:
    """Change the group a few times; returns the workers that are gone."""
    gone: list[Worker] = []
    for _ in range(steps):
        choice = rng.choice(["join", "leave", "kill", "stall"] if violent else ["join", "leave"])
        if choice == "join" or len(workers) < 2:
            workers.append(start())  # type: ignore[operator]
        else:
            worker = workers.pop(rng.randrange(len(workers)))
            if choice == "leave":
                worker.send(signal.SIGTERM)
                worker.wait()
                gone.append(worker)
            elif choice == "kill":
                worker.violent = True
                worker.send(signal.SIGKILL)
                worker.wait()
                gone.append(worker)
            else:
                worker.violent = True
                worker.send(signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 3.0))  # sometimes longer than its session
                worker.send(signal.SIGCONT)
                workers.append(worker)
        time.sleep(rng.uniform(0.1, 1.2))
    return gone


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("protocol", ["cooperative", "eager"])
@pytest.mark.parametrize("violent", [False, True], ids=["orderly", "violent"])
def test_no_message_is_lost_while_members_come_and_go(tmp_path: Path, violent: bool, protocol: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    numbers = iter(range(10_000))
    with BrokerProcess(tmp_path / "data") as broker, millstream.connect(broker.address) as client:
        client.create_topic("work", partitions=PARTITIONS)

        def start() -> Worker:
            return Worker(broker.address, tmp_path / f"worker-{next(numbers)}", protocol)

        stop = threading.Event()

        def publish() -> None:
            with client.producer("work", linger_ms=2) as producer:
                number = 0
                while not stop.is_set():
                    for _ in range(20):
                        producer.send(b"%d" % number, key=b"k%d" % (number % 50))
                        number += 1
                    time.sleep(0.01)

        publisher = threading.Thread(target=publish)
        publisher.start()
        workers = [start(), start()]
        gone = churn(rng, workers, start, violent=violent, steps=15)
        stop.set()
        publisher.join()

        ends = client.offsets("work")
        expected = {(partition, offset) for partition, end in ends.items() for offset in range(end)}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            seen = Counter(item for worker in gone + workers for item in worker.read())
            if expected <= seen.keys():
                break
            time.sleep(0.2)
        for worker in workers:
            worker.send(signal.SIGTERM)
            worker.wait()
        missing = expected - seen.keys()
        assert not missing, f"{len(missing)} messages never reached a member, such as {sorted(missing)[:5]}"
        assert seen.keys() <= expected
        twice = [item for item, count in seen.items() if count > 1]
        if not violent:
            assert not twice, f"{len(twice)} messages came twice although nobody died, such as {sorted(twice)[:5]}"
        for worker in gone + workers:
            last: dict[int, int] = {}
            for partition, offset in worker.read():
                if not worker.violent:
                    assert offset > last.get(partition, -1), "a member saw messages of a partition out of order"
                last[partition] = offset
        print(f"{len(expected)} messages, {len(gone) + len(workers)} members, {len(twice)} redelivered")
