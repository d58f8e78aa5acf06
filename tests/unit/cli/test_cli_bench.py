"""What the benchmark makes of its workers' measurements."""

from __future__ import annotations

import tracemalloc

from millstream.cli.bench import _producers, _summary
from millstream.cli.load import Measured, Work, _values


def measured(messages: int, started_s: float, ended_s: float, latencies_us: list[int] | None = None) -> Measured:
    return Measured("publish", messages, messages * 100, started_s, ended_s, 0.5, latencies_us or [])


def test_workers_count_from_the_first_start_to_the_last_end() -> None:
    """The mean of each worker's own rate would be too good: it forgets the time when only one of them ran."""
    summary = _summary([measured(1000, 0.0, 1.0), measured(1000, 1.0, 4.0)])
    assert summary["messages"] == 2000
    assert summary["seconds"] == 4.0
    assert summary["messages_per_s"] == 500
    assert summary["mb_per_s"] == 0.05
    assert summary["cpu_us_per_message"] == 500.0


def test_quantiles_are_over_all_workers() -> None:
    summary = _summary([measured(50, 0, 1, list(range(50))), measured(50, 0, 1, list(range(50, 100)))])
    assert summary["latency_us"] == {"p50": 50, "p99": 99, "p99.9": 99, "max": 99}
    assert _summary([measured(1, 0, 1)])["latency_us"] == {}


def test_messages_are_shared_out_completely() -> None:
    works = _producers(3, 10, role="publish", broker="", namespace="", topic="", message_bytes=1)
    assert [work.messages for work in works] == [4, 3, 3]


def test_bodies_have_the_size_asked_for_and_differ() -> None:
    for size in (1, 7, 100, 1024):
        values = _values(Work("publish", "", "", "", 5000, size))
        assert {len(value) for value in values} == {size}
    assert len(set(values)) == 1000


def test_no_more_bodies_are_made_than_there_are_messages_or_than_memory_is_for() -> None:
    """Ten messages of a megabyte took a gigabyte."""
    assert len(_values(Work("publish", "", "", "", 10, 1000))) == 10
    assert len(_values(Work("publish", "", "", "", 5000, 1 << 20))) == 64
    assert len(_values(Work("publish", "", "", "", 0, 0))) == 1
    tracemalloc.start()
    large = _values(Work("publish", "", "", "", 2, 8 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(value) for value in large] == [8 << 20] * 2
    assert peak < 64 << 20
