"""Stream groups at run time: the pure core's decisions are recorded, then made visible, then told to the members.

Requests of one group are served one after another.  A decision that changes the group is a fact in the state log before
anybody acts on it; a heartbeat that changes nothing costs no write.  Only sessions (who was heard when) live in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import structlog

from millstream.broker.group import Group, GroupsHost, Standing, assignment_of, describe, standing_of, summary_of
from millstream.broker.metrics import Metrics
from millstream.broker.state import StateLog
from millstream.clock import Clock
from millstream.errors import (
    GroupNotEmpty,
    GroupNotFound,
    InvalidArgument,
    PartitionNotFound,
    QuotaExceeded,
    StorageFailed,
    TopicNotFound,
    UnknownMember,
)
from millstream.groups.beginnings import newly_covered
from millstream.groups.core import (
    decide_expire,
    decide_heartbeat,
    decide_join,
    decide_lapse,
    decide_leave,
    decide_pause,
    decide_rebalance,
    decide_refresh,
    new_group,
    validate_commit,
)
from millstream.groups.documents import from_document, to_document
from millstream.groups.offsets import (
    Bounds,
    Committed,
    ResetTo,
    Shift,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTimestamp,
    committed_from_document,
    committed_to_document,
    decide_commit,
    decide_reset,
)
from millstream.groups.ownership import group_phase
from millstream.groups.records import (
    GroupState,
    Heartbeat,
    Join,
    Leave,
    Phase,
    RebalanceProtocol,
    Strategy,
    TopicPartition,
    Transition,
    name_member,
)
from millstream.groups.sessions import Sessions
from millstream.names import check_group, check_topic
from millstream.wire import calls

__all__ = ["Groups"]

_log = structlog.get_logger("millstream.groups")

#: A gap this long between two looks at the members means that the broker, not a member, was away: a moment, which does
#: not count as silence; or so long that connections are lost, and everybody needs a whole session to be heard again.
_STALL_MS: Final = 1_000
_PAUSE_MS: Final = 5_000

_GroupKey: TypeAlias = tuple[str, str]


class Groups:
    """All stream groups of the broker."""

    def __init__(
        self,
        host: GroupsHost,
        log: StateLog,
        *,
        clock: Clock,
        metrics: Metrics,
        draw_suffix: Callable[[], str],
        groups_max: int,
    ) -> None:
        self._host = host
        self._log = log
        self._clock = clock
        self._metrics = metrics
        self._draw_suffix = draw_suffix
        self._groups_max = groups_max
        self._groups: dict[_GroupKey, Group] = {}
        #: Which members each connection speaks for.
        self._reached: dict[Callable[[object], None], set[tuple[Group, str]]] = {}
        self._expired_at_ms = clock.monotonic_ms()

    # --- recovery ------------------------------------------------------------------------------------------------

    def replay(self, documents: Mapping[str, Any]) -> None:
        for key, document in documents.items():
            kind, namespace, name, *rest = key.split("/")
            group = self._groups.get((namespace, name))
            if group is None:
                state = new_group(name, now_ms=self._now_ms())
                group = self._groups[namespace, name] = Group(namespace, name, state)
                group.recorded = True
            if kind == "group":
                group.state = from_document(document)
                group.sessions.follow(group.state, now_ms=self._clock.monotonic_ms())
            elif kind == "offset":
                partition = TopicPartition(rest[0], int(rest[1]))
                group.offsets.replay(partition, committed_from_document(document))

    async def mend(self, *, clean: bool) -> None:
        """After a start: take back positions that are beyond the end of their log.

        A power cut may have taken the end of a log, and topics in memory are always empty after a start.  Without this
        the next messages to get those offsets would count as read.  After a crash, also follow the topics that changed
        without the groups having recorded it.
        """
        if not clean:
            for namespace in sorted({group.namespace for group in self._groups.values()}):
                await self.refresh(namespace)
        for group in self._groups.values():
            counts = self._host.partition_counts(group.namespace)
            known = {at.topic for at, _ in group.offsets} | {at.topic for at in _held(group.state)}
            emptied = {topic for topic in known & counts.keys() if self._host.in_memory(group.namespace, topic)}
            moved: dict[TopicPartition, Committed | None] = {}
            for at, committed in group.offsets:
                if at.partition < counts.get(at.topic, 0) and (at.topic in emptied or not clean):
                    end = self._host.recovered_end(group.namespace, at, committed.offset)
                    if end is not None and committed.offset > end:
                        moved[at] = decide_commit(end, metadata=committed.metadata, now_ms=self._now_ms())
            if moved:
                _log.warning("the log lost its end; positions beyond it are taken back", group=group.name)
                await self._record_offsets(group, moved)
            lapsed = moved.keys() | {at for at in _held(group.state) if at.topic in emptied}
            if lapsed:
                transition = decide_lapse(group.state, lapsed, topics=counts, now_ms=self._now_ms())
                await self._apply(group, transition, "a log has lost its end")

    # --- members -------------------------------------------------------------------------------------------------

    async def join(
        self, namespace: str, call: calls.JoinGroup, *, client_id: str, address: str, push: Callable[[object], None]
    ) -> calls.Assignment:
        command = Join(
            member_id=call.member_id or name_member(client_id or "member", self._draw_suffix()),
            client_id=client_id,
            address=address,
            topics=tuple(call.topics),
            instance_id=call.instance_id,
            session_ms=call.session_ms,
            rebalance_ms=call.rebalance_ms,
            strategy=Strategy(call.strategy),
            protocol=RebalanceProtocol(call.protocol),
        )
        async with self._locked(namespace, call.group, create=True) as group:
            topics = self._host.partition_counts(namespace)
            transition = decide_join(group.state, command, topics=topics, now_ms=self._now_ms())
            known = command.member_id in group.state.members
            why = "a member wants other topics" if known else "a member joined"
            if call.start == "latest":
                await self._begin_at_ends(group, newly_covered(group.state, call.topics, topics))
            await self._apply(group, transition, why, member=command.member_id, client=client_id, address=address)
            group.sessions.touch(command.member_id, now_ms=self._clock.monotonic_ms())
            self._reach(group, command.member_id, push)
        return assignment_of(transition.reply)

    async def _begin_at_ends(self, group: Group, partitions: Iterable[TopicPartition]) -> None:
        """Record the ends of the partitions as the group's positions, before the member that joins is let in."""
        moved: dict[TopicPartition, Committed] = {}
        for at in partitions:
            if group.offsets.get(at) is None:
                await asyncio.sleep(0)  # opening takes a moment; others go first
                try:
                    end = self._host.bounds(group.namespace, at).end
                except (TopicNotFound, PartitionNotFound):  # deleted in that moment
                    continue
                except StorageFailed as error:  # of one of many, which have nothing to do with it
                    _log.warning(
                        "a partition cannot be read: a group that begins at the ends will read all of it when it can",
                        namespace=group.namespace,
                        group=group.name,
                        topic=at.topic,
                        partition=at.partition,
                        reason=str(error),
                    )
                    continue
                if end:
                    moved[at] = decide_commit(end, now_ms=self._now_ms())
        await self._record_offsets(group, moved)

    async def heartbeat(
        self, namespace: str, call: calls.HeartbeatGroup, *, push: Callable[[object], None]
    ) -> calls.Assignment:
        owned = frozenset(TopicPartition(entry.topic, number) for entry in call.owned for number in entry.partitions)
        async with self._locked(namespace, call.group) as group:
            transition = decide_heartbeat(
                group.state, Heartbeat(call.member_id, call.generation, owned, call.instance_id)
            )
            await self._apply(group, transition, "a heartbeat", member=call.member_id)
            group.sessions.touch(call.member_id, now_ms=self._clock.monotonic_ms())
            self._reach(group, call.member_id, push)
        return assignment_of(transition.reply)

    async def leave(self, namespace: str, call: calls.LeaveGroup, *, permanent: bool = False) -> None:
        async with self._locked(namespace, call.group) as group:
            topics = self._host.partition_counts(namespace)
            command = Leave(call.member_id, permanent, call.instance_id)
            transition = decide_leave(group.state, command, topics=topics, now_ms=self._now_ms())
            why = "a member was evicted" if permanent else "a member left"
            await self._apply(group, transition, why, member=call.member_id)

    async def evict(self, namespace: str, call: calls.EvictMember) -> None:
        group = self._get(namespace, call.group)
        if call.member_id not in group.state.members:
            raise UnknownMember(f"{call.member_id!r} is not a member of group {call.group!r}")
        await self.leave(namespace, calls.LeaveGroup(group=call.group, member_id=call.member_id), permanent=True)

    async def rebalance(self, namespace: str, name: str) -> calls.GroupSummary:
        """Deal the partitions anew, whoever has them now."""
        async with self._locked(namespace, name) as group:
            topics = self._host.partition_counts(namespace)
            transition = decide_rebalance(group.state, topics=topics, now_ms=self._now_ms())
            await self._apply(group, transition, "somebody asked for it")
        return summary_of(group)

    async def pause(self, namespace: str, call: calls.PauseGroup) -> calls.GroupSummary:
        """Have nobody read, or let the members go on."""
        async with self._locked(namespace, call.name) as group:
            topics = self._host.partition_counts(namespace)
            transition = decide_pause(group.state, paused=call.paused, topics=topics, now_ms=self._now_ms())
            await self._apply(group, transition, "the group was paused" if call.paused else "the group goes on")
        return summary_of(group)

    async def expire(self) -> None:
        """Remove members that are late.  Called every fraction of a second."""
        now_ms = self._clock.monotonic_ms()
        away_ms = now_ms - self._expired_at_ms
        try:
            if away_ms <= _STALL_MS:
                await self._remove_late(now_ms)
                return
            # This process stood still (suspended, swapped out): nobody could be heard, so nobody is late.
            for group in self._groups.values():
                if away_ms > _PAUSE_MS:
                    group.sessions = Sessions()
                    group.sessions.follow(group.state, now_ms=now_ms)
                else:
                    group.sessions.excuse(away_ms, now_ms=now_ms)
        finally:
            self._expired_at_ms = self._clock.monotonic_ms()  # while we waited for the disk, members were heard

    async def _remove_late(self, now_ms: int) -> None:
        for group in list(self._groups.values()):
            if not group.state.members or not group.sessions.late(group.state, now_ms=now_ms):
                continue
            async with group.lock:
                if not self._is_known(group):
                    continue
                late = group.sessions.late(group.state, now_ms=self._clock.monotonic_ms())
                for member_id, reason in late.items():
                    _log.warning("member removed", group=group.name, member=member_id, reason=reason)
                topics = self._host.partition_counts(group.namespace)
                transition = decide_expire(group.state, late, topics=topics, now_ms=self._now_ms())
                await self._apply(group, transition, "a member expired", member=", ".join(sorted(late)))

    async def refresh(self, namespace: str) -> None:
        """Topics came, went or grew: follow them."""
        topics = self._host.partition_counts(namespace)

        async def follow(group: Group) -> None:
            transition = decide_refresh(group.state, topics=topics, now_ms=self._now_ms())
            await self._apply(group, transition, "topics changed")

        await self._with_all(namespace, lambda group: bool(group.state.members), follow)

    def disconnected(self, push: Callable[[object], None]) -> None:
        """A connection ended.  Its members stay until their session runs out: most of them come back."""
        for group, member_id in list(self._reached.get(push, ())):
            self._lose(group, member_id)

    def _reach(self, group: Group, member_id: str, push: Callable[[object], None]) -> None:
        """A member is heard of, by this connection."""
        if group.push.get(member_id) != push:
            self._lose(group, member_id)
            group.push[member_id] = push
            self._reached.setdefault(push, set()).add((group, member_id))

    def _lose(self, group: Group, member_id: str) -> None:
        push = group.push.pop(member_id, None)
        if push is not None:
            members = self._reached[push]
            members.discard((group, member_id))
            if not members:
                del self._reached[push]

    async def _apply(self, group: Group, transition: Transition[Any], why: str, **about: str) -> None:
        """Record a decision, then let it be seen.  `why` and `about` are for the log."""
        before = group.state
        if transition.state is not before:
            document = to_document(transition.state)
            await self._log.record({f"group/{group.namespace}/{group.name}": document}, now_us=self._clock.now_us())
            group.recorded = True
            moved = transition.state.generation != before.generation
            self._metrics.rebalances += moved
            if moved or transition.state.members.keys() != before.members.keys():
                _log.info(
                    "group rebalanced" if moved else "group has other members",
                    namespace=group.namespace,
                    group=group.name,
                    reason=why,
                    **about,
                    generation=transition.state.generation,
                    members=len(transition.state.members),
                )
            group.state = transition.state
            self._time_rebalance(group)
            group.sessions.follow(group.state, now_ms=self._clock.monotonic_ms())
        for member_id in sorted(transition.nudged):  # in the same order on every run
            push = group.push.get(member_id)
            if push is not None:
                push({"group": group.name, "generation": group.state.generation})
        if group.state is not before:
            for member_id in group.push.keys() - group.state.members.keys():
                self._lose(group, member_id)

    def _time_rebalance(self, group: Group) -> None:
        now_ms = self._clock.monotonic_ms()
        if group_phase(group.state) is Phase.REBALANCING:
            if group.moving_since_ms is None:
                group.moving_since_ms = now_ms
        elif group.moving_since_ms is not None:
            self._metrics.latency.rebalance.observe((now_ms - group.moving_since_ms) * 1000)
            group.moving_since_ms = None

    # --- offsets -------------------------------------------------------------------------------------------------

    async def commit(self, namespace: str, call: calls.CommitOffsets) -> None:
        """Move positions.  All of them are checked before any is recorded, and they are recorded together."""
        moved: dict[TopicPartition, Committed] = {}
        async with self._locked(namespace, call.group, create=True) as group:
            counts = self._host.partition_counts(namespace)
            for entry in call.offsets:
                partition = TopicPartition(entry.topic, entry.partition)
                if not 0 <= entry.partition < counts.get(entry.topic, 0):
                    raise InvalidArgument(f"there is no partition {partition} to commit an offset for")
                validate_commit(
                    group.state,
                    member_id=call.member_id or None,
                    generation=call.generation,
                    partition=partition,
                    instance_id=call.instance_id,
                )
                offset = entry.offset
                if call.epoch is not None and call.epoch < self._host.epoch:
                    await asyncio.sleep(0)  # opening takes a moment; others go first
                    offset = min(offset, self._host.end_of_epoch(namespace, partition, call.epoch))
                moved[partition] = decide_commit(offset, metadata=entry.metadata, now_ms=self._now_ms())
            await self._record_offsets(group, moved)
        self._metrics.offsets_committed += len(moved)

    def committed(self, namespace: str, call: calls.CommittedOffsets) -> list[calls.OffsetEntry]:
        group = self._groups.get((namespace, check_group(call.group)))
        if group is None:
            return []
        return [
            calls.OffsetEntry(topic=at.topic, partition=at.partition, offset=value.offset, metadata=value.metadata)
            for at, value in group.offsets
            if call.topics is None or at.topic in call.topics
        ]

    async def reset(self, namespace: str, call: calls.ResetOffsets) -> list[calls.OffsetEntry]:
        count = self._host.partition_counts(namespace).get(call.topic)
        if count is None:
            raise TopicNotFound(f"topic {check_topic(call.topic)!r} does not exist in namespace {namespace!r}")
        # Each once: a frame has room for millions of numbers.
        numbers = range(count) if call.partitions is None else dict.fromkeys(call.partitions)
        if any(not 0 <= number < count for number in numbers):
            raise PartitionNotFound(f"topic {call.topic!r} has partitions 0 to {count - 1}")
        partitions = [TopicPartition(call.topic, number) for number in numbers]
        bounds: dict[TopicPartition, Bounds] = {}
        for partition in partitions:
            await asyncio.sleep(0)  # opening takes a moment; others go first
            bounds[partition] = self._host.bounds(namespace, partition)
        target = await self._reset_target(namespace, call, partitions)
        # Nothing is awaited before the lock: whoever deletes the topic gets it later, and takes out what is recorded.
        async with self._locked(namespace, call.group) as group:
            self._check_empty(group)
            plan = decide_reset(group.offsets, target, partitions=partitions, bounds=bounds)
            if not call.dry_run:
                now_ms = self._now_ms()
                moved = {step.partition: decide_commit(step.after, now_ms=now_ms) for step in plan}
                await self._record_offsets(group, moved)
        return [
            calls.OffsetEntry(topic=step.partition.topic, partition=step.partition.partition, offset=step.after)
            for step in plan
        ]

    async def _reset_target(
        self, namespace: str, call: calls.ResetOffsets, partitions: Iterable[TopicPartition]
    ) -> ResetTo:
        if call.to == "earliest":
            return ToEarliest()
        if call.to == "latest":
            return ToLatest()
        if call.value is None:
            raise InvalidArgument(f"a reset to {call.to!r} needs a value")
        if call.to == "offset":
            return ToOffset(call.value)
        if call.to == "shift":
            return Shift(call.value)
        offsets: dict[TopicPartition, int] = {}
        for partition in partitions:
            await asyncio.sleep(0)  # as above
            offsets[partition] = self._host.offset_at_time(namespace, partition, call.value * 1000)
        return ToTimestamp(offsets)

    async def _record_offsets(self, group: Group, moved: Mapping[TopicPartition, Committed | None]) -> None:
        if not moved:
            return
        prefix = f"offset/{group.namespace}/{group.name}"
        facts = {
            f"{prefix}/{at.topic}/{at.partition}": None if value is None else committed_to_document(value)
            for at, value in moved.items()
        }
        await self._log.record(facts, now_us=self._clock.now_us())
        group.recorded = True
        for at, value in moved.items():
            group.offsets.replay(at, value)

    async def forget_topic(self, namespace: str, topic: str) -> None:
        """A topic was deleted: forget positions in it and take it from members.  The next of its name is another."""
        topics = self._host.partition_counts(namespace)

        def held(group: Group) -> set[TopicPartition]:
            return {at for at in _held(group.state) if at.topic == topic}

        async def forget(group: Group) -> None:
            await self._record_offsets(group, dict.fromkeys(group.offsets.of_topic(topic)))
            transition = decide_lapse(group.state, held(group), topics=topics, now_ms=self._now_ms())
            await self._apply(group, transition, "a topic was deleted")

        await self._with_all(namespace, lambda group: bool(group.offsets.of_topic(topic) or held(group)), forget)

    # --- looking -------------------------------------------------------------------------------------------------

    def summaries(self, namespace: str) -> list[calls.GroupSummary]:
        groups = [group for _, group in sorted(self._groups.items()) if group.namespace == namespace]
        return [summary_of(group) for group in groups if group.recorded]

    def topics_of(self, namespace: str, name: str) -> list[str]:
        """What a group reads, or has read; nothing if there is no such group."""
        group = self._groups.get((namespace, name))
        return [] if group is None or not group.recorded else summary_of(group).topics

    def standings(self) -> Iterator[Standing]:
        """Every group, with the partitions that it reads and how far it has got in each."""
        return (standing_of(group) for group in self._groups.values() if group.recorded)

    async def describe(self, namespace: str, name: str) -> calls.GroupInfo:
        return await describe(self._get(namespace, name), self._host, self._clock)

    async def delete(self, namespace: str, name: str) -> None:
        async with self._locked(namespace, name) as group:
            self._check_empty(group)
            await self._forget(group)

    async def _forget(self, group: Group) -> None:
        place = f"{group.namespace}/{group.name}"
        facts: dict[str, Any] = {f"group/{place}": None}
        facts |= {f"offset/{place}/{at.topic}/{at.partition}": None for at, _ in group.offsets}
        await self._log.record(facts, now_us=self._clock.now_us())
        for member_id in list(group.push):
            self._lose(group, member_id)
        self._groups.pop((group.namespace, group.name), None)

    async def forget_namespace(self, namespace: str) -> None:
        """A namespace is gone: its groups, too, whoever is still in them."""
        for group in [group for group in self._groups.values() if group.namespace == namespace]:
            async with group.lock:
                if self._is_known(group):
                    await self._forget(group)

    async def forget_idle(self, retention_ms: int, now_ms: int) -> None:
        """Drop groups that have had no members for long; 0 keeps them."""
        if not retention_ms:
            return
        for group in list(self._groups.values()):
            newest = max((value.committed_at_ms for _, value in group.offsets), default=0)
            idle_since_ms = max(newest, group.state.emptied_at_ms or 0)
            if not group.state.members and not group.lock.locked() and now_ms - idle_since_ms > retention_ms:
                _log.info("group forgotten", group=group.name, idle_ms=now_ms - idle_since_ms)
                await self.delete(group.namespace, group.name)

    def readers_of(self, namespace: str, topic: str) -> list[str]:
        """Groups with members that hold partitions of a topic."""
        return [
            group.name
            for group in self._groups.values()
            if group.namespace == namespace
            and any(at.topic == topic for member in group.state.members.values() for at in member.owned)
        ]

    @contextlib.asynccontextmanager
    async def _locked(self, namespace: str, name: str, *, create: bool = False) -> AsyncIterator[Group]:
        """The group, with nobody else at work on it.  Without `create` it must exist.

        A new group is known at once, so that two who come first find the same one; if nothing about it is recorded
        in the end, it is forgotten again.  One that was deleted while we waited for it is looked up anew.
        """
        key = (namespace, check_group(name))
        while True:
            group = self._groups.get(key)
            if group is None or (not create and not group.recorded):
                if not create:
                    raise GroupNotFound(f"group {name!r} does not exist in namespace {namespace!r}")
                if len(self._groups) >= self._groups_max:
                    raise QuotaExceeded(
                        f"the broker holds {self._groups_max} stream groups already (groups.max_groups)"
                    )
                group = self._groups[key] = Group(namespace, name, new_group(name, now_ms=self._now_ms()))
            async with group.lock:
                if not self._is_known(group):
                    continue
                try:
                    yield group
                finally:
                    if not group.recorded and self._groups.get(key) is group:
                        del self._groups[key]
                return

    async def _with_all(
        self, namespace: str, concerned: Callable[[Group], bool], work: Callable[[Group], Awaitable[None]]
    ) -> None:
        """Do something with every group of a namespace that it concerns; side by side, so that they share syncs."""

        async def one(group: Group) -> None:
            async with group.lock:
                if self._is_known(group) and concerned(group):
                    await work(group)

        # A group that somebody is at work on may be of concern when that is done: it is asked again with the lock.
        groups = [group for group in self._groups.values() if group.namespace == namespace]
        await asyncio.gather(*[one(group) for group in groups if group.lock.locked() or concerned(group)])

    def _is_known(self, group: Group) -> bool:
        """Whether it was not forgotten while we waited for it."""
        return self._groups.get((group.namespace, group.name)) is group

    @staticmethod
    def _check_empty(group: Group) -> None:
        if group.state.members:
            raise GroupNotEmpty(f"group {group.name!r} has {len(group.state.members)} members; stop them first")

    def _get(self, namespace: str, name: str) -> Group:
        group = self._groups.get((namespace, check_group(name)))
        if group is None or not group.recorded:
            raise GroupNotFound(f"group {name!r} does not exist in namespace {namespace!r}")
        return group

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000


def _held(state: GroupState) -> set[TopicPartition]:
    return {at for member in state.members.values() for at in member.owned}
