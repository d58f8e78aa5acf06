"""Groups that an operator takes in hand: paused, resumed, dealt anew."""

from __future__ import annotations

import json

import pytest

from millstream.errors import StaleGeneration
from millstream.groups.core import (
    decide_heartbeat,
    decide_join,
    decide_pause,
    decide_rebalance,
    new_group,
    validate_commit,
)
from millstream.groups.documents import from_document, to_document
from millstream.groups.ownership import explain, group_phase
from millstream.groups.records import (
    GroupState,
    Heartbeat,
    Join,
    Phase,
    RebalanceProtocol,
    Reply,
    TopicPartition,
)

TOPICS = {"orders": 4}
ALL = frozenset(TopicPartition("orders", number) for number in range(4))


def joined(state: GroupState, member_id: str, protocol: RebalanceProtocol | None = None) -> GroupState:
    command = Join(member_id, "client", "10.0.0.1:1", ("orders",), protocol=protocol)
    return decide_join(state, command, topics=TOPICS, now_ms=2).state


def beat(state: GroupState, member_id: str, owned: frozenset[TopicPartition]) -> tuple[GroupState, Reply]:
    transition = decide_heartbeat(state, Heartbeat(member_id, state.generation, owned))
    return transition.state, transition.reply


def settled(state: GroupState) -> GroupState:
    """Every member does what it is told, until there is nothing left to do."""
    held = {member_id: frozenset(member.owned) for member_id, member in state.members.items()}
    for _ in range(4):
        for member_id in state.members:
            state, reply = beat(state, member_id, held[member_id])
            held[member_id] = reply.assigned
    assert group_phase(state) is Phase.STABLE
    return state


def pause(state: GroupState, *, paused: bool = True) -> GroupState:
    return decide_pause(state, paused=paused, topics=TOPICS, now_ms=3).state


@pytest.mark.parametrize("protocol", RebalanceProtocol)
def test_a_paused_group_gives_everything_back_and_gets_it_again(protocol: RebalanceProtocol) -> None:
    state = settled(joined(joined(new_group("workers", now_ms=1), "a", protocol), "b"))
    transition = decide_pause(state, paused=True, topics=TOPICS, now_ms=3)
    assert transition.nudged == {"a", "b"}
    paused = settled(transition.state)
    assert [dict(member.owned) for member in paused.members.values()] == [{}, {}]
    assert "paused" in explain(paused, TopicPartition("orders", 0))
    resumed = settled(pause(paused, paused=False))
    assert frozenset().union(*(member.owned for member in resumed.members.values())) == ALL


def test_what_is_in_hand_can_be_committed_until_it_is_given_back() -> None:
    state = settled(joined(new_group("workers", now_ms=1), "a"))
    place = TopicPartition("orders", 0)
    paused = pause(state)
    validate_commit(paused, member_id="a", generation=state.generation, partition=place)
    paused, _ = beat(paused, "a", frozenset())
    with pytest.raises(StaleGeneration):
        validate_commit(paused, member_id="a", generation=paused.generation, partition=place)


def test_who_joins_a_paused_group_gets_nothing_yet() -> None:
    paused = pause(new_group("workers", now_ms=1))
    command = Join("a", "client", "10.0.0.1:1", ("orders",))
    transition = decide_join(paused, command, topics=TOPICS, now_ms=4)
    assert transition.reply.assigned == frozenset()
    assert settled(pause(transition.state, paused=False)).members["a"].owned.keys() == ALL


def test_pausing_twice_changes_nothing() -> None:
    paused = pause(joined(new_group("workers", now_ms=1), "a"))
    again = decide_pause(paused, paused=True, topics=TOPICS, now_ms=9)
    assert again.state is paused


def test_a_pause_survives_being_written_down() -> None:
    paused = pause(joined(new_group("workers", now_ms=1), "a"))
    assert from_document(json.loads(json.dumps(to_document(paused)))) == paused


def test_a_rebalance_forgets_who_had_what_and_begins_a_generation() -> None:
    state = settled(joined(joined(joined(new_group("workers", now_ms=1), "c"), "b"), "a"))
    transition = decide_rebalance(state, topics=TOPICS, now_ms=3)
    fresh = settled(joined(joined(joined(new_group("workers", now_ms=1), "a"), "b"), "c"))
    assert transition.state.generation == state.generation + 1
    assert transition.nudged == {"a", "b", "c"}
    dealt = settled(transition.state)
    assert sum(len(member.owned) for member in dealt.members.values()) == 4
    afresh = decide_rebalance(fresh, topics=TOPICS, now_ms=3).state
    assert {key: member.target for key, member in dealt.members.items()} == {
        key: member.target for key, member in afresh.members.items()
    }


def test_there_is_nothing_to_deal_in_an_empty_group() -> None:
    empty = new_group("workers", now_ms=1)
    assert decide_rebalance(empty, topics=TOPICS, now_ms=3).state is empty
