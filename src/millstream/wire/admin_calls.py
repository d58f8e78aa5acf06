"""The control calls of whoever runs the broker: its health, its settings, its files and its connections."""

from __future__ import annotations

from typing import Any, Literal

from millstream.wire.forms import AnswerForm, CallForm

__all__ = [
    "CheckHealth",
    "Checkpoint",
    "Checkpointed",
    "Compact",
    "Compacted",
    "ComponentHealth",
    "ConnectionInfo",
    "Disconnect",
    "FileHold",
    "HealthReport",
    "HealthStatus",
    "HoldFiles",
    "ListConnections",
    "LogLevel",
    "LogLevelInfo",
    "ReleaseFiles",
    "SetLogLevel",
    "SettingInfo",
    "ShowConfig",
]

LogLevel = Literal["debug", "info", "warning", "error"]
#: `degraded`: it serves, and somebody should look.  `unknown`: it could not be looked at.
HealthStatus = Literal["healthy", "degraded", "critical", "unknown"]


# --- health ------------------------------------------------------------------------------------------------------


class CheckHealth(CallForm, tag="broker.health"):
    """Answers with HealthReport.  `deep` also writes and reads back, and looks at how far readers are behind."""

    deep: bool = False
    #: How long each probe of a deep check may take.
    timeout_ms: int = 5000


class ComponentHealth(AnswerForm):
    name: str
    status: HealthStatus
    #: What was found, in one sentence.  As it may name topics, it is empty for a key that may not read everything.
    message: str
    #: What to do about it; empty when there is nothing to do.
    recommendation: str
    latency_ms: float
    #: How often the component was not healthy since the broker started.
    errors: int


class HealthReport(AnswerForm):
    #: The status of the component that is worst off.
    status: HealthStatus
    #: Whether messages can be published.
    ready: bool
    #: Why messages cannot be published; empty if they can.
    reason: str
    deep: bool
    uptime_ms: int
    checked_ms: int
    components: list[ComponentHealth]


# --- settings ----------------------------------------------------------------------------------------------------


class ShowConfig(CallForm, tag="admin.config"):
    """Answers with a list of SettingInfo: what is in force, and where it came from.  Secrets are not told."""


class SettingInfo(AnswerForm):
    #: `section.key`.
    name: str
    value: Any
    source: str


class SetLogLevel(CallForm, tag="admin.log_level"):
    """Says from how important an entry on the broker logs, until it stops.  Answers with LogLevelInfo."""

    level: LogLevel


class LogLevelInfo(AnswerForm):
    level: LogLevel
    before: LogLevel


# --- files -------------------------------------------------------------------------------------------------------


class Checkpoint(CallForm, tag="admin.checkpoint"):
    """Puts everything on disk, and writes down anew what the broker remembers, so that a start is quick.

    Answers with Checkpointed.
    """


class Checkpointed(AnswerForm):
    #: Logs that were synced, or were synced already.
    logs: int
    #: Journals that were rewritten.
    journals: int
    #: State logs that were rewritten.
    state_logs: int
    #: Where this did not succeed, and why.
    failures: list[str]
    took_ms: int


class Compact(CallForm, tag="admin.compact"):
    """Does now what the broker does from time to time: removes what retention and compaction have decided.

    Of one topic, or of everything.  Answers with Compacted.
    """

    topic: str = ""
    #: Also the segments that are being written: they are ended first.
    roll: bool = False


class Compacted(AnswerForm):
    partitions: int
    segments_deleted: int
    #: Partitions that were rewritten without the messages that newer ones replace.
    compacted: int
    bytes_before: int
    bytes_after: int
    took_ms: int


class HoldFiles(CallForm, tag="admin.hold_files"):
    """Keeps all files as they are at this moment readable, while the broker goes on, so that they can be copied.

    With the `id` of a hold it goes on for another `hold_ms`.  It ends after that time, when it is released, and with
    its connection.  `held/list` in the data directory says what there was.  Answers with FileHold.
    """

    id: str = ""
    hold_ms: int = 60_000


class FileHold(AnswerForm):
    id: str
    #: The moment that a copy of the files shows.
    moment_ms: int
    until_ms: int
    files: int
    bytes: int
    #: The broker's data directory, as the broker names it.
    data: str


class ReleaseFiles(CallForm, tag="admin.release_files"):
    """The copy is done.  Fails when the files were not held all the time."""

    id: str


# --- connections -------------------------------------------------------------------------------------------------


class ListConnections(CallForm, tag="admin.connections"):
    """Answers with a list of ConnectionInfo, the oldest first: every client that is connected, of all namespaces.

    A plain HTTP request is not a connection in this sense; a stream or a WebSocket is.
    """


class Disconnect(CallForm, tag="admin.disconnect"):
    """Ends a connection, by its id; its client is told the reason, and what it has leased goes back at once.

    A client comes back by itself: to keep it out, revoke its key.  Answers with the ConnectionInfo of what was ended.
    """

    id: str
    reason: str = ""


class ConnectionInfo(AnswerForm):
    id: str
    door: str
    address: str
    client_id: str
    namespace: str
    opened_ms: int
    age_ms: int
    #: The queues that it consumes, as `topic/group`.
    queues: list[str]
    #: How many messages of these queues it holds.
    leased: int
    subscriptions: int
