"""In which epoch of the broker a stream has read what it commits."""

from __future__ import annotations

import pytest

from millstream.client.messages import TopicPartition
from millstream.client.positions import Positions

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def positions() -> Positions:
    found = Positions(max_bytes=1, wait_ms=1, jitter=lambda: 0.0, tolerate_missing=True, skip_damage=False, commit=None)
    for place in (T0, T1):
        found.add(place, 1, 10)
    found.connected(5)
    return found


def test_a_connection_that_comes_back_to_the_same_run_leaves_no_doubt(positions: Positions) -> None:
    positions.disconnected()
    assert positions.earliest_epoch == 5
    positions.connected(5)
    assert positions.doubtful == []


def test_a_partition_that_cannot_be_looked_up_holds_back_no_other(positions: Positions) -> None:
    positions.disconnected()
    positions.connected(6)
    first, second = positions.doubtful
    assert positions.earliest_epoch is None
    positions.trust(first)
    assert (positions.earliest_epoch, positions.doubtful) == (6, [second])
    positions.disconnected()
    positions.connected(7)
    assert [position.epoch for position in positions.doubtful] == [6, 5], "each is looked up from where it was certain"
