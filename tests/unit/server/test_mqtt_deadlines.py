"""When connections are looked at: not early, hardly late, and not for time in which nobody could read."""

from __future__ import annotations

from typing import Any

from millstream.server.mqtt.deadlines import TICK_MS, Deadlines


class Clock:
    """All that deadlines want of a loop."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


class Someone:
    def __init__(self, deadlines: Deadlines) -> None:
        self.due = 0
        self.looks: list[int] = []
        self.aborted = False
        self._deadlines = deadlines

    def look(self) -> None:
        self.looks.append(self._deadlines.now)

    def abort(self) -> None:
        self.aborted = True


class Clumsy(Someone):
    def look(self) -> None:
        raise ZeroDivisionError


def world() -> tuple[Any, Deadlines]:
    clock: Any = Clock()
    return clock, Deadlines(clock)


def go_on(clock: Any, deadlines: Deadlines, ticks: int) -> None:
    for _ in range(ticks):
        clock.now_s += TICK_MS / 1000
        deadlines.go_on()


def test_everybody_is_looked_at_once_at_its_tick() -> None:
    clock, deadlines = world()
    start = deadlines.now
    early, late = Someone(deadlines), Someone(deadlines)
    deadlines.set(early, start + 3)
    deadlines.set(late, start + 7)
    go_on(clock, deadlines, 20)
    assert (early.looks, late.looks) == ([start + 3], [start + 7])


def test_who_is_set_again_or_cleared_is_not_looked_at_when_it_was_due_before() -> None:
    clock, deadlines = world()
    start = deadlines.now
    moved, gone = Someone(deadlines), Someone(deadlines)
    for some in (moved, gone):
        deadlines.set(some, start + 3)
    deadlines.set(moved, start + 5)
    deadlines.clear(gone)
    deadlines.clear(gone)
    go_on(clock, deadlines, 10)
    assert (moved.looks, gone.looks) == ([start + 5], [])
    assert not deadlines._due, "nothing is kept of those who are gone"


def test_what_is_due_already_is_due_at_the_next_tick() -> None:
    clock, deadlines = world()
    someone = Someone(deadlines)
    deadlines.set(someone, deadlines.now - 5)
    go_on(clock, deadlines, 1)
    assert someone.looks == [deadlines.now]


def test_after_a_standstill_there_is_time_to_read_what_came_meanwhile() -> None:
    clock, deadlines = world()
    someone = Someone(deadlines)
    deadlines.set(someone, deadlines.now + 4)
    clock.now_s += 60
    deadlines.go_on()
    assert not someone.looks
    go_on(clock, deadlines, 1)
    assert someone.looks == [deadlines.now]


def test_a_loop_that_always_stands_still_does_not_put_it_off_for_ever() -> None:
    clock, deadlines = world()
    someone = Someone(deadlines)
    deadlines.set(someone, deadlines.now + 4)
    for _ in range(2):
        clock.now_s += 60
        deadlines.go_on()
    assert len(someone.looks) == 1


def test_one_who_fails_does_not_keep_the_others_from_being_looked_at() -> None:
    clock, deadlines = world()
    clumsy, someone = Clumsy(deadlines), Someone(deadlines)
    deadlines.set(clumsy, deadlines.now + 1)
    deadlines.set(someone, deadlines.now + 2)
    go_on(clock, deadlines, 3)
    assert clumsy.aborted
    assert someone.looks
