"""What whoever runs the broker asks of it: about itself, its settings, its files, its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from millstream.broker.cleanup import Cleanup
from millstream.broker.metrics import Metrics
from millstream.broker.queues.queues import Queues
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.broker.traffic.modes import ModeKeeper
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.clock import Clock
from millstream.config import Settings, setting_fields
from millstream.errors import ConnectionLost, ConnectionNotFound, InvalidArgument, MillstreamError
from millstream.wire import admin_calls as calls
from millstream.wire.calls import DescribeBroker

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Administration"]

_log = structlog.get_logger("millstream.administration")

#: What is told instead of a secret, and the settings that are one.
_MASK: Final = "********"
#: Of what a client is told when it is disconnected: MQTT has room for no more than 65,535 bytes.
_REASON_LETTERS_MAX: Final = 1_000
_SECRETS: Final = ("secret", "password", "token", "passphrase")


class _Host(Protocol):
    settings: Settings
    software: str
    node_id: str
    metrics: Metrics
    modes: ModeKeeper
    topics: Topics
    queues: Queues
    subscriptions: Subscriptions
    #: `section.key` -> where the setting came from.
    setting_sources: Mapping[str, str]
    #: Told the new level of the log.
    on_log_level: Callable[[str], None]

    def flush(self) -> None: ...

    def session_closed(self, session: Session, /) -> None: ...


class Administration:
    """The calls `admin.*`, and `broker.describe`."""

    def __init__(
        self,
        host: _Host,
        cleanup: Cleanup,
        state_logs: Iterable[StateLog],
        *,
        clock: Clock,
        sessions: Callable[[], list[Session]],
    ) -> None:
        self._host = host
        self._cleanup = cleanup
        self._state_logs = state_logs
        self._clock = clock
        self._sessions = sessions
        self._born_ms = clock.monotonic_ms()
        self._level: calls.LogLevel = host.settings.log.level

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            DescribeBroker: self._describe,
            calls.ShowConfig: self._config,
            calls.SetLogLevel: self._set_log_level,
            calls.Checkpoint: self._checkpoint,
            calls.Compact: self._compact,
            calls.ListConnections: self._connections,
            calls.Disconnect: self._disconnect,
        }

    async def _describe(self, session: Session, _: DescribeBroker) -> dict[str, Any]:
        host = self._host
        namespaces = host.topics.registry.namespaces
        return {
            "software": host.software,
            "node_id": host.node_id,
            "uptime_ms": self._clock.monotonic_ms() - self._born_ms,
            "mode": host.modes.mode,
            "reason": host.modes.reason,
            "namespace": session.namespace,
            "namespaces": len(namespaces),
            "topics": sum(map(len, namespaces.values())),
            "fsync": host.settings.storage.fsync,
            "metrics": {f"millstream_{name}": number for name, number in host.metrics.as_dict().items()},
        }

    # --- settings ------------------------------------------------------------------------------------------------

    async def _config(self, _: Session, __: calls.ShowConfig) -> list[calls.SettingInfo]:
        settings, sources = self._host.settings, self._host.setting_sources
        answer = []
        for name, field in setting_fields():
            value = attrgetter(name)(settings)
            # Whoever starts a broker from a program says no sources.
            source = sources.get(name) or ("default" if value == field.default else "program")
            if name == "log.level" and value != self._level:
                value, source = self._level, "admin.log_level"
            if value and name.rpartition(".")[2].rpartition("_")[2] in _SECRETS:
                value = _MASK
            answer.append(calls.SettingInfo(name=name, value=value, source=source))
        return answer

    async def _set_log_level(self, session: Session, call: calls.SetLogLevel) -> calls.LogLevelInfo:
        before, self._level = self._level, call.level
        change = {"now": call.level, "before": before, "client": session.client_id, "address": session.address}
        if call.level == "error":
            _log.warning("log level changed", **change)  # while it is still heard
        self._host.on_log_level(call.level)
        if call.level != "error":
            _log.warning("log level changed", **change)
        return calls.LogLevelInfo(level=call.level, before=before)

    # --- files ---------------------------------------------------------------------------------------------------

    async def _checkpoint(self, _: Session, __: calls.Checkpoint) -> calls.Checkpointed:
        began_ms = self._clock.monotonic_ms()
        self._host.flush()
        self._host.queues.flush()
        journals = self._host.topics.journals()
        failures: list[str] = []
        for journal in journals:
            await _try(journal.checkpoint(), journal.partition.log.directory, failures)
            await asyncio.sleep(0)
        state_logs = list(self._state_logs)
        for log in state_logs:
            await _try(self._cleanup.rewrite(log), log.partition.log.directory, failures)
        logs = [partition for partition in self._host.topics.open_logs() if partition.is_durable]
        # Asked for together, so that they share one round of the committer.
        await asyncio.gather(*(_try(log.sync(), log.log.directory, failures) for log in logs))
        took_ms = self._clock.monotonic_ms() - began_ms
        _log.info("checkpoint", logs=len(logs), journals=len(journals), failures=len(failures), took_ms=took_ms)
        return calls.Checkpointed(
            logs=len(logs),
            journals=len(journals),
            state_logs=len(state_logs),
            failures=failures,
            took_ms=took_ms,
        )

    async def _compact(self, session: Session, call: calls.Compact) -> calls.Compacted:
        began_ms = self._clock.monotonic_ms()
        topic = self._host.topics.registry.get(session.namespace, call.topic) if call.topic else None
        tended = await self._cleanup.tend_now(topic, roll=call.roll)
        return calls.Compacted(
            partitions=tended.partitions,
            segments_deleted=tended.segments_deleted,
            compacted=tended.compacted,
            bytes_before=tended.bytes_before,
            bytes_after=tended.bytes_after,
            took_ms=self._clock.monotonic_ms() - began_ms,
        )

    # --- connections ---------------------------------------------------------------------------------------------

    async def _connections(self, _: Session, __: calls.ListConnections) -> list[calls.ConnectionInfo]:
        return [self._info(session) for session in sorted(self._sessions(), key=lambda session: session.opened_ms)]

    async def _disconnect(self, session: Session, call: calls.Disconnect) -> calls.ConnectionInfo:
        found = next((one for one in self._sessions() if one.id == call.id), None)
        if found is None:
            raise ConnectionNotFound(f"there is no connection {call.id[:80]!r}")
        if found is session:
            raise InvalidArgument("this is the connection you ask through; close it instead")
        info, reason = self._info(found), call.reason[:_REASON_LETTERS_MAX]
        why = ConnectionLost(f"an administrator has ended the connection{reason and f': {reason}'}")
        found.why = str(why)
        if found.end is not None:
            found.end(why)
        # Not when the client has read its last words: one that hangs would keep what it has leased.
        self._host.session_closed(found)
        about = {"connection": info.id, "door": info.door, "address": info.address, "client": info.client_id}
        _log.info("client disconnected", **about, reason=reason, leased=info.leased, by=session.client_id)
        return info

    def _info(self, session: Session) -> calls.ConnectionInfo:
        consumers = self._host.queues.consumers_of(session)
        groups = {f"{group.topic.name}/{group.name}" for consumer in consumers for group in consumer.groups}
        return calls.ConnectionInfo(
            id=session.id,
            door=session.door,
            address=session.address,
            client_id=session.client_id,
            namespace=session.namespace,
            opened_ms=session.opened_ms,
            age_ms=max(0, self._clock.now_us() // 1000 - session.opened_ms),
            queues=sorted(groups),
            leased=sum(consumer.held() for consumer in consumers),
            subscriptions=self._host.subscriptions.count_of(session),
        )


async def _try(work: Awaitable[None], where: str, failures: list[str]) -> None:
    """One log that has failed must not keep the others from the disk."""
    try:
        await work
    except (MillstreamError, OSError) as error:
        failures.append(f"{where}: {error}")
