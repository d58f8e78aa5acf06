"""Each run has an epoch, larger than that of any before."""

from __future__ import annotations

import pytest

from millstream.broker.node import next_epoch, note_epoch
from millstream.log.memory import MemoryStorage

NOON_US = 1_800_000_000_000_000


def test_an_epoch_is_larger_than_the_last_and_than_the_time() -> None:
    storage = MemoryStorage()
    assert next_epoch(storage, NOON_US) == 1_800_000_000
    note_epoch(storage, 1_800_000_000)
    assert next_epoch(storage, NOON_US) == 1_800_000_001
    assert next_epoch(storage, NOON_US - 10**12) == 1_800_000_001, "a clock that was set back counts for nothing"
    assert next_epoch(storage, NOON_US + 10**7) == 1_800_000_010


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"18o", b"-1"])
def test_a_note_that_cannot_be_read_keeps_no_broker_from_starting(damage: bytes) -> None:
    storage = MemoryStorage()
    storage.replace("epoch", damage)
    assert next_epoch(storage, NOON_US) == 1_800_000_000
