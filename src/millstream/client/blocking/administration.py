"""`client.admin`: for whoever runs the broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.wire import admin_calls as calls

__all__ = ["Administration"]


class Administration:
    """The broker as a whole: its health, its settings, its files and its connections."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        self._call = call

    def health(self, *, deep: bool = False) -> calls.HealthReport:
        """How the broker is; with `deep` it also stores a message, reads it back, and looks for lag."""
        report: calls.HealthReport = self._call(calls.CheckHealth(deep=deep), calls.HealthReport)
        return report

    def config(self) -> list[calls.SettingInfo]:
        """The settings in force, and where each came from.  Secrets are not told."""
        settings: list[calls.SettingInfo] = self._call(calls.ShowConfig(), list[calls.SettingInfo])
        return settings

    def set_log_level(self, level: calls.LogLevel) -> calls.LogLevelInfo:
        """From how important an entry on the broker logs, until it stops."""
        info: calls.LogLevelInfo = self._call(calls.SetLogLevel(level=level), calls.LogLevelInfo)
        return info

    def checkpoint(self) -> calls.Checkpointed:
        """Put everything on disk, and write down anew what the broker remembers, so that a start is quick."""
        answer: calls.Checkpointed = self._call(calls.Checkpoint(), calls.Checkpointed)
        return answer

    def compact(self, topic: str | None = None, *, roll: bool = False) -> calls.Compacted:
        """Apply retention and compaction now, to one topic or to everything.

        With `roll` also to the segments that are being written, which are ended first.
        """
        call = calls.Compact(topic=topic or "", roll=roll)
        answer: calls.Compacted = self._call(call, calls.Compacted)
        return answer

    def hold_files(self, hold_id: str = "", *, hold_ms: int = 60_000) -> calls.FileHold:
        """Keep all files of the data directory readable as they are now; with an id, go on doing so.

        `millstream backup` copies them meanwhile.  Ends after `hold_ms`, with `release_files`, or with the connection.
        """
        call = calls.HoldFiles(id=hold_id, hold_ms=hold_ms)
        held: calls.FileHold = self._call(call, calls.FileHold)
        return held

    def release_files(self, hold_id: str) -> None:
        """The files were copied.  Raises HoldLost when they were not held all the time."""
        self._call(calls.ReleaseFiles(id=hold_id), None)

    def connections(self) -> list[calls.ConnectionInfo]:
        """Every client that is connected, of all namespaces, the oldest first."""
        found: list[calls.ConnectionInfo] = self._call(calls.ListConnections(), list[calls.ConnectionInfo])
        return found

    def disconnect(self, connection_id: str, reason: str = "") -> calls.ConnectionInfo:
        """End the connection with this `id`, whichever door it came through; its client is told the reason.

        What it has leased goes back at once.  A client comes back by itself: to keep it out, revoke its key.
        """
        call = calls.Disconnect(id=connection_id, reason=reason)
        ended: calls.ConnectionInfo = self._call(call, calls.ConnectionInfo)
        return ended
