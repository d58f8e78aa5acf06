"""Telling the world that a message has died: an HTTP POST per dead letter, if its topic asks for it.

The receiver may be slow, or gone.  So alerts wait in a short line, each is tried a few times, and when the line is full
the newest are dropped and counted: a broker that gives up on ten thousand messages at once has said what it has to say
with the first thousand.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from millstream.broker.webhooks.sender import Sender, TargetForbidden
from millstream.errors import InvalidArgument
from millstream.webhooks.targets import parse_target

__all__ = ["Alert", "LetterAlerts"]

_log = structlog.get_logger("millstream.dead_letters")

_WAITING_MAX: Final = 1_000
_TIMEOUT_S: Final = 5.0
#: How long to wait before each further try.
_PAUSES_S: Final = (0.5, 2.0, 8.0)
_HEADERS: Final = [("Content-Type", "application/json")]


class Alert(NamedTuple):
    url: str
    document: dict[str, object]


class LetterAlerts:
    """Sends alerts one after the other; `told` is called with whether each went through."""

    def __init__(
        self,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        told: Callable[[bool], None],
        *,
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        self._sender = sender
        self._loop = loop
        self._told = told
        self._pauses_s = pauses_s
        self._waiting: deque[Alert] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def send(self, alert: Alert) -> None:
        """Put an alert in line; returns at once."""
        if self._closed or len(self._waiting) >= _WAITING_MAX:
            self._told(False)
            return
        self._waiting.append(alert)
        if self._task is None:
            self._task = self._loop.create_task(self._work())

    async def close(self) -> None:
        """Send no more; what is in line is forgotten."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _work(self) -> None:
        try:
            while self._waiting:
                self._told(await self._deliver(self._waiting.popleft()))
        finally:
            self._task = None

    async def _deliver(self, alert: Alert) -> bool:
        body = msgspec.json.encode(alert.document)
        where, problem = "", ""
        try:
            target = parse_target(alert.url)
            where = target.shown
            for pause_s in (*self._pauses_s, None):
                answer = await self._sender.post(target, _HEADERS, body, timeout_s=_TIMEOUT_S)
                if answer.is_success:
                    return True
                problem = answer.error
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
        except (InvalidArgument, TargetForbidden) as error:  # no use in trying again
            problem = str(error)
        _log.warning("a dead letter alert was not delivered", url=where, reason=problem)
        return False
