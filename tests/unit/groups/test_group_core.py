"""Members, generations and rebalances, one situation per test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from millstream.errors import (
    GroupNotEmpty,
    InvalidArgument,
    InvalidName,
    MemberFenced,
    QuotaExceeded,
    StaleGeneration,
    UnknownMember,
)
from millstream.groups.beginnings import BEGUN_MAX, begun_with, newly_covered
from millstream.groups.core import (
    decide_expire,
    decide_heartbeat,
    decide_join,
    decide_lapse,
    decide_leave,
    decide_refresh,
    new_group,
    validate_commit,
)
from millstream.groups.ownership import explain, group_phase
from millstream.groups.records import (
    FORMER_MAX,
    FORMER_PLACES_MAX,
    GroupState,
    Heartbeat,
    Join,
    Leave,
    Phase,
    RebalanceProtocol,
    Reply,
    Strategy,
    TopicPartition,
    Transition,
    name_member,
)

ReplyT = TypeVar("ReplyT", Reply, None)

TOPICS = {"orders": 4}
NOTHING: frozenset[TopicPartition] = frozenset()


def orders(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("orders", number) for number in numbers)


def joining(member_id: str, *topics: str, instance_id: str | None = None) -> Join:
    return Join(member_id, "client", "10.0.0.1:5000", topics or ("orders",), instance_id)


class Group:
    """Applies decisions at once, as a broker whose records never fail."""

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        self.topics = TOPICS if topics is None else topics
        self.state = new_group("workers", now_ms=1)
        self.nudged: frozenset[str] = frozenset()

    def join(self, command: Join) -> Reply:
        return self.take(decide_join(self.state, command, topics=self.topics, now_ms=2))

    def beat(self, member_id: str, generation: int, owned: frozenset[TopicPartition]) -> Reply:
        return self.take(decide_heartbeat(self.state, Heartbeat(member_id, generation, owned)))

    def leave(self, member_id: str, *, permanent: bool = False) -> None:
        command = Leave(member_id, permanent)
        self.take(decide_leave(self.state, command, topics=self.topics, now_ms=3))

    def expire(self, *member_ids: str) -> None:
        self.take(decide_expire(self.state, member_ids, topics=self.topics, now_ms=4))

    def refresh(self, topics: dict[str, int]) -> None:
        self.topics = topics
        self.take(decide_refresh(self.state, topics=topics, now_ms=5))

    def take(self, transition: Transition[ReplyT]) -> ReplyT:
        self.state, self.nudged = transition.state, transition.nudged
        return transition.reply


@pytest.fixture
def group() -> Group:
    return Group()


def pair(group: Group, *, protocol: RebalanceProtocol = RebalanceProtocol.COOPERATIVE) -> None:
    """Members a and b with two partitions each, in generation 2, everything settled."""
    group.join(replace(joining("a"), protocol=protocol))
    group.join(joining("b"))
    group.beat("a", 2, NOTHING)
    group.beat("b", 2, NOTHING)
    group.beat("a", 2, NOTHING)
    assert group_phase(group.state) is Phase.STABLE
    assert group.state.members["a"].owned.keys() == orders(0, 1)
    assert group.state.members["b"].owned.keys() == orders(2, 3)


# Joining


def test_the_first_member_gets_everything_at_once(group: Group) -> None:
    reply = group.join(joining("a"))
    assert reply == Reply("a", 1, orders(0, 1, 2, 3), revoke=NOTHING, waiting=NOTHING)
    assert group.nudged == frozenset()
    assert group_phase(group.state) is Phase.STABLE
    assert group.state.emptied_at_ms is None


def test_a_second_member_waits_until_the_first_gives_back(group: Group) -> None:
    group.join(joining("a"))
    reply = group.join(joining("b"))
    assert reply == Reply("b", 2, NOTHING, revoke=NOTHING, waiting=orders(2, 3))
    assert group.nudged == {"a"}
    (moving,) = orders(2)
    assert explain(group.state, moving) == "orders/2 must be given back by a, then b gets it"

    told = group.beat("a", 1, orders(0, 1, 2, 3))
    assert told == Reply("a", 2, orders(0, 1), revoke=orders(2, 3), waiting=NOTHING)
    assert group.beat("b", 2, NOTHING).waiting == orders(2, 3)

    group.beat("a", 2, orders(0, 1, 3))
    assert group.nudged == {"b"}
    assert group.beat("b", 2, NOTHING) == Reply("b", 2, orders(2), revoke=NOTHING, waiting=orders(3))

    group.beat("a", 2, orders(0, 1))
    assert group.beat("b", 2, orders(2)).assigned == orders(2, 3)
    assert group_phase(group.state) is Phase.STABLE


def test_joining_again_under_the_same_id_only_refreshes(group: Group) -> None:
    pair(group)
    before = group.state
    assert group.join(joining("a")).assigned == orders(0, 1)
    assert group.state is before
    group.join(replace(joining("a"), address="10.0.0.2:6000"))
    assert group.state.members["a"].address == "10.0.0.2:6000"
    assert group.state.generation == before.generation
    assert group.nudged == frozenset()


def test_a_removed_member_that_still_holds_partitions_cannot_renew(group: Group) -> None:
    pair(group)
    assert group.join(replace(joining("a", "orders", "audit"), renew=True)).assigned == orders(0, 1)
    group.expire("a")
    with pytest.raises(UnknownMember):
        group.join(replace(joining("a"), renew=True))
    assert group.join(joining("a")).assigned == NOTHING


def test_changing_the_subscription_rebalances() -> None:
    group = Group({"orders": 2, "audit": 2})
    group.join(joining("a", "orders"))
    reply = group.join(joining("a", "audit"))
    assert reply.generation == 2
    assert {partition.topic for partition in reply.assigned} == {"audit"}
    assert reply.revoke == orders(0, 1)


def test_a_pattern_follows_topics_that_come_and_go() -> None:
    group = Group({"orders.eu": 1, "audit": 9})
    group.join(joining("a", "orders.*"))
    group.refresh({"orders.eu": 1, "orders.us": 2, "audit": 9})
    assert group.nudged == {"a"}
    assigned = group.beat("a", 1, NOTHING).assigned
    assert sorted(map(str, assigned)) == ["orders.eu/0", "orders.us/0", "orders.us/1"]
    group.refresh({"orders.us": 2})
    reply = group.beat("a", 2, frozenset(group.state.members["a"].owned))
    assert reply.revoke == {TopicPartition("orders.eu", 0)}


def test_a_refresh_that_changes_nothing_records_nothing(group: Group) -> None:
    pair(group)
    before = group.state
    group.refresh({"orders": 4, "unrelated": 8})
    assert group.state is before


def test_members_without_partitions_make_no_new_generation(group: Group) -> None:
    """Nobody should stop working because a fifth member joins four partitions."""
    for name in "abcd":
        group.join(joining(name))
    generation = group.state.generation
    assert group.join(joining("e")).assigned == NOTHING
    assert group.state.generation == generation
    group.leave("e")
    assert group.state.generation == generation


def test_another_strategy_or_protocol_than_the_groups_is_refused_naming_both(group: Group) -> None:
    group.join(replace(joining("a"), strategy=Strategy.RANGE))
    with pytest.raises(InvalidArgument, match=r"strategy range.*sticky"):
        group.join(replace(joining("b"), strategy=Strategy.STICKY))
    with pytest.raises(InvalidArgument, match=r"protocol cooperative.*eager"):
        group.join(replace(joining("b"), protocol=RebalanceProtocol.EAGER))
    group.join(joining("b"))
    assert group.state.strategy is Strategy.RANGE


def test_an_empty_group_takes_the_settings_of_its_next_first_member(group: Group) -> None:
    group.join(replace(joining("a"), strategy=Strategy.RANGE))
    group.leave("a")
    group.join(replace(joining("b"), strategy=Strategy.ROUND_ROBIN))
    assert group.state.strategy is Strategy.ROUND_ROBIN


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"session_ms": 999}, InvalidArgument),
        ({"session_ms": 3_600_001}, InvalidArgument),
        ({"rebalance_ms": 0}, InvalidArgument),
        ({"topics": ()}, InvalidArgument),
        ({"topics": ("orders",) * 1_001}, InvalidArgument),
        ({"topics": ("or ders",)}, InvalidName),
        ({"topics": ("orders.#.eu",)}, InvalidName),
        ({"member_id": ""}, InvalidArgument),
        ({"instance_id": ""}, InvalidArgument),
    ],
)
def test_a_join_beyond_limits_is_refused(group: Group, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        group.join(replace(joining("a"), **wrong))


def test_the_number_of_members_is_limited_but_a_seat_can_be_taken_over(group: Group) -> None:
    group.join(joining("a", instance_id="one"))
    with pytest.raises(QuotaExceeded):
        decide_join(group.state, joining("b"), topics=TOPICS, now_ms=2, members_max=1)
    decide_join(group.state, joining("b", instance_id="one"), topics=TOPICS, now_ms=2, members_max=1)


def test_a_member_id_is_the_client_id_and_a_suffix() -> None:
    assert name_member("billing", "f7e8d9") == "billing-f7e8d9"


# Heartbeats


def test_a_heartbeat_that_changes_nothing_returns_the_same_state(group: Group) -> None:
    pair(group)
    before = group.state
    assert group.beat("a", 2, orders(0, 1)).assigned == orders(0, 1)
    assert group.state is before
    assert group.nudged == frozenset()


def test_a_member_that_has_not_heard_of_the_loss_gives_nothing_back(group: Group) -> None:
    """Its heartbeat may have left before the grant arrived; taking silence for consent makes two readers."""
    group.join(joining("a"))
    group.join(joining("b"))
    group.beat("a", 1, NOTHING)
    assert group.beat("b", 2, NOTHING).assigned == NOTHING
    group.beat("a", 2, NOTHING)
    assert group.beat("b", 2, NOTHING).assigned == orders(2, 3)


def test_a_grant_that_was_not_reported_yet_is_not_taken_away(group: Group) -> None:
    pair(group)
    assert group.beat("a", 2, NOTHING).assigned == orders(0, 1)
    assert group.state.members["a"].owned.keys() == orders(0, 1)


def test_a_member_is_told_to_drop_what_it_claims_without_a_grant(group: Group) -> None:
    pair(group)
    assert group.beat("b", 2, orders(0, 2, 3)).revoke == orders(0)


def test_a_partition_that_comes_back_before_it_was_given_up_stays_where_it_is(group: Group) -> None:
    group.join(joining("a"))
    group.join(joining("b"))
    group.leave("b")
    assert group.state.generation == 3
    assert group.beat("a", 1, orders(0, 1, 2, 3)) == Reply("a", 3, orders(0, 1, 2, 3), NOTHING, NOTHING)


def test_strangers_and_generations_from_nowhere_are_refused(group: Group) -> None:
    pair(group)
    with pytest.raises(UnknownMember):
        group.beat("stranger", 2, NOTHING)
    with pytest.raises(StaleGeneration):
        group.beat("a", 3, NOTHING)


# Eager


def test_an_eager_group_gives_up_everything_before_anybody_gets_anything(group: Group) -> None:
    group.join(replace(joining("a"), protocol=RebalanceProtocol.EAGER))
    assert group.join(joining("b")).assigned == NOTHING
    assert group.nudged == {"a"}
    assert group.beat("a", 1, orders(0, 1, 2, 3)) == Reply(
        "a", 2, NOTHING, revoke=orders(0, 1, 2, 3), waiting=orders(0, 1)
    )
    group.beat("a", 2, orders(0))
    assert group.nudged == frozenset()
    assert group.beat("b", 2, NOTHING).assigned == NOTHING
    (free,) = orders(3)
    assert explain(group.state, free) == "orders/3 goes to b once a gave everything back"

    assert group.beat("a", 2, NOTHING).assigned == orders(0, 1)
    assert group.nudged == {"b"}
    assert group.beat("b", 2, NOTHING).assigned == orders(2, 3)
    assert group_phase(group.state) is Phase.STABLE


def test_removing_the_last_one_to_give_up_lets_an_eager_group_go_on(group: Group) -> None:
    pair(group, protocol=RebalanceProtocol.EAGER)
    group.join(joining("c"))
    group.beat("a", 3, NOTHING)
    assert explain(group.state, TopicPartition("orders", 0)).endswith("once b gave everything back")
    group.expire("b")
    assert not group.state.draining
    assert group.nudged == {"a", "c"}
    taken = [group.beat(name, group.state.generation, NOTHING).assigned for name in "ac"]
    assert frozenset().union(*taken) == orders(0, 1, 2, 3)


# Leaving


def test_when_a_member_leaves_the_others_take_over(group: Group) -> None:
    pair(group)
    group.leave("b")
    assert group.nudged == {"a"}
    assert group.beat("a", 2, orders(0, 1)).assigned == orders(0, 1, 2, 3)
    group.leave("a")
    assert group_phase(group.state) is Phase.EMPTY
    assert group.state.emptied_at_ms == 3
    assert group.state.generation == 3


def test_the_generation_goes_on_after_the_group_was_empty(group: Group) -> None:
    pair(group)
    group.expire("a", "b", "stranger")
    assert group.join(joining("c")).generation == 3


def test_leaving_twice_raises_unknown_member(group: Group) -> None:
    pair(group)
    group.leave("b")
    with pytest.raises(UnknownMember):
        group.leave("b")


# Static members


def test_a_static_member_restarts_without_a_rebalance(group: Group) -> None:
    group.join(joining("a-1", instance_id="seat-a"))
    group.join(joining("b"))
    group.beat("a-1", 2, NOTHING)
    group.beat("b", 2, NOTHING)

    reply = group.join(joining("a-2", instance_id="seat-a"))
    assert reply == Reply("a-2", 2, orders(0, 1), NOTHING, NOTHING)
    assert group.nudged == {"a-1"}, "it may be there still"
    with pytest.raises(UnknownMember):
        group.beat("a-1", 2, NOTHING)
    with pytest.raises(UnknownMember):
        validate_commit(group.state, member_id="a-1", generation=2, partition=TopicPartition("orders", 0))
    validate_commit(group.state, member_id="a-2", generation=2, partition=TopicPartition("orders", 0))


def test_a_restarted_static_member_frees_what_its_old_process_had_to_give_back(group: Group) -> None:
    group.join(joining("a-1", instance_id="seat-a"))
    group.join(joining("b"))
    assert group.join(joining("a-2", instance_id="seat-a")).assigned == orders(0, 1)
    assert group.nudged == {"a-1", "b"}
    assert group.beat("b", 2, NOTHING).assigned == orders(2, 3)


def test_a_static_member_that_leaves_keeps_its_seat_until_it_expires(group: Group) -> None:
    group.join(joining("a", instance_id="seat-a"))
    group.join(joining("b"))
    group.leave("a")
    assert group.nudged == {"b"}, "what it had to give back is free, as its process is gone"
    assert group.beat("b", 2, NOTHING).assigned == orders(2, 3)
    group.expire("a")
    assert group.beat("b", 2, orders(2, 3)).assigned == orders(0, 1, 2, 3)


def test_a_static_member_can_leave_for_good(group: Group) -> None:
    group.join(joining("a", instance_id="seat-a"))
    group.leave("a", permanent=True)
    assert not group.state.members


def test_a_member_whose_place_was_taken_is_told_so_at_once_and_for_good(group: Group) -> None:
    """Were it only unknown it would join again, and the two would take the place from each other for ever."""
    generation = group.join(joining("a-1", instance_id="seat-a")).generation
    group.join(joining("a-2", instance_id="seat-a"))
    assert group.nudged == {"a-1"}
    with pytest.raises(MemberFenced):
        decide_heartbeat(group.state, Heartbeat("a-1", generation, orders(0), "seat-a"))
    with pytest.raises(MemberFenced):
        decide_leave(group.state, Leave("a-1", instance_id="seat-a"), topics=TOPICS, now_ms=3)
    with pytest.raises(MemberFenced):
        group.join(replace(joining("a-1", instance_id="seat-a"), renew=True))
    with pytest.raises(MemberFenced):
        validate_commit(
            group.state,
            member_id="a-1",
            generation=generation,
            partition=TopicPartition("orders", 0),
            instance_id="seat-a",
        )
    assert set(group.state.members) == {"a-2"}


def test_a_group_whose_state_went_back_fences_nobody_who_came_since(group: Group) -> None:
    """As after a restore: it remembers an older process in the place, and has not had the newer one's generation."""
    group.join(joining("a-1", instance_id="seat-a"))
    later = group.state.generation + 1
    with pytest.raises(StaleGeneration):
        decide_heartbeat(group.state, Heartbeat("a-2", later, orders(0), "seat-a"))
    partition = TopicPartition("orders", 0)
    with pytest.raises(StaleGeneration):
        validate_commit(group.state, member_id="a-2", generation=later, partition=partition, instance_id="seat-a")


def test_a_group_whose_state_went_back_does_not_fence_a_successor_that_came_without_a_new_generation(
    group: Group,
) -> None:
    """It had a place and no rival, and stayed out for good: the one that the group remembers there had long ended."""
    group.join(joining("a-1", instance_id="seat-a"))
    backup = group.state
    generation = group.join(joining("a-2", instance_id="seat-a")).generation
    group.state = backup
    with pytest.raises(UnknownMember):
        decide_heartbeat(group.state, Heartbeat("a-2", generation, orders(0), "seat-a"))
    assert group.join(joining("a-3", instance_id="seat-a")).assigned == orders(0, 1, 2, 3)
    with pytest.raises(MemberFenced):
        decide_heartbeat(group.state, Heartbeat("a-1", generation, orders(0), "seat-a"))


def test_a_static_member_that_expired_is_told_that_another_process_has_its_place(group: Group) -> None:
    generation = group.join(joining("a-1", instance_id="seat-a")).generation
    group.expire("a-1")
    group.join(joining("a-2", instance_id="seat-a"))
    with pytest.raises(MemberFenced):
        decide_heartbeat(group.state, Heartbeat("a-1", generation, orders(0), "seat-a"))


def test_a_group_remembers_so_many_that_had_a_place_before_and_not_more(group: Group) -> None:
    for number in range(FORMER_MAX + 2):
        generation = group.join(joining(f"a-{number}", instance_id="seat-a")).generation
    with pytest.raises(MemberFenced):
        decide_heartbeat(group.state, Heartbeat("a-1", generation, NOTHING, "seat-a"))
    assert sum(map(len, group.state.former.values())) == FORMER_MAX
    for number in range(FORMER_PLACES_MAX + 2):
        group.join(joining("b", instance_id=f"seat-{number}"))
        group.leave("b", permanent=True)
    assert len(group.state.former) == FORMER_PLACES_MAX


def test_a_static_member_that_expired_may_join_again_while_nobody_has_its_place(group: Group) -> None:
    generation = group.join(joining("a-1", instance_id="seat-a")).generation
    group.join(joining("b"))
    group.expire("a-1")
    with pytest.raises(UnknownMember):
        decide_heartbeat(group.state, Heartbeat("a-1", generation, orders(0), "seat-a"))


def test_a_member_cannot_change_its_instance_id(group: Group) -> None:
    group.join(joining("a", instance_id="seat-a"))
    with pytest.raises(InvalidArgument, match="seat-a"):
        group.join(joining("a", instance_id="seat-b"))


def test_a_new_member_id_does_not_move_a_static_member_in_the_order_of_the_group() -> None:
    group = Group({"orders": 3})
    group.join(replace(joining("z-1", instance_id="1"), strategy=Strategy.RANGE))
    group.join(joining("m", instance_id="2"))
    before = group.state.members["z-1"].target
    group.join(joining("zz-2", instance_id="1"))
    group.refresh({"orders": 3, "other": 1})
    assert group.state.members["zz-2"].target == before
    assert group.state.generation == 2


# Commits


def check(state: GroupState, member_id: str | None, generation: int, number: int) -> None:
    partition = TopicPartition("orders", number)
    validate_commit(state, member_id=member_id, generation=generation, partition=partition)


def test_only_the_holder_may_commit(group: Group) -> None:
    pair(group)
    check(group.state, "a", 2, 0)
    with pytest.raises(StaleGeneration):
        check(group.state, "a", 2, 2)
    with pytest.raises(UnknownMember):
        check(group.state, "stranger", 2, 0)
    with pytest.raises(StaleGeneration):
        check(group.state, "a", 99, 0)


def test_a_member_may_commit_until_it_has_given_back(group: Group) -> None:
    group.join(joining("a"))
    group.join(joining("b"))
    check(group.state, "a", 1, 0)
    check(group.state, "a", 1, 3)
    group.beat("a", 2, orders(0, 1))
    check(group.state, "a", 1, 0)
    with pytest.raises(StaleGeneration):
        check(group.state, "a", 2, 3)


def test_a_commit_from_an_earlier_time_with_the_same_partition_is_refused(group: Group) -> None:
    """It was under way while another member had the partition and committed further."""
    group.join(joining("a"))
    group.join(joining("b"))
    group.beat("a", 2, orders(0, 1))
    group.beat("b", 2, NOTHING)
    group.leave("b")
    group.beat("a", 3, orders(0, 1))
    with pytest.raises(StaleGeneration, match="granted"):
        check(group.state, "a", 1, 3)
    check(group.state, "a", 3, 3)


def test_an_operator_may_commit_only_while_nobody_is_a_member(group: Group) -> None:
    check(group.state, None, 0, 0)
    group.join(joining("a"))
    with pytest.raises(GroupNotEmpty):
        check(group.state, None, 0, 0)


def test_explain_says_who_reads_and_why_not(group: Group) -> None:
    first = TopicPartition("orders", 0)
    assert explain(group.state, first) == "no member of group workers has subscribed to orders/0"
    group.join(joining("a"))
    assert explain(group.state, first) == "orders/0 is read by a"
    group.refresh({"orders": 5})
    assert explain(group.state, TopicPartition("orders", 4)) == "orders/4 goes to a with its next heartbeat"
    group.refresh({})
    assert explain(group.state, first) == "orders/0 must be given back by a"


@pytest.mark.parametrize(
    "command", [joining("m" * 513), joining("a", instance_id="i" * 513)], ids=["member id", "instance id"]
)
def test_names_of_members_are_no_place_for_data(group: Group, command: Join) -> None:
    """They are written down with every change of the group, and told to everybody."""
    with pytest.raises(InvalidArgument, match="512 letters"):
        group.join(command)
    group.join(joining("m" * 512, instance_id="i" * 512))


# A log that is another one


def lapse(group: Group, *numbers: int) -> None:
    group.take(decide_lapse(group.state, orders(*numbers), topics=group.topics, now_ms=6))


def test_who_holds_a_log_that_was_replaced_lets_go_of_it_before_it_gets_the_new_one(group: Group) -> None:
    pair(group)
    lapse(group, 0, 2)
    assert group.nudged == {"a", "b"}
    assert group_phase(group.state) is Phase.REBALANCING
    assert explain(group.state, TopicPartition("orders", 0)) == "orders/0 must be given back by a, then a gets it"
    with pytest.raises(StaleGeneration):
        validate_commit(group.state, member_id="a", generation=3, partition=TopicPartition("orders", 0))
    validate_commit(group.state, member_id="a", generation=2, partition=TopicPartition("orders", 1))
    assert group.beat("a", 2, orders(1)).assigned == orders(1), "sent before it knew: that it let go is not certain"
    assert group.beat("a", 3, orders(0, 1)) == Reply("a", 3, orders(1), revoke=orders(0), waiting=orders(0))
    assert group.beat("a", 3, orders(1)).assigned == orders(0, 1)
    with pytest.raises(StaleGeneration):
        validate_commit(group.state, member_id="a", generation=3, partition=TopicPartition("orders", 0))
    validate_commit(group.state, member_id="a", generation=4, partition=TopicPartition("orders", 0))
    group.beat("b", 4, orders(3))
    assert group_phase(group.state) is Phase.STABLE


def test_a_log_that_nobody_holds_lapses_without_a_new_generation(group: Group) -> None:
    pair(group)
    before = group.state
    group.take(decide_lapse(before, [TopicPartition("audit", 0)], topics=group.topics, now_ms=6))
    assert group.state is before


def test_the_successor_of_a_static_member_gets_the_new_log_at_once(group: Group) -> None:
    group.join(joining("a", instance_id="seat"))
    lapse(group, 0)
    assert group.join(joining("a2", instance_id="seat")).assigned == orders(0, 1, 2, 3)
    assert not group.state.members["a2"].lapsed


def test_a_deleted_topic_that_comes_back_before_a_heartbeat_is_not_taken_for_the_old_one(group: Group) -> None:
    reply = group.join(joining("a"))
    group.topics = {}
    lapse(group, 0, 1, 2, 3)
    group.refresh({"orders": 4})
    seen = group.beat("a", reply.generation, orders(0, 1, 2, 3))
    assert (seen.assigned, seen.waiting) == (NOTHING, orders(0, 1, 2, 3))
    assert group.beat("a", seen.generation, NOTHING).assigned == orders(0, 1, 2, 3)


def test_a_group_begins_once_with_each_name_and_pattern(group: Group) -> None:
    topics = {"orders": 1, "orders.eu": 2, "audit": 1}
    europe = [TopicPartition("orders.eu", 0), TopicPartition("orders.eu", 1)]
    assert newly_covered(group.state, ["orders.*"], topics) == europe
    group.join(joining("a", "orders.*"))
    assert newly_covered(group.state, ["orders.*"], topics) == []
    assert newly_covered(group.state, ["orders.eu", "audit"], topics) == [TopicPartition("audit", 0)]
    group.leave("a")
    assert newly_covered(group.state, ["orders.*"], topics) == []


def test_a_group_forgets_the_oldest_names_that_it_began_with() -> None:
    names = [f"t{number}" for number in range(BEGUN_MAX + 1)]
    assert begun_with(tuple(names[:-1]), names[-1:]) == tuple(names[1:])
    assert begun_with(("a", "b"), ["b", "c"]) == ("a", "b", "c")
