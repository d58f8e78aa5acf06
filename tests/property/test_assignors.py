"""Assignors for every input: complete, exclusive, only to subscribers, even, steady, and sticky."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from millstream.groups.assignors import Assignment, assign, assign_range, assign_sticky
from millstream.groups.records import Strategy, TopicPartition

TOPICS = ("audit", "orders.eu", "orders.us")
MEMBERS = ("a", "b", "c", "d", "e")

strategies = st.sampled_from(list(Strategy))
partition_counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 7))
subscriptions = st.dictionaries(st.sampled_from(MEMBERS), st.sets(st.sampled_from((*TOPICS, "gone"))))
equal_subscriptions = st.sets(st.sampled_from(MEMBERS), min_size=1).map(
    lambda members: {member: set(TOPICS) for member in sorted(members)}
)
anywhere = st.builds(TopicPartition, st.sampled_from((*TOPICS, "gone")), st.integers(0, 9))
previous_owners = st.dictionaries(anywhere, st.sampled_from((*MEMBERS, "departed")))


def everything(partitions: dict[str, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, n) for topic in sorted(partitions) for n in range(partitions[topic])]


def owners(assignment: Assignment) -> dict[TopicPartition, str]:
    return {partition: member for member, held in assignment.items() for partition in held}


def kept(assignment: Assignment, previous: dict[TopicPartition, str]) -> int:
    return sum(previous.get(partition) == member for partition, member in owners(assignment).items())


def unevenness(loads: list[int]) -> int:
    """The sum of squares is least exactly when no chain of hand-overs makes the loads more even."""
    return sum(load * load for load in loads)


@given(strategies, subscriptions, partition_counts, previous_owners)
def test_every_readable_partition_goes_to_exactly_one_subscriber(
    strategy: Strategy,
    members: dict[str, set[str]],
    partitions: dict[str, int],
    previous: dict[TopicPartition, str],
) -> None:
    assignment = assign(strategy, members, partitions, previous)
    assert assignment.keys() == members.keys()
    readable = {p for p in everything(partitions) if any(p.topic in topics for topics in members.values())}
    dealt = [partition for held in assignment.values() for partition in held]
    assert len(dealt) == len(set(dealt)), "a partition was given to two members"
    assert set(dealt) == readable
    for member, held in assignment.items():
        assert {partition.topic for partition in held} <= members[member]


@given(strategies, equal_subscriptions, partition_counts, previous_owners)
def test_members_with_equal_subscriptions_get_equal_shares(
    strategy: Strategy,
    members: dict[str, set[str]],
    partitions: dict[str, int],
    previous: dict[TopicPartition, str],
) -> None:
    assignment = assign(strategy, members, partitions, previous)
    if strategy is Strategy.RANGE:  # even per topic, and therefore not over all of them
        groups = [[p for p in everything(partitions) if p.topic == topic] for topic in partitions]
    else:
        groups = [everything(partitions)]
    for group in groups:
        loads = [len(held.intersection(group)) for held in assignment.values()]
        assert max(loads) - min(loads) <= 1


@given(equal_subscriptions, partition_counts)
def test_range_gives_longer_runs_first(members: dict[str, set[str]], partitions: dict[str, int]) -> None:
    assignment = assign_range(members, partitions)
    for topic, count in partitions.items():
        runs = [sorted(p.partition for p in held if p.topic == topic) for held in assignment.values()]
        assert [number for run in runs for number in run] == list(range(count))
        assert sorted(map(len, runs), reverse=True) == list(map(len, runs))


@given(strategies, subscriptions, partition_counts, previous_owners)
def test_the_answer_does_not_depend_on_the_order_of_topics_and_history(
    strategy: Strategy,
    members: dict[str, set[str]],
    partitions: dict[str, int],
    previous: dict[TopicPartition, str],
) -> None:
    reordered_members = {member: sorted(topics, reverse=True) for member, topics in members.items()}
    reordered_partitions = dict(reversed(partitions.items()))
    reordered_previous = dict(reversed(previous.items()))
    assert assign(strategy, members, partitions, previous) == assign(
        strategy, reordered_members, reordered_partitions, reordered_previous
    )


@given(subscriptions, partition_counts, previous_owners)
def test_sticky_leaves_its_own_answer_alone(
    members: dict[str, set[str]], partitions: dict[str, int], previous: dict[TopicPartition, str]
) -> None:
    assignment = assign_sticky(members, partitions, previous)
    assert assign_sticky(members, partitions, owners(assignment)) == assignment


@given(equal_subscriptions, partition_counts, previous_owners)
def test_sticky_moves_no_more_than_evenness_demands(
    members: dict[str, set[str]], partitions: dict[str, int], previous: dict[TopicPartition, str]
) -> None:
    """With equal subscriptions the most that can stay is known: all that fits into each member's share."""
    share, extra = divmod(len(everything(partitions)), len(members))
    had = Counter(previous.get(partition) for partition in everything(partitions))
    most = sum(min(had[member], share) for member in members)
    most += min(extra, sum(had[member] > share for member in members))
    assert kept(assign_sticky(members, partitions, previous), previous) == most


@given(
    st.dictionaries(st.sampled_from(("a", "b", "c")), st.sets(st.sampled_from(TOPICS))),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 2)),
    previous_owners,
)
def test_sticky_is_as_even_as_the_best_of_all_assignments(
    members: dict[str, set[str]], partitions: dict[str, int], previous: dict[TopicPartition, str]
) -> None:
    """Against brute force, with any subscriptions: exactly as even, and at most one more is moved."""
    assignment = assign_sticky(members, partitions, previous)
    readable = sorted(owners(assignment))
    choices = [[member for member in members if p.topic in members[member]] for p in readable]
    best = min(
        (
            unevenness(list(Counter(choice).values())),
            -sum(previous.get(p) == member for p, member in zip(readable, choice, strict=True)),
        )
        for choice in product(*choices)
    )
    assert unevenness([len(held) for held in assignment.values()]) == best[0]
    assert kept(assignment, previous) >= -best[1] - 1


@given(equal_subscriptions, partition_counts, st.sampled_from(MEMBERS))
def test_when_a_member_leaves_only_its_partitions_move(
    members: dict[str, set[str]], partitions: dict[str, int], leaver: str
) -> None:
    before = assign_sticky(members, partitions, {})
    remaining = {member: topics for member, topics in members.items() if member != leaver}
    after = assign_sticky(remaining, partitions, owners(before))
    for member in remaining:
        assert before[member] <= after[member]


@given(equal_subscriptions, partition_counts)
def test_a_newcomer_takes_its_share_and_nobody_else_gains(
    members: dict[str, set[str]], partitions: dict[str, int]
) -> None:
    before = assign_sticky(members, partitions, {})
    after = assign_sticky({**members, "newcomer": set(TOPICS)}, partitions, owners(before))
    assert len(after["newcomer"]) == len(everything(partitions)) // (len(members) + 1)
    for member in members:
        assert after[member] <= before[member]
