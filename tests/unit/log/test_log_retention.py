"""Which segments go: a decision over numbers."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.log.retention import Removals, Retention


@dataclass(frozen=True)
class Numbers:
    size: int = 100
    messages: int = 10
    last_append_us: int = 0


FOUR = [Numbers(last_append_us=n * 1_000_000) for n in (1, 2, 3, 4)]


def decide(retention: Retention, now_ms: int = 4_000) -> Removals:
    return retention.decide_removals(FOUR, now_us=now_ms * 1000)


def test_without_limits_everything_stays() -> None:
    assert decide(Retention()) == Removals(0, False)


def test_age_counts_from_the_newest_message_of_a_segment() -> None:
    assert decide(Retention(max_age_ms=2_000)) == Removals(1, False)
    assert decide(Retention(max_age_ms=2_000), now_ms=4_001) == Removals(2, False)


def test_bytes_and_messages_keep_up_to_a_segment_more() -> None:
    assert decide(Retention(max_bytes=250)) == Removals(1, False)
    assert decide(Retention(max_bytes=200)) == Removals(2, False)
    assert decide(Retention(max_messages=11)) == Removals(2, False)
    assert decide(Retention(max_messages=10)) == Removals(3, False)


def test_the_stricter_limit_wins() -> None:
    assert decide(Retention(max_age_ms=2_000, max_bytes=100, max_messages=1_000)) == Removals(3, False)


def test_the_active_segment_goes_only_when_all_of_it_is_too_old() -> None:
    assert decide(Retention(max_age_ms=10), now_ms=4_011) == Removals(4, True)
    assert decide(Retention(max_bytes=0, max_messages=0)) == Removals(3, False)
    empty = [Numbers(size=0, messages=0)]
    assert Retention(max_age_ms=1).decide_removals(empty, now_us=1 << 60) == Removals(0, False)
