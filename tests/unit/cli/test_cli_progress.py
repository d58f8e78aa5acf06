"""What is said while somebody waits."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from millstream.cli.progress import told_of_a_wait


class _Said(io.StringIO):
    """Where it is written; `heard` is set by the end of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            self.heard.set()
        return written


def test_who_waits_is_told() -> None:
    said = _Said()
    with told_of_a_wait(
        "still [trying]", console=Console(file=said, force_terminal=True, color_system=None), after_s=0
    ):
        assert said.heard.wait(10)
    assert "still [trying]" in said.getvalue()


@pytest.mark.parametrize(("terminal", "after_s"), [(True, 3600), (False, 0)], ids=["in time", "in a pipe"])
def test_nobody_is_told_of_what_is_over_or_in_a_pipe(terminal: bool, after_s: float) -> None:
    said = _Said()
    before = threading.active_count()
    with told_of_a_wait("still trying", console=Console(file=said, force_terminal=terminal), after_s=after_s):
        assert threading.active_count() == before + terminal
    assert not said.getvalue()
