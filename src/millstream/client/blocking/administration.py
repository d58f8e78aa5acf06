"""`client.admin`: for whoever runs the broker."""

from __future__ import annotations

from millstream.client.asking import Ask
from millstream.wire import admin_calls as calls

__all__ = ["Administration"]


class Administration:
    """The broker as a whole: its health, its settings, its files and its connections."""

    def __init__(self, call: Ask) -> None:
        self._call = call

    def health(self, *, deep: bool = False) -> calls.HealthReport:
        """The health of the broker; with `deep`, it also stores a message, reads it back, and looks for lag."""
        return self._call(calls.CheckHealth(deep=deep), calls.HealthReport)

    def config(self) -> list[calls.SettingInfo]:
        """The settings in force, and where each came from.  Secrets are not shown."""
        return self._call(calls.ShowConfig(), list[calls.SettingInfo])

    def set_log_level(self, level: calls.LogLevel) -> calls.LogLevelInfo:
        """Set the lowest level that the broker logs, until it stops."""
        return self._call(calls.SetLogLevel(level=level), calls.LogLevelInfo)

    def checkpoint(self) -> calls.Checkpointed:
        """Put everything on disk, and rewrite what the broker remembers, so that it starts quickly."""
        return self._call(calls.Checkpoint(), calls.Checkpointed)

    def compact(self, topic: str | None = None, *, roll: bool = False) -> calls.Compacted:
        """Apply retention and compaction now, to one topic or to everything.

        With `roll`, this includes the segments that are being written; they are ended first.
        """
        return self._call(calls.Compact(topic=topic or "", roll=roll), calls.Compacted)

    def hold_files(self, hold_id: str = "", *, hold_ms: int = 60_000) -> calls.FileHold:
        """Keep all files of the data directory readable as they are now; with the id of a hold, extend it.

        `millstream backup` copies the files during a hold.  A hold ends after `hold_ms`, with `release_files`, or with
        the connection.
        """
        return self._call(calls.HoldFiles(id=hold_id, hold_ms=hold_ms), calls.FileHold)

    def release_files(self, hold_id: str) -> None:
        """End a hold: the files were copied.  Raises HoldLost if they were not held all the time."""
        self._call(calls.ReleaseFiles(id=hold_id), object)

    def connections(self) -> list[calls.ConnectionInfo]:
        """All clients that are connected, in all namespaces, oldest first."""
        return self._call(calls.ListConnections(), list[calls.ConnectionInfo])

    def disconnect(self, connection_id: str, reason: str = "") -> calls.ConnectionInfo:
        """End the connection with this `id`, whichever door it came through; its client is told the reason.

        What it has leased goes back at once.  Clients reconnect by themselves: to keep one out, revoke its key.
        """
        return self._call(calls.Disconnect(id=connection_id, reason=reason), calls.ConnectionInfo)
