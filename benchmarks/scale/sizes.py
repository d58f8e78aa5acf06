"""Messages from ten bytes to a megabyte, published and consumed through the SDK."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import millstream
from benchmarks.scale.axis import Axis, Effort, Figures, each
from benchmarks.scale.world import Cost, World

__all__ = ["SIZES"]

_TOPIC = "sizes"
_KB = 1000


def _measure(data: Path, size: int, effort: Effort) -> Figures:
    count = max(50, min(effort.messages, effort.payload_bytes // size))
    # A few different bodies, over and over: a million of them would be memory and not messages.
    source = random.Random(size)
    bodies = [source.randbytes(size) for _ in range(min(count, max(1, 20_000_000 // size)))]
    figures: Figures = {}
    with World(data) as world, millstream.connect(f"127.0.0.1:{world.port}") as client:
        client.create_topic(_TOPIC)
        with client.producer(_TOPIC, linger_ms=5) as producer:
            _publish(producer, bodies, min(count, 1_000))
            with world.cost() as published:
                _publish(producer, bodies, count)
        stream = client.stream(_TOPIC, group="scale", start="earliest")
        messages = iter(stream)
        next(messages)
        with world.cost() as consumed:
            read = sum(len(message.value or b"") for message in islice(messages, count))
        stream.close()
        figures |= _figures("publish", published, count, size)
        figures |= _figures("consume", consumed, count, size)
        assert read == count * size
        figures["memory, MB"] = world.memory_bytes() / 1e6
    return figures


def _publish(producer: millstream.Producer, bodies: list[bytes], count: int) -> None:
    for index in range(count):
        producer.send(bodies[index % len(bodies)])
    producer.flush()


def _figures(what: str, cost: Cost, count: int, size: int) -> Figures:
    per_message = {f"{name} a message": value for name, value in each(what, cost, count).items()}
    kilobytes = count * size / _KB
    return per_message | {
        f"{what}, broker us a KB": cost.broker_ns / kilobytes / 1000,
        f"{what}, client us a KB": cost.client_ns / kilobytes / 1000,
        f"{what}, MB a second by the clock": count * size / cost.seconds / 1e6,
    }


SIZES = Axis(
    "sizes",
    "Bytes of a message",
    (10, 100, 1_000, 10_000, 100_000, 1_000_000),
    (10, 1_000, 100_000, 1_000_000),
    _measure,
)
