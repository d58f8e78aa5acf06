"""A backlog costs disk, not memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerProcess

MESSAGES = 10_000_000
AT_REST_MB_MAX = 100
GROWTH_MB_MAX = 40  # the tail cache (16 MiB), indexes of a few segments, and what the allocator keeps


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the broker is gone")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_stays_flat_with_ten_million_messages(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker, millstream.connect(broker.address) as client:
        at_rest = resident_mb(broker.pid)
        with client.producer("backlog") as producer:
            value = b"x" * 100
            for number in range(MESSAGES):
                producer.send(value)
                if number == MESSAGES // 100:
                    producer.flush()
        full = resident_mb(broker.pid)
        seen = 0
        for messages in client.stream("backlog", start="earliest").batches():
            seen += len(messages)
            if seen == MESSAGES:
                break
        after = resident_mb(broker.pid)
        print(f"at rest {at_rest:.0f} MB, with {MESSAGES} messages {full:.0f} MB, after reading them {after:.0f} MB")
        assert at_rest < AT_REST_MB_MAX
        assert max(full, after) - at_rest < GROWTH_MB_MAX
