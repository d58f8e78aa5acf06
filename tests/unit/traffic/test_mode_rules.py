"""When the broker restricts itself."""

from __future__ import annotations

from millstream.traffic.modes import ModeRules, Modes, Situation

RULES = ModeRules(free_bytes_min=100, memory_bytes_warning=1_000, memory_bytes_critical=2_000)
FINE = Situation(free_bytes=1_000, memory_bytes=500)


def test_a_full_disk_makes_it_read_only_at_once_until_there_is_room_to_spare() -> None:
    modes = Modes(RULES)
    assert not modes.observe(FINE)
    assert modes.observe(FINE._replace(free_bytes=99))
    assert (modes.mode, modes.accepts_messages, modes.serves) == ("read-only", False, True)
    assert "99 bytes left, below storage.free_bytes_min (100)" in modes.reason
    assert not modes.observe(FINE._replace(free_bytes=109))
    assert "109 bytes left, not yet 10 % above storage.free_bytes_min (100)" in modes.reason
    assert not modes.observe(FINE._replace(free_bytes=110))
    assert modes.observe(FINE._replace(free_bytes=111))
    assert (modes.mode, modes.reason) == ("normal", "")


def test_large_numbers_can_be_read() -> None:
    modes = Modes(ModeRules(free_bytes_min=268_435_456))
    modes.observe(FINE._replace(free_bytes=20_946_944))
    assert "20,946,944 bytes left, below storage.free_bytes_min (268,435,456)" in modes.reason


def test_memory_must_be_over_a_limit_twice_and_clearly_below_it_to_be_forgotten() -> None:
    modes = Modes(RULES)
    high = FINE._replace(memory_bytes=1_500)
    modes.observe(high)
    modes.observe(FINE)
    modes.observe(high)
    assert modes.mode == "normal"
    assert modes.observe(high)
    assert (modes.mode, modes.accepts_messages) == ("throttled", True)
    modes.observe(FINE._replace(memory_bytes=950))
    assert modes.mode == "throttled"
    modes.observe(FINE._replace(memory_bytes=899))
    assert modes.mode == "normal"


def test_an_emergency_passes_through_throttled_on_its_way_back() -> None:
    modes = Modes(RULES)
    for _ in range(2):
        modes.observe(FINE._replace(memory_bytes=2_500))
    assert (modes.mode, modes.accepts_messages, modes.accepts_connections) == ("emergency", False, False)
    modes.observe(FINE._replace(memory_bytes=1_700))
    assert (modes.mode, modes.accepts_connections) == ("throttled", True)
    modes.observe(FINE)
    assert modes.mode == "normal"


def test_the_worst_of_several_troubles_decides_and_the_operator_over_all() -> None:
    modes = Modes(RULES)
    modes.observe(Situation(50, 1_500))
    modes.observe(Situation(50, 1_500))
    assert modes.mode == "read-only"
    assert modes.maintain("new disk")
    assert (modes.mode, modes.reason, modes.serves) == ("maintenance", "new disk", False)
    modes.observe(Situation(50, 2_500))
    assert modes.mode == "maintenance"
    assert modes.maintain(None)
    assert modes.mode == "read-only"


def test_limits_of_zero_are_not_watched() -> None:
    modes = Modes(ModeRules(free_bytes_min=0))
    for _ in range(3):
        assert not modes.observe(Situation(0, 10**12))
    assert modes.mode == "normal"


def test_state_that_cannot_be_recorded_makes_it_read_only() -> None:
    modes = Modes(RULES)
    assert modes.observe(FINE._replace(storage_failure="input/output error"))
    assert modes.mode == "read-only"
    assert "input/output error" in modes.reason
