"""The keys of `millstream top`, as a terminal hands them over."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator

import pytest

from millstream.cli import top


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where to type."""
    typing, reading = pty.openpty()
    with open(reading, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield typing
    os.close(typing)


def test_keys_that_are_pressed_together_are_seen_one_by_one(keyboard: int) -> None:
    """The second one lay in a buffer until a third was pressed."""
    with top._keys() as wait_for_key:
        os.write(keyboard, b"xq")
        assert [wait_for_key(5), wait_for_key(5)] == ["x", "q"]
        assert wait_for_key(0.01) == ""
