"""Shared subscriptions: members take turns, and those who are away cost nothing."""

from __future__ import annotations

from typing import Any

from millstream.broker.mqtt.parcel import Parcel
from millstream.broker.mqtt.reading import Place
from millstream.broker.mqtt.shares import Share
from millstream.broker.mqtt.subscription import Subscription
from millstream.mqtt.messages import Message

PARCEL = Parcel(Message("jobs", b"x"), 0)
PLACE = Place("jobs", 0, 7, 0)


class Member:
    """A session, as far as a share is concerned."""

    asked = 0

    def __init__(self, *, is_there: bool = True, takes: bool = True, lasts: bool = False, room: int = 0) -> None:
        self.is_there = is_there
        self.takes = takes
        self.lasts = lasts
        self.room = room
        self.got = 0
        self.kept = 0
        self.dropped = 0

    @property
    def client(self) -> object | None:
        Member.asked += 1
        return self if self.is_there else None

    def offer(self, *_: object) -> bool:
        self.got += self.takes
        return self.takes

    def keep(self, *_: object) -> bool:
        Member.asked += 1
        has_room = self.kept < self.room
        self.kept += has_room
        return has_room

    def count_dropped(self) -> None:
        self.dropped += 1


def share_of(*members: Any) -> Share:
    share = Share("workers", "jobs")
    for member in members:
        share.join(member, Subscription("$share/workers/jobs", 1))
    return share


def test_members_take_turns_and_whoever_does_not_take_it_is_passed_over() -> None:
    members = [Member(), Member(takes=False), Member()]
    share = share_of(*members)
    assert all(share.offer(PARCEL, None) for _ in range(10))
    assert [member.got for member in members] == [5, 0, 5]
    assert share.offer(PARCEL, None, but=members[0])  # type: ignore[arg-type]
    assert [member.got for member in members] == [5, 0, 6]
    members[0].takes = members[2].takes = False
    assert not share.offer(PARCEL, None)


def test_those_who_are_away_are_not_asked_again_for_every_message() -> None:
    there = [Member() for _ in range(3)]
    away = [Member(is_there=False) for _ in range(1_000)]
    share = share_of(*away, *there)
    assert share.offer(PARCEL, None)
    Member.asked = 0
    for _ in range(299):
        assert share.offer(PARCEL, None)
    assert Member.asked <= 299
    assert [member.got for member in there] == [100] * 3
    back = away[7]
    back.is_there = True
    share.returned(back)  # type: ignore[arg-type]
    for _ in range(4):
        assert share.offer(PARCEL, None)
    assert back.got == 1
    share.leave(back)  # type: ignore[arg-type]
    for _ in range(8):
        assert share.offer(PARCEL, None)
    assert back.got == 1
    assert len(share.members) == 1_002


def test_a_share_whose_members_are_all_away_gives_nothing_to_anybody() -> None:
    share = share_of(Member(is_there=False))
    assert not share.offer(PARCEL, None)
    assert not share.offer(PARCEL, None)
    assert not share_of().offer(PARCEL, None)


def test_a_message_waits_for_members_that_last_in_turn_only_while_nobody_is_there() -> None:
    passing, lasting = Member(), [Member(is_there=False, lasts=True, room=10) for _ in range(2)]
    share = share_of(passing, *lasting)
    assert share.is_durable
    assert share.offer(PARCEL, PLACE)
    assert (passing.got, [member.kept for member in lasting]) == (1, [0, 0])
    passing.is_there = False
    assert all(share.offer(PARCEL, PLACE) for _ in range(6))
    assert [member.kept for member in lasting] == [3, 3]
    assert not share.offer(PARCEL, None), "it could not be found again"
    assert not share.offer(Parcel(Message("jobs", b"x", qos=0), 0), PLACE)
    share.leave(lasting[0])  # type: ignore[arg-type]
    share.leave(lasting[1])  # type: ignore[arg-type]
    assert not share.is_durable
    assert not share.offer(PARCEL, PLACE)


def test_a_member_that_lasts_keeps_what_nobody_else_takes_and_those_that_are_away_do_not_get_it() -> None:
    gone, away = Member(is_there=False, lasts=True, room=10), Member(is_there=False, lasts=True, room=10)
    share = share_of(gone, away)
    assert not share.offer(PARCEL, PLACE, but=gone)  # type: ignore[arg-type]
    share.leave(gone)  # type: ignore[arg-type]
    assert share.offer(PARCEL, PLACE, but=gone)  # type: ignore[arg-type]
    assert (gone.kept, away.kept) == (0, 1)


def test_those_that_are_away_and_full_are_not_asked_for_every_message() -> None:
    full = [Member(is_there=False, lasts=True) for _ in range(1_000)]
    share = share_of(*full)
    assert not share.offer(PARCEL, PLACE)
    Member.asked = 0
    for _ in range(100):
        assert not share.offer(PARCEL, PLACE)
    assert Member.asked == 0
    assert sum(member.dropped for member in full) == 101
    full[3].is_there = True
    share.returned(full[3])  # type: ignore[arg-type]
    assert share.offer(PARCEL, PLACE)
    full[3].is_there, full[3].room = False, 1
    assert share.offer(PARCEL, PLACE)
    assert full[3].kept == 1
