"""The three strategies on examples small enough to check by eye."""

from __future__ import annotations

from millstream.groups.assignors import assign_range, assign_round_robin, assign_sticky
from millstream.groups.records import TopicPartition


def numbers(assignment: dict[str, frozenset[TopicPartition]]) -> dict[str, list[str]]:
    return {member: sorted(str(partition) for partition in held) for member, held in assignment.items()}


def test_range_keeps_equal_numbers_of_two_topics_together() -> None:
    members = {"a": ["left", "right"], "b": ["left", "right"]}
    assert numbers(assign_range(members, {"left": 3, "right": 3})) == {
        "a": ["left/0", "left/1", "right/0", "right/1"],
        "b": ["left/2", "right/2"],
    }


def test_round_robin_goes_on_around_the_circle_from_topic_to_topic() -> None:
    members = {"a": ["left", "right"], "b": ["left", "right"]}
    assert numbers(assign_round_robin(members, {"left": 3, "right": 3})) == {
        "a": ["left/0", "left/2", "right/1"],
        "b": ["left/1", "right/0", "right/2"],
    }


def test_round_robin_skips_members_that_have_not_subscribed() -> None:
    members = {"a": ["left"], "b": ["right"], "c": ["left", "right"]}
    assert numbers(assign_round_robin(members, {"left": 2, "right": 2})) == {
        "a": ["left/0"],
        "b": ["right/0"],
        "c": ["left/1", "right/1"],
    }


def test_sticky_passes_partitions_on_over_a_member_in_between() -> None:
    """a can only unload onto b, and b only onto c: the chain must be found although a and b differ by one."""
    members = {"a": ["x"], "b": ["x", "y"], "c": ["y"]}
    previous = {TopicPartition("x", number): "a" for number in range(3)}
    previous |= {TopicPartition("y", number): "b" for number in range(2)}
    after = assign_sticky(members, {"x": 3, "y": 2}, previous)
    assert sorted(map(len, after.values())) == [1, 2, 2]


def test_a_topic_without_partitions_or_readers_is_no_trouble() -> None:
    for assignor in (assign_range, assign_round_robin, lambda m, p: assign_sticky(m, p, {})):
        assert assignor({"a": ["empty"]}, {"empty": 0, "unread": 4}) == {"a": frozenset()}
        assert assignor({}, {"unread": 4}) == {}
