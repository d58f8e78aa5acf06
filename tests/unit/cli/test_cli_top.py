"""`millstream top`: its keys, as a terminal hands them over, and its tables."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from millstream.cli import top
from millstream.wire.stats_calls import GroupStanding, TopicActivity


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


def test_on_80_columns_a_name_gives_way_and_no_number_does() -> None:
    topic = TopicActivity(
        namespace="default", topic="shop.europe.orders", published_rate=12_345, consumed_rate=67_890,
        messages=1_234_567_890, size_bytes=12_345_678, depth=234_567, leased=5_432, waiting=0, scheduled=0,
        throttle_ms=0,
    )  # fmt: skip
    group = GroupStanding(
        namespace="default", topic="shop.europe.orders", group="billing-and-dunning", kind="queue", lag=1_234_567,
        oldest_ms=90_061_000, leased=5_432, consumers=1_000, state="rebalancing",
    )  # fmt: skip
    terminal = Console(file=io.StringIO(), width=80, color_system=None)
    terminal.print(top._topics([topic], everywhere=False), top._groups([group], everywhere=False))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for whole in ("published/s", "67,890", "1,234,567,890", "11.8 MiB", "234,567", "5,432", "consumers", "1 d 1 h"):
        assert whole in shown, shown
    assert "shop.eur" in shown
    assert "throttled" not in shown, "nobody is"
