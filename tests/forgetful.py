"""An asyncio that forgets to say that it has enough."""

from __future__ import annotations

from asyncio import selector_events
from collections.abc import Iterable
from typing import Any

import pytest

from millstream import writing

__all__ = ["forget_to_pause"]


def forget_to_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `writelines` never call `pause_writing`, as in Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1 (gh-127655)."""
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    writelines = transport.writelines

    def forgetful(self: Any, parts: Iterable[Any]) -> None:
        self._maybe_pause_protocol = lambda: None
        try:
            writelines(self, parts)
        finally:
            del self._maybe_pause_protocol

    monkeypatch.setattr(transport, "writelines", forgetful)
    monkeypatch.setattr(writing, "_FORGETS", True)
