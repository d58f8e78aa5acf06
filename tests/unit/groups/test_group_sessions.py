"""Who is late, and what a restart forgives."""

from __future__ import annotations

from millstream.groups.core import decide_heartbeat, decide_join, decide_leave, new_group
from millstream.groups.ownership import must_give_back
from millstream.groups.records import GroupState, Heartbeat, Join, Leave, TopicPartition
from millstream.groups.sessions import Sessions

TOPICS = {"orders": 4}


def joined(state: GroupState, member_id: str) -> GroupState:
    command = Join(member_id, "client", "", ("orders",), session_ms=10_000, rebalance_ms=60_000)
    return decide_join(state, command, topics=TOPICS, now_ms=0).state


def test_a_member_is_late_when_its_session_has_run_out() -> None:
    state, sessions = joined(new_group("workers", now_ms=0), "a"), Sessions()
    sessions.follow(state, now_ms=5)
    assert sessions.late(state, now_ms=10_004) == {}
    assert sessions.late(state, now_ms=10_005) == {"a": "no heartbeat for 10000 ms; the session is 10000 ms"}
    sessions.touch("a", now_ms=10_005)
    assert sessions.late(state, now_ms=20_000) == {}
    assert sessions.silent_ms("a", now_ms=20_000) == 9_995


def test_a_member_that_keeps_what_it_must_give_back_is_late_although_it_is_heard() -> None:
    state, sessions = joined(joined(new_group("workers", now_ms=0), "a"), "b"), Sessions()
    sessions.follow(state, now_ms=0)
    for now_ms in range(0, 60_001, 5_000):
        sessions.touch("a", now_ms=now_ms)
        sessions.touch("b", now_ms=now_ms)
    assert sessions.late(state, now_ms=59_999) == {}
    assert sessions.late(state, now_ms=60_000) == {"a": "did not give back orders/2 within 60000 ms"}


def test_a_second_request_has_its_own_deadline() -> None:
    state, sessions = joined(joined(new_group("workers", now_ms=0), "a"), "b"), Sessions()
    sessions.follow(state, now_ms=0)
    asked_first = must_give_back(state, state.members["a"])
    state = joined(state, "c")
    sessions.follow(state, now_ms=50_000)
    (asked_later,) = must_give_back(state, state.members["a"]) - asked_first

    still_held = frozenset(state.members["a"].owned) - asked_first
    state = decide_heartbeat(state, Heartbeat("a", state.generation, still_held)).state
    sessions.follow(state, now_ms=55_000)
    for member_id in "abc":
        sessions.touch(member_id, now_ms=109_000)
    assert sessions.late(state, now_ms=109_999) == {}
    assert sessions.late(state, now_ms=110_000) == {"a": f"did not give back {asked_later} within 60000 ms"}


def test_giving_back_ends_the_deadline() -> None:
    state, sessions = joined(joined(new_group("workers", now_ms=0), "a"), "b"), Sessions()
    sessions.follow(state, now_ms=0)
    kept = frozenset({TopicPartition("orders", 0), TopicPartition("orders", 1)})
    state = decide_heartbeat(state, Heartbeat("a", 2, kept)).state
    sessions.follow(state, now_ms=1_000)
    for member_id in "ab":
        sessions.touch(member_id, now_ms=100_000)
    assert sessions.late(state, now_ms=100_000) == {}


def test_after_a_restart_every_member_has_a_fresh_session() -> None:
    state, sessions = joined(new_group("workers", now_ms=0), "a"), Sessions()
    sessions.follow(state, now_ms=1_000_000)
    assert sessions.late(state, now_ms=1_009_999) == {}


def test_a_member_that_left_is_forgotten() -> None:
    state, sessions = joined(new_group("workers", now_ms=0), "a"), Sessions()
    sessions.follow(state, now_ms=0)
    state = decide_leave(state, Leave("a"), topics=TOPICS, now_ms=0).state
    sessions.follow(state, now_ms=0)
    assert sessions.silent_ms("a", now_ms=0) is None
    state = joined(state, "a")
    sessions.follow(state, now_ms=90_000)
    assert sessions.late(state, now_ms=99_999) == {}
