"""How the broker is: what it can tell from memory, and what only a try can show.

A deep check writes a message into a log of its own, waits until it is on disk and reads it back, does the same with a
journal, and looks for groups that are far behind.  Only one of them runs at a time; who asks meanwhile gets the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from millstream.access.rights import EVERY_NAMESPACE, EVERY_TOPIC
from millstream.broker.answers import FetchAnswer
from millstream.broker.groups import Groups
from millstream.broker.journal import SEGMENT_BYTES, Journal
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.queues.queues import Queues
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.broker.traffic.flow import Flow
from millstream.broker.traffic.modes import ModeKeeper
from millstream.clock import Clock
from millstream.config import Settings
from millstream.durations import format_ms
from millstream.errors import InvalidArgument, MillstreamError, RequestError, StorageFailed
from millstream.records import Batch
from millstream.wire.admin_calls import CheckHealth, ComponentHealth, HealthReport, HealthStatus

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Health"]

#: Shorter, and an ordinary fsync on a busy disk would count as a failure.
_TIMEOUT_MS_MIN: Final = 1000
_TIMEOUT_MS_MAX: Final = 60_000
#: A group with consumers whose oldest message has waited longer is worth a look.
_LAG_MS: Final = 5 * 60_000
#: Of the connections that are allowed.
_CONNECTIONS_SHARE: Final = 0.95
#: Twice the free space at which the broker stops taking messages: time enough to do something.
_DISK_FACTOR: Final = 2
_MIB: Final = 1024**2
_PROBE_SEGMENT_BYTES: Final = 64 * 1024
_PROBE_BYTES: Final = 4096
_RANK: Final[dict[str, int]] = {"healthy": 0, "unknown": 1, "degraded": 2, "critical": 3}
_MODES: Final[dict[str, tuple[HealthStatus, str]]] = {
    "normal": ("healthy", ""),
    "throttled": ("degraded", "Give the broker more memory, or raise server.memory_bytes_warning."),
    "read-only": ("critical", "Free disk space, or look at the disk; publishing begins again by itself."),
    "emergency": ("critical", "Give the broker more memory, or raise server.memory_bytes_critical."),
    "maintenance": ("degraded", "When the work is done: `millstream mode normal`."),
}


class _Host(Protocol):
    settings: Settings
    topics: Topics
    groups: Groups
    queues: Queues
    flow: Flow
    modes: ModeKeeper
    patience: PatientClock


class _Finding(NamedTuple):
    status: HealthStatus
    message: str
    recommendation: str = ""


class Health:
    """The call `broker.health`."""

    def __init__(
        self,
        host: _Host,
        opener: PartitionOpener,
        *,
        clock: Clock,
        connections: Callable[[], int],
        state_failure: Callable[[], str | None],
        state_logs: Sequence[StateLog],
    ) -> None:
        self._host = host
        self._opener = opener
        self._clock = clock
        self._connections = connections
        self._state_failure = state_failure
        self._state_logs = state_logs
        self._born_ms = clock.monotonic_ms()
        self._errors: dict[str, int] = {}
        self._deep: asyncio.Task[list[ComponentHealth]] | None = None
        self._log: StateLog | None = None
        self._journal: Journal | None = None

    def close(self) -> None:
        """Probe no more."""
        if self._deep is not None:
            self._deep.cancel()

    @property
    def logs(self) -> list[Partition]:
        """The logs that checks write to, if they are open."""
        return [kept.partition for kept in (self._log, self._journal) if kept is not None]

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {CheckHealth: self._check}

    async def _check(self, session: Session, call: CheckHealth) -> HealthReport:
        if not _TIMEOUT_MS_MIN <= call.timeout_ms <= _TIMEOUT_MS_MAX:
            limits = f"between {_TIMEOUT_MS_MIN} and {_TIMEOUT_MS_MAX}"
            raise InvalidArgument(f"timeout_ms must be {limits}, not {call.timeout_ms}")
        components = [await self._component(name, look) for name, look in self._looks().items()]
        if call.deep:
            if self._deep is None or self._deep.done():
                self._deep = asyncio.ensure_future(self._probe_all(call.timeout_ms))
            components += await asyncio.shield(self._deep)
        refusal = self._host.modes.publish_refusal
        reason = self._state_failure() or (str(refusal) if refusal is not None else "")
        if not session.access.may("read", EVERY_NAMESPACE, EVERY_TOPIC):
            components = [msgspec.structs.replace(each, message="", recommendation="") for each in components]
            reason = reason and "the broker takes no messages now; why is told to a key that may read everything"
        now_us = self._clock.now_us()
        worst = max(components, key=lambda component: _RANK[component.status]).status
        return HealthReport(
            status="degraded" if worst == "unknown" else worst,
            ready=not reason,
            reason=reason,
            deep=call.deep,
            uptime_ms=self._clock.monotonic_ms() - self._born_ms,
            checked_ms=now_us // 1000,
            components=components,
        )

    async def _component(
        self, name: str, look: Callable[[], Awaitable[_Finding]], limit_ms: int = 0
    ) -> ComponentHealth:
        loop = self._opener.loop
        began_s = loop.time()
        try:
            found = await (asyncio.wait_for(look(), limit_ms / 1000) if limit_ms else look())
        except TimeoutError:
            found = _Finding("critical", f"no answer within {format_ms(limit_ms)}", "Look at the disk and its load.")
        except (MillstreamError, OSError) as error:
            found = _Finding("critical", str(error), "Look at the disk; the broker's log says more.")
        if found.status != "healthy":
            self._errors[name] = self._errors.get(name, 0) + 1
        return ComponentHealth(
            name=name,
            status=found.status,
            message=found.message,
            recommendation=found.recommendation,
            latency_ms=round((loop.time() - began_s) * 1000, 3),
            errors=self._errors.get(name, 0),
        )

    # --- what memory tells ---------------------------------------------------------------------------------------

    def _looks(self) -> dict[str, Callable[[], Awaitable[_Finding]]]:
        return {
            "mode": self._mode,
            "state": self._state,
            "logs": self._logs,
            "journals": self._journals,
            "disk": self._disk,
            "memory": self._memory,
            "connections": self._connected,
            "flow": self._flow,
            "clock": self._time,
        }

    async def _mode(self) -> _Finding:
        modes = self._host.modes
        status, recommendation = _MODES[modes.mode]
        why = f": {modes.reason}" if modes.reason else ""
        return _Finding(status, f"the broker is in mode {modes.mode}{why}", recommendation)

    async def _state(self) -> _Finding:
        failure = self._state_failure()
        if failure is None:
            damage = _damage([log.partition for log in self._state_logs])
            return damage or _Finding("healthy", "what the broker decides can be recorded")
        text = f"the broker cannot record what it decides: {failure}"
        return _Finding("critical", text, "Look at the disk, then restart the broker.")

    async def _logs(self) -> _Finding:
        logs = list(self._host.topics.open_logs())
        failed = [log for log in logs if log.failed is not None]
        if not failed:
            return _damage(logs) or _Finding("healthy", f"{len(logs)} logs are open, all of them take messages")
        text = f"{len(failed)} of {len(logs)} open logs take no more messages, {failed[0].log.directory} among them"
        advice = "Look at the disk, then restart the broker: it recovers what is provably there."
        return _Finding("degraded", f"{text}: {failed[0].failed}", advice)

    async def _journals(self) -> _Finding:
        journals = self._host.topics.journals()
        troubles = [(journal, *trouble) for journal in journals for trouble in journal.unwritten.items()]
        troubles += [(part.keeper.journal, part.entity, repr(why)) for part, why in self._host.queues.failing.items()]
        if not troubles:
            return _Finding("healthy", f"{len(journals)} journals are open and know all that was decided")
        journal, entity, reason = troubles[0]
        text = f"{entity} in {journal.partition.log.directory} has decided what cannot be recorded: {reason}"
        advice = "The broker's log says more, please report it; after a restart some messages are delivered again."
        return _Finding("degraded", text, advice)

    async def _disk(self) -> _Finding:
        free, limit = self._opener.storage.free_bytes(), self._host.settings.storage.free_bytes_min
        text = f"{free // _MIB:,} MiB are free; the broker stops taking messages below {limit // _MIB:,} MiB"
        advice = "Free disk space, or lower retention; `millstream admin compact` applies it at once."
        if free < limit:
            return _Finding("critical", text, advice)
        return _Finding("degraded", text, advice) if free < limit * _DISK_FACTOR else _Finding("healthy", text)

    async def _memory(self) -> _Finding:
        used, settings = self._host.modes.memory_bytes(), self._host.settings.server
        text = f"the broker uses {used // _MIB:,} MiB"
        advice = "Give the broker more memory, or raise its limits."
        if settings.memory_bytes_critical and used >= settings.memory_bytes_critical:
            return _Finding("critical", f"{text}, above server.memory_bytes_critical", advice)
        if settings.memory_bytes_warning and used >= settings.memory_bytes_warning:
            return _Finding("degraded", f"{text}, above server.memory_bytes_warning", advice)
        return _Finding("healthy", text)

    async def _connected(self) -> _Finding:
        connected, limit = self._connections(), self._host.settings.server.max_connections
        text = f"{connected:,} of {limit:,} connections are in use"
        if connected > limit * _CONNECTIONS_SHARE:
            return _Finding("degraded", text, "Raise server.max_connections, or find out who opens so many.")
        return _Finding("healthy", text)

    async def _flow(self) -> _Finding:
        behind = self._host.flow.behind()
        if not behind:
            return _Finding("healthy", "no topic slows its publishers down")
        text = f"{len(behind)} topics slow their publishers down, {behind[0].name} among them"
        return _Finding("degraded", text, f"Add consumers; `millstream why {behind[0].name}/GROUP` says what they do.")

    async def _time(self) -> _Finding:
        complaint = self._host.patience.complaint()
        if not complaint:
            return _Finding("healthy", "the clock goes as time does")
        return _Finding("degraded", complaint, "Look at the machine's clock; if it is right, there is nothing to do.")

    # --- what only a try can show --------------------------------------------------------------------------------

    async def _probe_all(self, limit_ms: int) -> list[ComponentHealth]:
        probes = {"storage": self._probe_storage, "journal": self._probe_journal, "lag": self._probe_lag}
        return [await self._component(name, probe, limit_ms) for name, probe in probes.items()]

    def _not_now(self) -> _Finding | None:
        """A disk that is nearly full is not the place for probes."""
        free, limit = self._opener.storage.free_bytes(), self._host.settings.storage.free_bytes_min
        return _Finding("unknown", "not tried: the disk is nearly full", "Free disk space.") if free < limit else None

    async def _probe_storage(self) -> _Finding:
        if (found := self._not_now()) is not None:
            return found
        if self._log is None:
            self._log = StateLog(self._open("state/health", _PROBE_SEGMENT_BYTES))
        partition = self._log.partition
        now_us = self._clock.now_us()
        offset = partition.log.next_offset
        await self._log.record({"probe": now_us}, now_us=now_us)
        answered: asyncio.Future[FetchAnswer | MillstreamError] = self._opener.loop.create_future()
        partition.fetch(offset, _PROBE_BYTES, 0, answered.set_result)  # answers at once: it is there
        answer = await answered
        if isinstance(answer, MillstreamError):
            raise answer
        if not answer.buffers or Batch.parse(b"".join(answer.buffers)).values() != [str(now_us).encode()]:
            raise StorageFailed("a message was stored, but reads back as something else")
        partition.log.delete_before(offset)
        return _Finding("healthy", "a message was stored, synced and read back")

    async def _probe_journal(self) -> _Finding:
        if (found := self._not_now()) is not None:
            return found
        if self._journal is None:
            partition = self._open("state/health.journal", SEGMENT_BYTES)
            journal = Journal(partition, clock=self._clock, loop=self._opener.loop, flush_s=1.0)
            journal.claim("probe", list)
            self._journal = journal
        await self._journal.record_durably(("probe", self._clock.now_us()))
        waiting = self._host.topics.journals()
        failed = [journal for journal in waiting if journal.partition.failed is not None]
        if failed:
            raise StorageFailed(f"{failed[0].partition.log.directory}: {failed[0].partition.failed}")
        return _Finding("healthy", f"a fact was recorded; {len(waiting)} journals are open")

    def _open(self, directory: str, segment_bytes: int) -> Partition:
        return self._opener.open(directory, 0, segment_bytes=segment_bytes, counted=False)

    async def _probe_lag(self) -> _Finding:
        """Look for the group that is furthest behind, among those that somebody reads with right now."""
        worst = 0, "", ""
        for namespace in list(self._host.topics.registry.namespaces):
            for group in list(self._host.queues.registry.all_groups(namespace)):
                await asyncio.sleep(0)
                if group.consumers and not group.policy.paused:
                    since_us = min(filter(None, (part.ready_since_us() for part in group.open_parts())), default=None)
                    lag_ms = 0 if since_us is None else (self._host.queues.now_us() - since_us) // 1000
                    name = f"{group.topic.name}/{group.name}"
                    worst = max(worst, (lag_ms, f"queue {name}", f"`millstream why {name}`"))
            for summary in self._host.groups.summaries(namespace):
                await asyncio.sleep(0)
                if summary.members and not summary.paused:
                    try:
                        info = await self._host.groups.describe(namespace, summary.name)
                    except RequestError:  # it was deleted meanwhile
                        continue
                    lag_ms = max((entry.lag_ms for entry in info.lag), default=0)
                    name = summary.name
                    worst = max(worst, (lag_ms, f"group {name}", f"`millstream group show {name}`"))
        worst_ms, who, command = worst
        if worst_ms <= _LAG_MS:
            return _Finding("healthy", f"nobody who reads is more than {format_ms(_LAG_MS)} behind")
        text = f"{who} has messages that wait for {format_ms(worst_ms)}"
        return _Finding("degraded", text, f"Add consumers, or see what holds them up with {command}.")


def _damage(logs: Sequence[Partition]) -> _Finding | None:
    """What cannot be read any more, as far as anybody has come upon it."""
    damaged = [partition.log for partition in logs if partition.log.recovery.damaged]
    if not damaged:
        return None
    first, after = damaged[0].recovery.damaged[0]
    text = f"{len(damaged)} of {len(logs)} open logs are damaged on disk: in {damaged[0].directory}"
    advice = "Look at the disk. `millstream log verify` names all of it; only a backup can bring it back."
    return _Finding("degraded", f"{text} offsets {first} to {after - 1} cannot be read", advice)
