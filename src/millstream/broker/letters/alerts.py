"""Telling the world that a message has died: an HTTP POST per dead letter, if its topic asks for it.

The receiver may be slow, or gone.  So alerts wait in a short line for each URL, each is tried a few times, and when the
line is full the newest are dropped and counted: a broker that gives up on ten thousand messages at once has said what
it has to say with the first thousand.
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
#: Of all URLs together: a line is that of one who does not answer.
_WAITING_IN_ALL_MAX: Final = 10_000
_TIMEOUT_S: Final = 5.0
#: How long to wait before each further try.
_PAUSES_S: Final = (0.5, 2.0, 8.0)
_HEADERS: Final = [("Content-Type", "application/json")]


class Alert(NamedTuple):
    url: str
    document: dict[str, object]


class LetterAlerts:
    """Sends the alerts for a URL one after the other; `told` is called with whether each went through."""

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
        self._lines: dict[str, deque[Alert]] = {}
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, alert: Alert) -> None:
        """Put an alert in line; returns at once."""
        line = self._lines.get(alert.url)
        is_full = self._waiting >= _WAITING_IN_ALL_MAX or (line is not None and len(line) >= _WAITING_MAX)
        if self._closed or is_full:
            self._told(False)
            return
        self._waiting += 1
        if line is not None:
            line.append(alert)
            return
        line = self._lines[alert.url] = deque((alert,))
        task = self._loop.create_task(self._work(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Send no more; what is in line is forgotten."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _work(self, line: deque[Alert]) -> None:
        url = line[0].url
        try:
            while line:
                self._waiting -= 1
                self._told(await self._deliver(line.popleft()))
        finally:
            self._waiting -= len(line)
            del self._lines[url]

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
