"""Stream groups: members come and go, partitions follow.

The broker decides the target assignment; members follow it by heartbeat.  A change of members or topics makes
a new target with a new generation.  Each member learns from its next heartbeat what it may hold and what it
must give back, says in a later heartbeat what it still holds, and whoever waits for a partition is granted it
once it is free.  No member ever waits for the whole group (unless the group is eager), and there is no leader
among the members.

Every function is pure: it looks at a state and returns the next one, the answer, and who should be told to
send a heartbeat soon.  The caller records the new state before anybody sees it, so a restart continues a
half-done rebalance where it stood.  `now_ms` is UTC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from millstream.errors import (
    GroupNotEmpty,
    InvalidArgument,
    MemberFenced,
    QuotaExceeded,
    StaleGeneration,
    UnknownMember,
)
from millstream.groups.assignors import assign
from millstream.groups.beginnings import begun_with, matching_topics
from millstream.groups.ownership import gainers, grant, must_give_back, release, reply_to, views, with_member
from millstream.groups.records import (
    FORMER_MAX,
    FORMER_PLACES_MAX,
    MEMBER_LETTERS_MAX,
    MEMBERS_MAX,
    SESSION_MS_MAX,
    SESSION_MS_MIN,
    SUBSCRIPTIONS_MAX,
    GroupState,
    Heartbeat,
    Join,
    Leave,
    Member,
    RebalanceProtocol,
    Reply,
    Strategy,
    TopicPartition,
    Transition,
)
from millstream.names import check_pattern, check_topic, is_pattern

__all__ = [
    "Topics",
    "decide_expire",
    "decide_heartbeat",
    "decide_join",
    "decide_lapse",
    "decide_leave",
    "decide_pause",
    "decide_rebalance",
    "decide_refresh",
    "new_group",
    "validate_commit",
]


#: All topics that the group may read, with their partition counts.  Names and patterns are matched here.
Topics = Mapping[str, int]


def new_group(name: str, *, now_ms: int) -> GroupState:
    """A group without members, as the first join finds it."""
    return GroupState(name=name, created_at_ms=now_ms, emptied_at_ms=now_ms)


def decide_join(
    state: GroupState,
    command: Join,
    *,
    topics: Topics,
    now_ms: int,
    members_max: int = MEMBERS_MAX,
) -> Transition[Reply]:
    """Add a member, refresh one of the same `member_id`, or give a static member's place to its successor.

    A successor takes over the assignment without a rebalance; the old process, if there still is one, is fenced by
    its next request: were it to join again, the two would take the place from each other for ever.  Raises
    InvalidArgument (limits, another strategy or protocol than the group's), InvalidName, QuotaExceeded, and
    UnknownMember or MemberFenced if there is no membership to renew.
    """
    _check_join(command)
    known = state.members.get(command.member_id)
    current = _member(state, command.member_id, command.instance_id) if command.renew else known
    if current is not None and current.instance_id != command.instance_id:
        raise InvalidArgument(
            f"member {command.member_id} has instance id {current.instance_id}, not {command.instance_id}"
        )
    if current is None and command.instance_id is not None:
        current = next((m for m in state.members.values() if m.instance_id == command.instance_id), None)
    if current is None and len(state.members) >= members_max:
        raise QuotaExceeded(f"group {state.name} has {members_max} members already, which is the limit")
    seated = _with_settings(state, command)
    seated = replace(seated, begun=begun_with(seated.begun, command.topics))
    if current is None:
        after = _seat(seated, _new_member(command, now_ms))
        subscription_changed = True
    else:
        after = _renew(seated, current, command, now_ms)
        subscription_changed = set(current.topics) != set(command.topics)
    if subscription_changed:
        after = _retarget(after, topics, now_ms)
    after = grant(after, command.member_id)
    if after == state:
        after = state
    nudged = _nudged(state, after) - {command.member_id}
    fenced = state.members.keys() - after.members.keys()
    return Transition(after, reply_to(after, command.member_id), nudged | fenced)


def decide_heartbeat(state: GroupState, command: Heartbeat) -> Transition[Reply]:
    """Take back what the member gave up, grant what became free, and say what it may hold.

    Returns the same state object when nothing changed.  Raises UnknownMember, after which the member must
    drop everything and join again, MemberFenced, after which it must not, and StaleGeneration for a generation that
    this group never had.
    """
    _check_generation(state, command.generation)
    member = _member(state, command.member_id, command.instance_id)
    freed: frozenset[TopicPartition] = frozenset()
    if command.generation >= member.revoke_generation:
        freed = must_give_back(state, member) - command.owned
    released = release(state, member.member_id, freed)
    if freed & member.lapsed:
        # The member may get it again at once, while a commit of an offset of the old log is still on its way.
        released = replace(released, generation=state.generation + 1)
    after = grant(released, member.member_id)
    nudged = gainers(state, released, freed) - {member.member_id}
    return Transition(after, reply_to(after, member.member_id, command.owned), nudged)


def decide_leave(state: GroupState, command: Leave, *, topics: Topics, now_ms: int) -> Transition[None]:
    """Remove a member, or let a static one go without giving its place away.

    What a static member was asked to give back is free at once, as its process is gone.
    """
    member = _member(state, command.member_id, command.instance_id)
    if member.instance_id is None or command.permanent:
        return _remove(state, {command.member_id}, topics, now_ms)
    freed = must_give_back(state, member)
    after = release(state, member.member_id, freed)
    return Transition(after, None, gainers(state, after, freed))


def decide_expire(
    state: GroupState,
    late: Collection[str],
    *,
    topics: Topics,
    now_ms: int,
) -> Transition[None]:
    """Remove members that are late (see `Sessions.late`); their partitions pass on at once."""
    return _remove(state, state.members.keys() & set(late), topics, now_ms)


def decide_refresh(state: GroupState, *, topics: Topics, now_ms: int) -> Transition[None]:
    """Follow topics that were created, deleted or given more partitions."""
    after = _retarget(state, topics, now_ms)
    return Transition(after, None, _nudged(state, after))


def decide_lapse(
    state: GroupState, partitions: Collection[TopicPartition], *, topics: Topics, now_ms: int
) -> Transition[None]:
    """The logs of these partitions are gone, whether or not there are others in their place.

    Who holds one lets go of it before it is granted again: offsets of the old log say nothing about the new one.
    """
    held = {key: (member.owned.keys() & set(partitions)) - member.lapsed for key, member in state.members.items()}
    after = _retarget(state, topics, now_ms)
    if not any(held.values()):
        return Transition(after, None, _nudged(state, after))
    generation = state.generation + 1
    members = {
        key: replace(member, lapsed=member.lapsed | held[key], revoke_generation=generation) if held[key] else member
        for key, member in after.members.items()
    }
    after = replace(after, generation=generation, members=members)
    return Transition(after, None, _nudged(state, after))


def decide_rebalance(state: GroupState, *, topics: Topics, now_ms: int) -> Transition[None]:
    """Deal the partitions anew, as if nobody had any; a new generation begins even if all stay where they are."""
    if not state.members:
        return Transition(state, None)
    after = _retarget(state, topics, now_ms, afresh=True)
    return Transition(after, None, frozenset(after.members))


def decide_pause(state: GroupState, *, paused: bool, topics: Topics, now_ms: int) -> Transition[None]:
    """Take all partitions back from the members, or deal them out again.

    A member that holds some may finish, commit and give them back, as whenever partitions move.
    """
    if state.paused == paused:
        return Transition(state, None)
    after = _retarget(replace(state, paused=paused), topics, now_ms)
    return Transition(after, None, _nudged(state, after))


def validate_commit(
    state: GroupState,
    *,
    member_id: str | None,
    generation: int,
    partition: TopicPartition,
    instance_id: str | None = None,
) -> None:
    """Whether an offset may be committed: only by the member that holds the partition, as it holds it now.

    Without a member id it is an operator's reset, which a group with members would overwrite.  Raises
    GroupNotEmpty, UnknownMember, MemberFenced or StaleGeneration.
    """
    if member_id is None:
        if state.members:
            raise GroupNotEmpty(f"group {state.name} has {len(state.members)} members; stop them first")
        return
    _check_generation(state, generation)
    member = _member(state, member_id, instance_id)
    granted = member.owned.get(partition)
    if granted is None or partition in member.lapsed:
        raise StaleGeneration(
            f"{partition} is not held by member {member_id} (generation {generation}; "
            f"group {state.name} is at {state.generation})"
        )
    if generation < granted:
        raise StaleGeneration(
            f"{partition} was granted to {member_id} in generation {granted}; the commit is of {generation}"
        )


def _check_join(command: Join) -> None:
    if not command.member_id:
        raise InvalidArgument("a member id must not be empty")
    if command.instance_id == "":
        raise InvalidArgument("an instance id must not be empty; leave it out for a dynamic member")
    for kind, text in (("a member id", command.member_id), ("an instance id", command.instance_id or "")):
        if len(text) > MEMBER_LETTERS_MAX:
            raise InvalidArgument(f"{kind} has at most {MEMBER_LETTERS_MAX} letters, not {len(text)}")
    for name, value in (("session_ms", command.session_ms), ("rebalance_ms", command.rebalance_ms)):
        if not SESSION_MS_MIN <= value <= SESSION_MS_MAX:
            raise InvalidArgument(f"{name} is {value}, not within {SESSION_MS_MIN} to {SESSION_MS_MAX}")
    if not 1 <= len(command.topics) <= SUBSCRIPTIONS_MAX:
        raise InvalidArgument(
            f"a member subscribes to 1 to {SUBSCRIPTIONS_MAX} topics or patterns, not {len(command.topics)}"
        )
    for name in command.topics:
        check = check_pattern if is_pattern(name) else check_topic
        check(name)


def _with_settings(state: GroupState, command: Join) -> GroupState:
    """The first member fixes strategy and protocol; everybody else agrees or is refused."""
    if not state.members:
        return replace(
            state,
            strategy=command.strategy or Strategy.STICKY,
            protocol=command.protocol or RebalanceProtocol.COOPERATIVE,
        )
    for what, asked, fixed in (
        ("strategy", command.strategy, state.strategy),
        ("protocol", command.protocol, state.protocol),
    ):
        if asked is not None and asked != fixed:
            raise InvalidArgument(f"group {state.name} uses {what} {fixed}; the joiner asks for {asked}")
    return state


def _new_member(command: Join, now_ms: int) -> Member:
    return Member(
        member_id=command.member_id,
        client_id=command.client_id,
        address=command.address,
        topics=command.topics,
        instance_id=command.instance_id,
        session_ms=command.session_ms,
        rebalance_ms=command.rebalance_ms,
        joined_at_ms=now_ms,
    )


def _seat(state: GroupState, member: Member) -> GroupState:
    return replace(with_member(state, member), emptied_at_ms=None)


def _renew(state: GroupState, current: Member, command: Join, now_ms: int) -> GroupState:
    if current.member_id == command.member_id:
        # The same process on a new connection: it still holds what it held, and its heartbeats will say so.
        return with_member(
            state,
            replace(
                current,
                client_id=command.client_id,
                address=command.address,
                topics=command.topics,
                session_ms=command.session_ms,
                rebalance_ms=command.rebalance_ms,
            ),
        )
    # A new process has nothing in hand, so what the old one had to give back is free.
    state = release(state, current.member_id, must_give_back(state, current))
    others = dict(state.members)
    left = others.pop(current.member_id)
    heir = replace(_new_member(command, now_ms), target=left.target, owned=left.owned)
    return _seat(replace(state, members=others, former=_former_with(state, (left,))), heir)


def _former_with(state: GroupState, gone: Iterable[Member]) -> dict[str, tuple[str, ...]]:
    """Who had the places of static members before, now that these are gone from them."""
    former = dict(state.former)
    for member in gone:
        if member.instance_id is not None:
            former[member.instance_id] = (*former.pop(member.instance_id, ()), member.member_id)[-FORMER_MAX:]
    return dict(list(former.items())[-FORMER_PLACES_MAX:])


def _remove(state: GroupState, member_ids: Collection[str], topics: Topics, now_ms: int) -> Transition[None]:
    if not member_ids:
        return Transition(state, None)
    members = {key: member for key, member in state.members.items() if key not in member_ids}
    after = replace(
        state,
        members=members,
        former=_former_with(state, [member for key, member in state.members.items() if key in member_ids]),
        draining=state.draining and any(member.owned for member in members.values()),
        emptied_at_ms=None if members else now_ms,
    )
    after = _retarget(after, topics, now_ms)
    return Transition(after, None, _nudged(state, after))


def _retarget(state: GroupState, topics: Topics, now_ms: int, *, afresh: bool = False) -> GroupState:
    """Compute the target anew; the same object when it is the one the members have already.

    A member that comes or goes without moving a partition makes no new generation: in an eager group the
    others would stop for nothing.  With `afresh` there is always a new one, and who has what does not count.
    """
    members = sorted(state.members.values(), key=lambda member: member.seat)
    previous: dict[TopicPartition, str] = {}
    if not afresh:
        # Where a partition is meant to be counts more than where it still is, and that more than nothing.
        previous = {partition: member.member_id for member in members for partition in member.owned}
        previous |= {partition: member.member_id for member in members for partition in member.target}
    if state.paused:
        topics = {}
    target = assign(state.strategy, _subscriptions(members, topics), topics, previous)
    if not afresh and all(member.target == target[member.member_id] for member in members):
        return state
    after = replace(
        state,
        generation=state.generation + 1,
        draining=state.protocol is RebalanceProtocol.EAGER and any(member.owned for member in members),
        rebalanced_at_ms=now_ms,
    )
    moved: dict[str, Member] = {}
    for member_id, member in state.members.items():
        aimed = replace(member, target=target[member_id])
        if must_give_back(after, aimed) - must_give_back(state, member):
            aimed = replace(aimed, revoke_generation=after.generation)
        moved[member_id] = aimed
    return replace(after, members=moved)


def _subscriptions(members: Collection[Member], topics: Topics) -> dict[str, set[str]]:
    """Member -> the existing topics its names and patterns stand for."""
    names = {name for member in members for name in member.topics}  # members mostly share their patterns
    matching = {name: matching_topics(name, topics) for name in names}
    return {member.member_id: {t for name in member.topics for t in matching[name]} for member in members}


def _nudged(before: GroupState, after: GroupState) -> frozenset[str]:
    """Members of `after` that may hold other partitions, or must give back others, than before."""
    if before is after:
        return frozenset()
    seen = views(before)
    nothing: tuple[frozenset[TopicPartition], frozenset[TopicPartition]] = (frozenset(), frozenset())
    return frozenset(key for key, view in views(after).items() if view != seen.get(key, nothing))


def _member(state: GroupState, member_id: str, instance_id: str | None) -> Member:
    member = state.members.get(member_id)
    if member is None:
        # Only who had the place before the one that has it now: whoever the group has never heard of came later.
        if member_id in state.former.get(instance_id or "", ()) and any(
            other.instance_id == instance_id for other in state.members.values()
        ):
            raise MemberFenced(f"another process has taken the place of {instance_id} in group {state.name}")
        raise UnknownMember(f"{member_id} is not, or no longer, a member of group {state.name}")
    return member


def _check_generation(state: GroupState, generation: int) -> None:
    """Asked before anything else: a group that was restored from a backup does not know who has come since."""
    if generation > state.generation:
        raise StaleGeneration(f"group {state.name} is at {state.generation}; it never had {generation}")
