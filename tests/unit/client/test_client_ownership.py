"""What a member lists in its heartbeats: never less than it reads, never more than it was given."""

from __future__ import annotations

import copy
import random

from hypothesis import given
from hypothesis import strategies as st

from millstream.client.messages import TopicPartition
from millstream.client.ownership import Ownership
from millstream.wire.calls import Assignment, TopicPartitions

PLACES = [TopicPartition("t", number) for number in range(4)]


def assignment(generation: int, *numbers: int, pending: tuple[int, ...] = ()) -> Assignment:
    return Assignment(
        member_id="m",
        generation=generation,
        partitions=[TopicPartitions(topic="t", partitions=list(numbers))] if numbers else [],
        pending=[TopicPartitions(topic="t", partitions=list(pending))] if pending else [],
    )


def listed(ownership: Ownership) -> list[int]:
    return [number for entry in ownership.listing() for number in entry.partitions]


def begin(ownership: Ownership) -> None:
    ownership.took(ownership.changes(set(), 0).take)


def test_what_is_granted_is_listed_at_once_and_taken_when_the_stream_is_ready() -> None:
    ownership = Ownership()
    assert ownership.follow(assignment(1, 0, 1, pending=(2,)), patience_until_s=0) == (True, False)
    assert listed(ownership) == [0, 1]
    assert ownership.awaiting
    changes = ownership.changes(set(), 0)
    assert changes.take == set(PLACES[:2])
    assert set(ownership.took(changes.take)) == changes.take
    assert ownership.changes(set(PLACES[:2]), 0).take == set()


def test_what_must_be_given_up_is_listed_until_the_stream_has_let_go() -> None:
    ownership = Ownership()
    ownership.follow(assignment(1, 0, 1), patience_until_s=0)
    begin(ownership)
    assert ownership.follow(assignment(2, 1), patience_until_s=50) == (True, False)
    assert listed(ownership) == [0, 1]
    assert ownership.changes(set(PLACES[:2]), 0).give_up == {PLACES[0]}
    assert ownership.patience_ends_s() == 50
    ownership.dropped({PLACES[0]}, lost=False)
    assert listed(ownership) == [1]


def test_what_the_stream_has_not_begun_with_is_given_up_at_once() -> None:
    ownership = Ownership()
    ownership.follow(assignment(1, 0, 1), patience_until_s=0)
    assert ownership.follow(assignment(2, 1), patience_until_s=0) == (False, True)
    assert listed(ownership) == [1]


def test_a_partition_that_is_given_back_in_time_stays() -> None:
    ownership = Ownership()
    ownership.follow(assignment(1, 0), patience_until_s=0)
    begin(ownership)
    ownership.follow(assignment(2), patience_until_s=50)
    ownership.follow(assignment(3, 0), patience_until_s=50)
    changes = ownership.changes({PLACES[0]}, 0)
    assert (changes.take, changes.give_up, changes.lost) == (set(), set(), set())


def test_an_older_answer_changes_nothing() -> None:
    ownership = Ownership()
    ownership.follow(assignment(5, 0), patience_until_s=0)
    assert ownership.follow(assignment(4), patience_until_s=0) == (False, False)
    assert listed(ownership) == [0]


def test_what_is_given_up_by_force_and_granted_again_is_lost_first() -> None:
    """Somebody else may have read on meanwhile: the stream must not go on from where it was."""
    ownership = Ownership()
    ownership.follow(assignment(1, 0), patience_until_s=0)
    begin(ownership)
    ownership.follow(assignment(2), patience_until_s=50)
    assert ownership.late(49) == set()
    assert ownership.late(50) == {PLACES[0]}
    ownership.force(ownership.late(50))
    assert listed(ownership) == []
    ownership.follow(assignment(3, 0), patience_until_s=90)
    changes = ownership.changes({PLACES[0]}, 0)
    assert changes.lost == changes.take == {PLACES[0]}
    ownership.dropped(changes.lost, lost=True)
    ownership.took(changes.take)
    assert ownership.holds(PLACES[0])


def test_a_partition_that_went_and_came_back_is_held_anew() -> None:
    """By force or in good order: what was read before says nothing any more."""
    ownership = Ownership()
    numbers = []
    for generation in range(1, 7, 2):
        ownership.follow(assignment(generation, 0), patience_until_s=0)
        (number,) = ownership.took(ownership.changes(set(), 0).take).values()
        assert ownership.holds(PLACES[0], number)
        assert not any(ownership.holds(PLACES[0], earlier) for earlier in numbers)
        numbers.append(number)
        ownership.follow(assignment(generation + 1), patience_until_s=0)
        assert ownership.holds(PLACES[0], number), "until the stream has let go of it"
        if generation == 1:
            ownership.force({PLACES[0]})
        ownership.dropped({PLACES[0]}, lost=generation == 1)
        assert not ownership.holds(PLACES[0], number)


def test_after_everything_was_lost_the_same_partitions_are_new_ones() -> None:
    ownership = Ownership()
    ownership.follow(assignment(7, 0, 1), patience_until_s=0)
    begin(ownership)
    ownership.lose_everything()
    ownership.follow(assignment(1, 0), patience_until_s=0)
    changes = ownership.changes(set(PLACES[:2]), 0)
    assert changes.lost == set(PLACES[:2])
    assert changes.take == {PLACES[0]}


def test_what_was_taken_away_during_the_lookup_is_not_begun_with() -> None:
    """Otherwise two members read it: it was released already, as the stream had not begun with it."""
    ownership = Ownership()
    ownership.follow(assignment(1, 0, 1), patience_until_s=0)
    taking = ownership.changes(set(), 0).take
    ownership.follow(assignment(2, 1), patience_until_s=0)
    assert listed(ownership) == [1]
    assert set(ownership.took(taking)) == {PLACES[1]}
    assert not ownership.holds(PLACES[0])


def test_what_was_taken_away_and_granted_again_during_the_lookup_is_looked_up_again() -> None:
    """Somebody else may have read on in between: what the lookup says is too old."""
    ownership = Ownership()
    ownership.follow(assignment(1, 0), patience_until_s=0)
    taking = ownership.changes(set(), 0).take
    ownership.follow(assignment(2), patience_until_s=0)
    ownership.follow(assignment(3, 0), patience_until_s=0)
    assert set(ownership.took(taking)) == set()
    assert ownership.changes(set(), 0).take == {PLACES[0]}


def test_what_was_lost_during_the_lookup_is_looked_up_again() -> None:
    ownership = Ownership()
    ownership.follow(assignment(7, 0), patience_until_s=0)
    taking = ownership.changes(set(), 0).take
    ownership.lose_everything()
    ownership.follow(assignment(1, 0), patience_until_s=0)
    assert set(ownership.took(taking)) == set()
    assert ownership.changes(set(), 0).take == {PLACES[0]}


def test_what_is_owned_and_not_begun_with_is_said_every_time() -> None:
    """A lookup may fail; the partition must not stay unread because it was mentioned once."""
    ownership = Ownership()
    ownership.follow(assignment(1, 0, 1), patience_until_s=0)
    for _ in range(3):
        assert ownership.changes(set(), 0).take == set(PLACES[:2])
    ownership.took({PLACES[1]})
    assert ownership.changes({PLACES[1]}, 0).take == {PLACES[0]}


@given(st.integers(0, 10**9))
def test_what_is_read_is_always_listed(seed: int) -> None:
    """Lookups take time: between being told of partitions and beginning with them anything may happen."""
    source = random.Random(seed)
    ownership, reading, epoch, generation, now_s = Ownership(), set[TopicPartition](), 0, 0, 0.0
    taking = set[TopicPartition]()
    for _ in range(80):
        now_s += 1
        match source.randrange(6):
            case 0 | 1:
                generation += source.randint(0, 1)
                numbers = source.sample(range(4), source.randint(0, 4))
                ownership.follow(assignment(generation, *numbers), patience_until_s=now_s + source.randint(0, 20))
            case 2 | 3:
                changes = ownership.changes(reading, epoch)
                epoch = changes.epoch
                reading -= changes.lost | changes.give_up
                ownership.dropped(changes.lost, lost=True)
                ownership.dropped(changes.give_up, lost=False)
                taking = changes.take
                assert {place.partition for place in reading} <= set(listed(ownership))
            case 4:
                begun = ownership.took(place for place in taking if source.random() < 0.7)
                assert {place.partition for place in begun} <= set(listed(ownership))
                reading |= begun.keys()
            case 5:
                if source.random() < 0.3:
                    ownership.lose_everything()
                    generation = 0
                else:
                    ownership.force(ownership.late(now_s))
        # What is read but no longer listed is known to the stream as lost the next time it looks.
        hidden = {place for place in reading if place.partition not in listed(ownership)}
        assert hidden <= copy.deepcopy(ownership).changes(reading, epoch).lost
