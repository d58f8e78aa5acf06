"""Telling the world that a message has died: an HTTP POST per dead letter, if its topic asks for it.

A webhook may be slow, or gone.  So alerts wait in a short line for a thread of their own, each is tried a few times,
and when the line is full the newest are dropped and counted: a broker that gives up on ten thousand messages at once
has said what it has to say with the first thousand.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import urllib.request
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

__all__ = ["Alert", "LetterAlerts"]

_log = structlog.get_logger("millstream.dead_letters")

_WAITING_MAX: Final = 1_000
_TIMEOUT_S: Final = 5.0
#: How long to wait before each further try.
_PAUSES_S: Final = (0.5, 2.0, 8.0)


class Alert(NamedTuple):
    url: str
    document: dict[str, object]


class LetterAlerts:
    """Owns the thread that sends; `told` is called in it with whether an alert went through."""

    def __init__(self, told: Callable[[bool], None], *, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        self._told = told
        self._pauses_s = pauses_s
        self._waiting: queue.Queue[Alert | None] = queue.Queue(_WAITING_MAX)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Put an alert in line; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="millstream-alerts", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._told(False)

    def close(self) -> None:
        """Send no more.  What is under way may finish in its own time; nobody waits for it."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):  # then the thread sees `_stopping` when it takes the next one
            self._waiting.put_nowait(None)

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None and not self._stopping.is_set():
            self._told(self._deliver(alert))

    def _deliver(self, alert: Alert) -> bool:
        body = msgspec.json.encode(alert.document)
        request = urllib.request.Request(alert.url, body, {"Content-Type": "application/json"})
        for pause_s in (*self._pauses_s, None):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    return True
            except (OSError, ValueError) as error:  # also HTTP errors: 400 and above
                problem = str(error)
            if pause_s is None or self._stopping.wait(pause_s):
                break
        _log.warning("a dead letter alert was not delivered", url=alert.url, reason=problem)
        return False
