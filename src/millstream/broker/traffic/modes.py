"""The broker's mode at run time: what it measures, refuses, and whom it tells.  The rules are in traffic/modes.py."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

import structlog

from millstream.broker.metrics import Metrics
from millstream.config import Settings
from millstream.errors import MillstreamError, ReadOnly, Throttled
from millstream.traffic.modes import ModeRules, Modes, Situation
from millstream.wire.subscription_calls import FlowNotice, ModeInfo, SetMode

__all__ = ["ModeKeeper", "resident_bytes"]

_log = structlog.get_logger("millstream.modes")

WATCH_S: Final = 1.0
#: How long confirmations take in mode `throttled`: enough to be felt, far from any time-out.
_DELAY_MS: Final = 100
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """How much memory this process holds; 0 where the system does not say."""
    try:
        with open(_STATM, "rb", buffering=0) as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


class Listener(Protocol):
    def push(self, message: object, /) -> None: ...


class ModeKeeper:
    """Watches disk and memory, and says what the broker may be asked for."""

    def __init__(
        self,
        settings: Settings,
        *,
        free_bytes: Callable[[], int],
        memory_bytes: Callable[[], int],
        state_failure: Callable[[], str | None],
        sessions: Callable[[], Iterable[Listener]],
        metrics: Metrics,
    ) -> None:
        self._modes = Modes(
            ModeRules(
                free_bytes_min=settings.storage.free_bytes_min,
                memory_bytes_warning=settings.server.memory_bytes_warning,
                memory_bytes_critical=settings.server.memory_bytes_critical,
            )
        )
        self._free_bytes = free_bytes
        #: Where memory is measured; a test may say something else.
        self.memory_bytes = memory_bytes
        self._state_failure = state_failure
        self._sessions = sessions
        self._metrics = metrics
        #: What is said to those who publish, want messages or connect; None when they may.
        self._no_publishing: str | None = None
        self._no_serving: str | None = None
        self._no_connecting: str | None = None
        #: By how much confirmations are delayed.
        self.delay_ms = 0

    # An error of its own for everybody who is refused.  One that is raised again and again keeps the stack of each
    # time, and with it every connection that was ever refused.

    @property
    def publish_refusal(self) -> MillstreamError | None:
        """Raised by whoever publishes; None when publishing is allowed."""
        return None if self._no_publishing is None else ReadOnly(self._no_publishing)

    @property
    def serve_refusal(self) -> MillstreamError | None:
        """Raised by whoever wants messages."""
        return None if self._no_serving is None else ReadOnly(self._no_serving)

    @property
    def connect_refusal(self) -> MillstreamError | None:
        return None if self._no_connecting is None else Throttled(self._no_connecting)

    @property
    def mode(self) -> str:
        return self._modes.mode

    @property
    def reason(self) -> str | None:
        return self._modes.reason or None

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        return {SetMode: self._set}

    async def watch(self) -> None:
        """Called every WATCH_S."""
        self.measure()

    def measure(self) -> None:
        """Look at disk and memory, and decide what that means; until then both would be said to be 0."""
        situation = Situation(
            free_bytes=self._free_bytes(), memory_bytes=self.memory_bytes(), storage_failure=self._state_failure()
        )
        self._metrics.memory_bytes = situation.memory_bytes
        self._metrics.disk_free_bytes = situation.free_bytes
        self._decided(self._modes.observe(situation))

    async def _set(self, _: object, call: SetMode) -> ModeInfo:
        self._decided(self._modes.maintain(None if call.mode == "normal" else call.reason))
        return ModeInfo(mode=self._modes.mode, reason=self._modes.reason)

    def _decided(self, changed: bool) -> None:
        """Say why, also if only that has changed."""
        modes = self._modes
        text = f"the broker is in mode {modes.mode}: {modes.reason}"
        self._no_publishing = None if modes.accepts_messages else text
        self._no_serving = None if modes.serves else text
        self._no_connecting = None if modes.accepts_connections else text
        if changed:
            self._changed(text)

    def _changed(self, text: str) -> None:
        modes = self._modes
        self.delay_ms = _DELAY_MS if modes.mode == "throttled" else 0
        self._metrics.mode_changes += 1
        (_log.warning if modes.mode == "normal" else _log.error)("mode", mode=modes.mode, reason=modes.reason)
        notice = FlowNotice(
            topic="",
            level="normal" if modes.mode == "normal" else "warning" if modes.accepts_messages else "overloaded",
            delay_ms=self.delay_ms,
            reason=text if modes.reason else "",
        )
        for session in self._sessions():
            session.push(notice)
