"""Keeping the files of one moment for whoever copies them: the calls `admin.hold_files` and `admin.release_files`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

import structlog

from millstream.broker.partition import Partition
from millstream.broker.queues.queues import Queues
from millstream.broker.sessions import Session
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import FilesHeld, HoldLost, InvalidArgument, StorageFailed
from millstream.log.storage import DiskStorage, Storage
from millstream.wire import admin_calls as calls

__all__ = ["Holds"]

_log = structlog.get_logger("millstream.holds")

#: What is held takes room that retention would give back; whoever needs longer asks again.
HOLD_MS_MAX: Final = 600_000


class _Host(Protocol):
    settings: Settings
    topics: Topics
    queues: Queues

    def flush(self) -> None: ...


class Holds:
    """At most one hold at a time.  All methods are called on the event loop."""

    def __init__(
        self,
        host: _Host,
        storage: Storage,
        *,
        logs: Callable[[], Iterable[Partition]],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        draw_id: Callable[[], str],
    ) -> None:
        self._host = host
        self._holding = storage.holding if isinstance(storage, DiskStorage) else None
        self._logs = logs
        self._clock = clock
        self._loop = loop
        self._draw_id = draw_id
        self._current: calls.FileHold | None = None
        self._owner: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        if self._holding is not None:
            self._holding.end()  # what a broker that was killed left behind

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {calls.HoldFiles: self._hold, calls.ReleaseFiles: self._release}

    async def close(self) -> None:
        """The broker stops."""
        self._end()
        if self._ending is not None:
            await self._ending

    def session_closed(self, session: Session) -> None:
        if session is self._owner:
            _log.warning("files are not held any more", reason="the connection that held them is gone")
            self._end()

    async def _hold(self, session: Session, call: calls.HoldFiles) -> calls.FileHold:
        if self._holding is None:
            raise InvalidArgument("this broker does not keep its data in files")
        if not 1 <= call.hold_ms <= HOLD_MS_MAX:
            raise InvalidArgument(f"hold_ms must be between 1 and {HOLD_MS_MAX}, not {call.hold_ms}")
        if call.id:
            hold = self._mine(session, call.id)
            hold.until_ms = self._arm(call.hold_ms)
            return hold
        if self._ending is not None:
            await self._ending
        if self._current is not None:
            raise FilesHeld(f"{self._owner.client_id if self._owner else 'somebody'} holds the files already")
        # From here to the list of files nothing is awaited: all of it is one moment.
        self._host.flush()
        self._host.queues.flush()
        self._host.topics.flush_journals()
        try:
            for partition in self._logs():
                # Otherwise the next append would change bytes that are held, and need a copy of them.
                partition.log.give_back_room()
            held = self._holding.begin(self._draw_id())
        except OSError as error:
            self._holding.end()
            reason = error.strerror or error
            raise StorageFailed(f"the files cannot be held: {error.filename or 'a file'}: {reason}") from None
        self._owner = session
        self._current = calls.FileHold(
            id=held.hold_id,
            moment_ms=self._clock.now_us() // 1000,
            until_ms=self._arm(call.hold_ms),
            files=len(held.sizes),
            bytes=sum(held.sizes.values()),
            data=self._host.settings.storage.data,
        )
        _log.info("files are held", files=self._current.files, bytes=self._current.bytes, client=session.client_id)
        return self._current

    async def _release(self, session: Session, call: calls.ReleaseFiles) -> None:
        self._mine(session, call.id)
        self._end()

    def _mine(self, session: Session, hold_id: str) -> calls.FileHold:
        if self._current is None or self._current.id != hold_id or self._owner is not session:
            raise HoldLost("the files were not held all the time")
        if self._holding is not None and self._holding.lost:
            self._end()  # what was put aside takes room that is needed
            raise HoldLost(f"the files were not held all the time: {self._holding.lost}")
        return self._current

    def _arm(self, hold_ms: int) -> int:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(hold_ms / 1000, self._expire)
        return self._clock.now_us() // 1000 + hold_ms

    def _expire(self) -> None:
        _log.warning("files are not held any more", reason="the time was up")
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._current is None or self._holding is None:
            return
        self._current = self._owner = None
        holding = self._holding
        # What was put aside may be many large files.
        self._ending = self._loop.run_in_executor(None, holding.end)
