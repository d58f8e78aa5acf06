"""Streams: idempotent producers with keys, and a group whose members share the partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import millstream
from millstream.client.messages import Message
from millstream.errors import MillstreamError
from tests.soak.traffic.world import Worker

TOPIC: Final = "orders"
COPIES: Final = "copies"
GROUP: Final = "readers"
PARTITIONS: Final = 4
KEYS: Final = 40
BATCH: Final = 25
#: Longer than any fault: a producer that gives up would have nothing to say about what becomes of its messages.
PATIENCE_S: Final = 3600


def key_of(number: int) -> str:
    return f"k{number % KEYS}"


def produce(worker: Worker) -> None:
    """In batches; each is confirmed before the next one is begun."""
    number = 0
    while not worker.over.is_set():
        with (
            suppress(MillstreamError),
            millstream.connect(worker.world.native, timeout_s=10) as client,
            client.producer(TOPIC, linger_ms=2, delivery_timeout_s=PATIENCE_S) as producer,
        ):
            while not worker.pause():
                first, number = number, number + BATCH
                worker.ledger.note("sent", TOPIC, worker.name, first, number - 1)
                for each in range(first, number):
                    producer.send(f"{worker.name}:{each}", key=key_of(each))
                producer.flush(PATIENCE_S)
                worker.ledger.note("sure", TOPIC, worker.name, first, number - 1)
        worker.over.wait(0.05)


def consume(worker: Worker) -> None:
    """One member of the group."""
    while not worker.over.is_set():
        with (
            suppress(MillstreamError),
            millstream.connect(worker.world.native, timeout_s=10) as client,
            client.stream(
                TOPIC,
                group=GROUP,
                start="earliest",
                commit_interval_s=0.5,
                session_ms=worker.world.session_ms,
                rebalance_ms=5000,
                timeout_s=0.5,
            ) as stream,
        ):
            while not worker.over.is_set():
                for messages in stream.batches():
                    # Leaving in the middle would mean that they are not done: others would get them again.
                    worker.ledger.note_all("saw", TOPIC, list(runs(messages, worker.name)))
        worker.over.wait(0.05)


def runs(messages: Sequence[Message], name: str) -> Iterator[tuple[str, int, int, str]]:
    """What lies side by side in a partition is one entry."""
    at = 0
    while at < len(messages):
        end = at + 1
        partition, first = messages[at].partition, messages[at].offset
        while (
            end < len(messages)
            and messages[end].partition == partition
            and messages[end].offset == messages[end - 1].offset + 1
        ):
            end += 1
        yield name, first, messages[end - 1].offset, str(partition)
        at = end
