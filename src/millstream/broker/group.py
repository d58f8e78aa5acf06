"""One stream group at run time: what the broker knows of it, and how it is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from millstream.clock import Clock
from millstream.errors import PartitionNotFound, StorageFailed, TopicNotFound
from millstream.groups.offsets import Bounds, OffsetTable
from millstream.groups.ownership import group_phase
from millstream.groups.records import GroupState, Reply, TopicPartition
from millstream.groups.sessions import Sessions
from millstream.wire import calls

__all__ = ["Group", "GroupsHost", "Standing", "assignment_of", "describe", "standing_of", "summary_of"]


class GroupsHost(Protocol):
    """What groups ask of the broker around them."""

    @property
    def epoch(self) -> int: ...

    def partition_counts(self, namespace: str) -> Mapping[str, int]: ...

    def in_memory(self, namespace: str, topic: str) -> bool: ...

    def bounds(self, namespace: str, partition: TopicPartition) -> Bounds: ...

    def recovered_end(self, namespace: str, partition: TopicPartition, position: int) -> int | None: ...

    def end_of_epoch(self, namespace: str, partition: TopicPartition, epoch: int) -> int: ...

    def offset_at_time(self, namespace: str, partition: TopicPartition, time_us: int) -> int: ...

    async def append_time_us(self, namespace: str, partition: TopicPartition, offset: int) -> int | None: ...


class Standing(NamedTuple):
    """A group as those see it who watch all of them."""

    namespace: str
    name: str
    members: int
    phase: str
    #: The next offset to read, None where nothing was committed yet.
    positions: Mapping[TopicPartition, int | None]
    paused: bool = False


class Group:
    """One group: its recorded state, and what a restart may forget."""

    def __init__(self, namespace: str, name: str, state: GroupState) -> None:
        self.namespace = namespace
        self.name = name
        self.state = state
        self.sessions = Sessions()
        self.offsets = OffsetTable(name)
        self.lock = asyncio.Lock()
        #: Whether the state log knows of it; until then nobody else shall.
        self.recorded = False
        #: How to reach the members that are connected.
        self.push: dict[str, Callable[[object], None]] = {}
        #: Since when partitions are on their way between members; None while all are where they belong.
        self.moving_since_ms: int | None = None


def standing_of(group: Group) -> Standing:
    members = group.state.members.values()
    positions: dict[TopicPartition, int | None] = {at: None for member in members for at in member.target}
    positions.update((at, committed.offset) for at, committed in group.offsets)
    phase = group_phase(group.state).value
    return Standing(group.namespace, group.name, len(members), phase, positions, group.state.paused)


def summary_of(group: Group) -> calls.GroupSummary:
    state = group.state
    return calls.GroupSummary(
        name=group.name,
        state=group_phase(state).value,
        members=len(state.members),
        topics=sorted(
            {at.topic for at, _ in group.offsets}
            | {name for member in state.members.values() for name in member.topics}
        ),
        generation=state.generation,
        paused=state.paused,
    )


async def describe(group: Group, host: GroupsHost, clock: Clock) -> calls.GroupInfo:
    """Its members, and how far they have got."""
    state = group.state
    now_ms = clock.monotonic_ms()
    members = [
        calls.MemberInfo(
            member_id=member.member_id,
            client_id=member.client_id,
            address=member.address,
            instance_id=member.instance_id,
            topics=list(member.topics),
            partitions=_by_topic(member.owned),
            last_heartbeat_ms_ago=group.sessions.silent_ms(member.member_id, now_ms=now_ms) or 0,
        )
        for member in state.members.values()
    ]
    return calls.GroupInfo(
        name=group.name,
        state=group_phase(group.state).value,
        generation=state.generation,
        strategy=state.strategy.value,
        protocol=state.protocol.value,
        paused=state.paused,
        members=members,
        lag=await _lag(group, host, clock),
    )


async def _lag(group: Group, host: GroupsHost, clock: Clock) -> list[calls.GroupLag]:
    namespace = group.namespace
    counts = host.partition_counts(namespace)
    holders = {at: member.member_id for member in group.state.members.values() for at in member.owned}
    known = {at for at, _ in group.offsets} | holders.keys()
    known |= {at for member in group.state.members.values() for at in member.target}
    now_us = clock.now_us()
    lines: list[calls.GroupLag] = []
    for at in sorted(known):
        if at.partition >= counts.get(at.topic, 0):
            continue
        await asyncio.sleep(0)  # opening takes a moment; others go first
        committed = group.offsets.get(at)
        line = calls.GroupLag(
            topic=at.topic,
            partition=at.partition,
            committed=None if committed is None else committed.offset,
            end=0,
            lag=0,
            lag_ms=0,
            member_id=holders.get(at),
        )
        try:
            lag = group.offsets.lag({at: host.bounds(namespace, at)})[at]
            oldest_us = await host.append_time_us(namespace, at, lag.end - lag.messages) if lag.messages else None
        except (TopicNotFound, PartitionNotFound):  # deleted while we looked at the others
            continue
        except StorageFailed as error:
            line.failed = str(error)
        else:
            line.end, line.lag = lag.end, lag.messages
            line.lag_ms = max(0, now_us - oldest_us) // 1000 if oldest_us is not None else 0
        lines.append(line)
    return lines


def assignment_of(reply: Reply) -> calls.Assignment:
    return calls.Assignment(
        member_id=reply.member_id,
        generation=reply.generation,
        partitions=_by_topic(reply.assigned),
        pending=_by_topic(reply.waiting),
    )


def _by_topic(partitions: Collection[TopicPartition]) -> list[calls.TopicPartitions]:
    numbers: dict[str, list[int]] = {}
    for at in sorted(partitions):
        numbers.setdefault(at.topic, []).append(at.partition)
    return [calls.TopicPartitions(topic=topic, partitions=entries) for topic, entries in numbers.items()]
