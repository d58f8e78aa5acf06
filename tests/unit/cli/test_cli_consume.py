"""`millstream consume`: what it says besides messages."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console

from millstream.cli import consume


class _Stream:
    """Answers each `next` with the next of these, and notes how long it was to wait."""

    def __init__(self, *answers: object) -> None:
        self._answers = iter(answers)
        self.waited: list[float | None] = []

    def next(self, timeout_s: float | None) -> object:
        self.waited.append(timeout_s)
        return next(self._answers)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard error, a terminal."""
    shown = io.StringIO()
    monkeypatch.setattr(consume, "stderr", Console(file=shown, force_terminal=True, color_system=None))
    return shown


def test_who_looks_at_nothing_is_told_once_that_it_waits(said: io.StringIO) -> None:
    stream = _Stream("a", None, "b", None)
    assert list(consume._until_quiet(cast(Any, stream), None)) == ["a", "b"]
    assert said.getvalue() == "waiting for messages; Ctrl-C ends\n"
    assert stream.waited[2:] == [None, None], "then as long as it takes"


def test_who_has_said_how_long_to_wait_is_told_nothing(said: io.StringIO) -> None:
    stream = _Stream(None)
    assert list(consume._until_quiet(cast(Any, stream), 0.5)) == []
    assert (said.getvalue(), stream.waited) == ("", [0.5])
