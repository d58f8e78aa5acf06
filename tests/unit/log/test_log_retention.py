"""Which segments go: a decision over numbers."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.log.retention import Removals, Retention


@dataclass(frozen=True)
class Numbers:
    size: int = 100
    messages: int = 10
    next_offset: int = 0
    first_append_us: int = 0
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


def test_nothing_goes_at_or_behind_an_offset_that_must_stay() -> None:
    segments = [Numbers(next_offset=n * 10, last_append_us=n) for n in (1, 2, 3)]
    everything = Retention(max_age_ms=1)
    assert everything.decide_removals(segments, now_us=1 << 60, below=19) == Removals(1, False)
    assert everything.decide_removals(segments, now_us=1 << 60, below=29) == Removals(2, False)
    assert everything.decide_removals(segments, now_us=1 << 60, below=30) == Removals(3, True)


def rolls(retention: Retention, active: Numbers, now_ms: int = 0, *older: Numbers, below: int | None = None) -> bool:
    return retention.decide_roll([*older, active], now_us=now_ms * 1000, below=below)


def test_an_active_segment_is_rolled_when_it_holds_more_than_an_eighth_of_what_a_limit_allows() -> None:
    slow = Numbers(size=80, messages=8, first_append_us=1_000_000, last_append_us=1_900_000)
    assert not rolls(Retention(max_age_ms=8_000), slow, 2_000)
    assert rolls(Retention(max_age_ms=8_000), slow, 2_001)
    assert not rolls(Retention(max_messages=65), slow)
    assert rolls(Retention(max_messages=64), slow)
    assert not rolls(Retention(max_bytes=641), slow)
    assert rolls(Retention(max_bytes=640), slow)
    assert not rolls(Retention(), slow, 1 << 50)


def test_an_active_segment_is_not_rolled_where_nothing_is_gained() -> None:
    strict = Retention(max_age_ms=8_000, max_messages=1)
    assert not rolls(strict, Numbers(size=0, messages=0), 1 << 50), "an idle one, again and again"
    assert not rolls(strict, Numbers(), 8_001), "all of it goes"


def test_while_the_oldest_must_stay_there_are_no_more_and_more_segments() -> None:
    strict = Retention(max_messages=8)
    older, active = Numbers(next_offset=10), Numbers(next_offset=20)
    assert rolls(strict, active, 0, older)
    assert rolls(strict, active, 0, older, below=10)
    assert not rolls(strict, active, 0, older, below=9)
