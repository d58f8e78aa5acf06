"""Target against reality: what a member may hold now, and what it must give back first.

A partition has one *target* member, and at most one member that *owns* it, which is the one that was granted
it and has not given it back.  It may be granted only when nobody owns it; this one rule is what keeps two
members from reading the same partition.  With the eager protocol a group first *drains*: nothing is granted
until nothing is owned.

The functions here only look at or move ownership; who is a member and what the target is, `core.py` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from millstream.groups.records import GroupState, Member, Phase, Reply, TopicPartition

__all__ = [
    "check_exclusive",
    "explain",
    "gainers",
    "grant",
    "group_phase",
    "must_give_back",
    "release",
    "reply_to",
    "views",
    "with_member",
]

_NOTHING: frozenset[TopicPartition] = frozenset()


def must_give_back(state: GroupState, member: Member) -> frozenset[TopicPartition]:
    """What the member owns and may not keep."""
    return frozenset(member.owned if state.draining else member.owned.keys() - (member.target - member.lapsed))


def reply_to(state: GroupState, member_id: str, reported: Iterable[TopicPartition] = ()) -> Reply:
    """What to tell a member that says it holds `reported`.  Call `grant` first: only what is owned counts."""
    member = state.members[member_id]
    assigned = _NOTHING if state.draining else frozenset(member.owned.keys() & (member.target - member.lapsed))
    return Reply(
        member_id=member_id,
        generation=state.generation,
        assigned=assigned,
        # Also what it claims but was never granted: a member that was removed and came back may still be
        # reading.
        revoke=frozenset(member.owned.keys() | set(reported)) - assigned,
        waiting=member.target - assigned,
    )


def grant(state: GroupState, member_id: str) -> GroupState:
    """Give the member what is its own by the target and nobody else's any more."""
    member = state.members[member_id]
    wanted = member.target - member.owned.keys()
    if state.draining or not wanted:
        return state
    free = wanted.difference(*(other.owned for other in state.members.values()))
    if not free:
        return state
    owned = {**member.owned, **dict.fromkeys(sorted(free), state.generation)}
    return with_member(state, replace(member, owned=owned))


def release(state: GroupState, member_id: str, freed: Collection[TopicPartition]) -> GroupState:
    """Take back what the member has given up; the last one to do so ends the draining of an eager group."""
    if not freed:
        return state
    member = state.members[member_id]
    owned = {partition: granted for partition, granted in member.owned.items() if partition not in freed}
    state = with_member(state, replace(member, owned=owned, lapsed=member.lapsed.difference(freed)))
    if state.draining and not any(other.owned for other in state.members.values()):
        state = replace(state, draining=False)
    return state


def gainers(before: GroupState, after: GroupState, freed: Collection[TopicPartition]) -> frozenset[str]:
    """Who can be granted more after a release."""
    if after.draining or not freed:
        return frozenset()
    if before.draining:
        return frozenset(key for key, member in after.members.items() if member.target)
    return frozenset(key for key, member in after.members.items() if not member.target.isdisjoint(freed))


def views(state: GroupState) -> dict[str, tuple[frozenset[TopicPartition], frozenset[TopicPartition]]]:
    """Per member: what it may hold now, granted or not, and what it must give back."""
    owners = {partition: key for key, member in state.members.items() for partition in member.owned}
    return {
        member_id: (
            _NOTHING
            if state.draining
            else frozenset(p for p in member.target - member.lapsed if owners.get(p, member_id) == member_id),
            must_give_back(state, member),
        )
        for member_id, member in state.members.items()
    }


def group_phase(state: GroupState) -> Phase:
    if not state.members:
        return Phase.EMPTY
    members = state.members.values()
    if state.draining or any(member.lapsed or member.owned.keys() != member.target for member in members):
        return Phase.REBALANCING
    return Phase.STABLE


def explain(state: GroupState, partition: TopicPartition) -> str:
    """One sentence on who reads the partition, or why nobody does."""
    owner = next((m.member_id for m in state.members.values() if partition in m.owned), None)
    heir = next((m.member_id for m in state.members.values() if partition in m.target), None)
    if owner is not None and state.draining:
        return f"{partition} must be given back by {owner} before the eager rebalance can go on"
    if owner is not None and owner == heir and partition not in state.members[owner].lapsed:
        return f"{partition} is read by {owner}"
    if owner is not None:
        return f"{partition} must be given back by {owner}" + (f", then {heir} gets it" if heir else "")
    if heir is not None and state.draining:
        late = sorted(m.member_id for m in state.members.values() if m.owned)
        return f"{partition} goes to {heir} once {', '.join(late)} gave everything back"
    if heir is not None:
        return f"{partition} goes to {heir} with its next heartbeat"
    if state.paused:
        return f"{partition} is read by nobody, because group {state.name} is paused"
    return f"no member of group {state.name} has subscribed to {partition}"


def with_member(state: GroupState, member: Member) -> GroupState:
    members: Mapping[str, Member] = {**state.members, member.member_id: member}
    return replace(state, members=members)


def check_exclusive(state: GroupState) -> None:
    """The safety of the whole module, as an assertion: nothing is owned, or meant to be owned, twice."""
    owned: set[TopicPartition] = set()
    target: set[TopicPartition] = set()
    for member in state.members.values():
        assert owned.isdisjoint(member.owned), f"{state.name}: {member.member_id} owns what another owns"
        assert target.isdisjoint(member.target), f"{state.name}: {member.member_id} shares a target"
        owned |= member.owned.keys()
        target |= member.target
