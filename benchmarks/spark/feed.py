"""Publishes at a steady rate: `python -m benchmarks.spark.feed PORT TOPIC RATE SECONDS`, a process of its own."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, Final

__all__ = ["fill", "messages"]

_TICK_S: Final = 0.01
_KEYS: Final = 5_000
_BODIES: Final = 100_000
_TEXT: Final = (
    b'{"order":%d,"customer":"Mill Lane Bakery","items":[{"sku":"flour-25","quantity":4}],"note":"deliver before nine"}'
)


def messages() -> Iterator[tuple[bytes, bytes]]:
    """Keys of 13 B and values of 80 to 120 B, 100 on average, without end."""
    lengths = random.Random(1)
    bodies = [(_TEXT % (10_000_000 + number) + b" " * 20)[: lengths.randint(80, 120)] for number in range(_BODIES)]
    keys = [b"customer-%04d" % number for number in range(_KEYS)]
    return zip(cycle(keys), cycle(bodies), strict=False)


def fill(client: Any, topic: str, count: int) -> None:
    """As fast as it goes."""
    with client.producer(topic, linger_ms=5) as producer:
        for key, body in islice(messages(), count):
            producer.send(body, key=key)


def main() -> None:
    import millstream

    port, topic, rate, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    source, each = messages(), int(rate * _TICK_S)
    with millstream.connect(f"127.0.0.1:{port}") as client, client.producer(topic, linger_ms=5) as producer:
        due = time.monotonic()
        for _ in range(int(seconds / _TICK_S)):
            for key, body in islice(source, each):
                producer.send(body, key=key)
            due += _TICK_S
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
