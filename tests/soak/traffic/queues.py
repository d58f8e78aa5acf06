"""Queues: messages of all priorities, some for later, some that fail, in two groups that treat them alike.

What a consumer does with a message is said in the message; see tests/queue_kills.py, whose consumers these are.
"""

from __future__ import annotations

import time
from typing import Any, Final

import millstream
from millstream.errors import MillstreamError
from tests.queue_kills import KINDS, RETRY, STYLES, TOPIC, Diary
from tests.queue_kills import consume as consume_queue
from tests.soak.traffic.world import Worker

PARTITIONS: Final = 2
BATCH: Final = 6
KEYS: Final = 60
PATIENCE_S: Final = 3600
_POLICY: Final = {"retry": RETRY, "max_deliveries": 0, "lease_ms": 8000}
#: Of `keyed`, each key has one unsettled message at a time, and acks reach the disk a little after their answer.
GROUPS: Final[dict[str, dict[str, Any]]] = {
    "sync": {**_POLICY, "ack_durability": "sync"},
    "keyed": {**_POLICY, "ack_durability": "async", "ordering": "key"},
}
PRIORITIES: Final = ("critical", "high", "normal", "normal", "normal", "low", "background")


def produce(worker: Worker) -> None:
    """Batches with priorities, which are sent again until they are stored."""
    number = 0
    while not worker.over.is_set():
        try:
            with (
                millstream.connect(worker.world.native, timeout_s=10) as client,
                client.producer(TOPIC, linger_ms=2, delivery_timeout_s=PATIENCE_S) as producer,
            ):
                while not worker.pause():
                    entries = []
                    for each in range(number, number + BATCH):
                        value = f"{worker.name}:{each}:{worker.rng.choice(KINDS)}:0"
                        entries.append((value, each, each, ""))
                    number += BATCH
                    worker.ledger.note_all("sent", TOPIC, entries)
                    for value, each, *_ in entries:
                        key = each % KEYS
                        # One priority for each key: between priorities there is no order.
                        producer.send(value, key=f"j{key}", priority=PRIORITIES[key % len(PRIORITIES)])
                    producer.flush(PATIENCE_S)
                    worker.ledger.note_all("sure", TOPIC, entries)
        except MillstreamError:
            worker.over.wait(0.05)


def schedule(worker: Worker) -> None:
    """One at a time, for a little later; a publish in doubt is left in doubt."""
    number = 0
    while not worker.over.is_set():
        try:
            with millstream.connect(worker.world.native, timeout_s=10) as client:
                while not worker.pause(0.5):
                    due_ms = time.time_ns() // 1_000_000 + worker.rng.choice((50, 500, 2000, 5000))
                    value = f"{worker.name}:{number}:{worker.rng.choice(KINDS)}:{due_ms}"
                    number += 1
                    worker.ledger.note("sent", TOPIC, value, number)
                    client.publish(TOPIC, value, key=f"l{number % KEYS}", deliver_at=due_ms / 1000)
                    worker.ledger.note("sure", TOPIC, value, number)
        except MillstreamError:
            worker.over.wait(0.05)


def consume(worker: Worker) -> None:
    """Of the group that the worker is named after."""
    group = worker.name.partition("-")[0]
    diary = Diary(worker.world.ledgers / f"{worker.name}.diary", group)
    style = worker.rng.choice(STYLES)
    consume_queue(worker.world.native, group, style, diary, worker.name, worker.over.is_set)
