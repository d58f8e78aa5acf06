"""Which ids are remembered, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.traffic.dedup import DedupWindow, Seen, fingerprint

WINDOW_US = 1_000


def test_a_repetition_within_the_window_finds_the_original() -> None:
    window = DedupWindow()
    window.add(fingerprint(b"a"), Seen(7, 100), window_us=WINDOW_US)
    assert window.find(fingerprint(b"a"), now_us=1_099, window_us=WINDOW_US) == Seen(7, 100)
    assert window.find(fingerprint(b"a"), now_us=1_100, window_us=WINDOW_US) is None
    assert window.find(fingerprint(b"b"), now_us=101, window_us=WINDOW_US) is None


def test_a_window_that_was_made_longer_counts_at_once() -> None:
    window = DedupWindow()
    window.add(fingerprint(b"a"), Seen(7, 100), window_us=WINDOW_US)
    assert window.find(fingerprint(b"a"), now_us=5_000, window_us=10_000) == Seen(7, 100)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), max_size=200))
def test_ids_are_found_exactly_within_the_window_while_they_are_few(steps: list[tuple[int, int]]) -> None:
    """Against a list of everything that was ever stored."""
    window, now_us, stored = DedupWindow(), 0, {}
    for offset, (number, pause_us) in enumerate(steps):
        now_us += pause_us
        mark = fingerprint(str(number).encode())
        found = window.find(mark, now_us=now_us, window_us=WINDOW_US)
        original = stored.get(number)
        assert found == (original if original and now_us - original.append_time_us < WINDOW_US else None)
        if found is None:
            stored[number] = Seen(offset, now_us)
            window.add(mark, stored[number], window_us=WINDOW_US)


def test_memory_is_bounded_and_the_newest_half_is_always_known() -> None:
    window = DedupWindow(ids_max=100)
    for offset in range(1_000):
        window.add(fingerprint(b"%d" % offset), Seen(offset, offset), window_us=1_000_000)
        assert len(window) <= 100
        for newest in range(max(0, offset - 49), offset + 1):
            assert window.find(fingerprint(b"%d" % newest), now_us=offset, window_us=1_000_000) is not None
