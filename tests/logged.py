"""What a broker in this process writes to its log, as it would be written."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from millstream.broker.logs import details
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs

__all__ = ["Logged", "logged"]


class Logged:
    """Entries, in the order in which they came."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def all(self, event: str = "", **fields: Any) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [
            entry
            for entry in entries
            if event in ("", entry["event"]) and all(entry.get(name) == value for name, value in fields.items())
        ]

    def one(self, event: str, **fields: Any) -> dict[str, Any]:
        """The one entry of this kind, which another thread may be about to write."""
        until = time.monotonic() + 5
        while not (found := self.all(event, **fields)) and time.monotonic() < until:
            time.sleep(0.005)
        assert len(found) == 1, f"{event!r} {fields}: {found or self.all()}"
        return found[0]


@contextmanager
def logged(level: str = "debug") -> Iterator[Logged]:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    set_up_logs(LogSettings.model_validate({"level": level, "format": "json"}), stream)
    try:
        yield Logged(stream)
    finally:
        structlog.reset_defaults()
        details.on = False
        root.handlers[:] = handlers
        root.setLevel(before)
