"""When publishers are slowed down, by how much, and when no longer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from millstream.traffic.flow import HOLD_MS, FlowController, Level

STEP_MS = 250


class Bench:
    """A controller and a clock."""

    def __init__(self, *, lag_limit_ms: int = 1_000, depth_limit: int = 0) -> None:
        self.now_ms = 0
        self.flow = FlowController(lag_limit_ms=lag_limit_ms, depth_limit=depth_limit, now_ms=0)

    def run(self, lags_ms: Iterable[int], depth: int = 0) -> list[tuple[Level, int]]:
        said = []
        for lag_ms in lags_ms:
            self.now_ms += STEP_MS
            self.flow.sample(self.now_ms, lag_ms=lag_ms, depth=depth)
            said.append((self.flow.level, self.flow.delay_ms))
        return said


def test_a_topic_within_its_limits_is_left_alone() -> None:
    assert set(Bench().run([300] * 100)) == {(Level.NORMAL, 0)}


def test_one_bad_sample_decides_nothing() -> None:
    assert set(Bench(lag_limit_ms=1_000).run([0, 3_500, 0, 0, 0] * 10)) <= {(Level.NORMAL, 0), (Level.WARNING, 0)}
    for calm in range(20):
        bench = Bench()
        bench.run([0] * calm)
        assert bench.run([1_000_000])[-1] == (Level.NORMAL, 0)


def test_levels_are_passed_through_one_by_one_on_the_way_up_and_down() -> None:
    bench = Bench()
    levels = [level for level, _ in bench.run([10_000] * 40)]
    assert levels[-1] == Level.OVERLOADED
    assert levels == sorted(levels)
    assert set(levels) == set(Level)
    levels = [level for level, _ in bench.run([0] * 100)]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == set(Level)
    assert levels[-1] == Level.NORMAL


def test_a_lag_around_the_limit_does_not_flutter() -> None:
    bench = Bench()
    bench.run([1_500] * 40)
    levels = [level for level, _ in bench.run([1_300, 700] * 100)]
    assert set(levels) == {Level.CRITICAL}


def test_a_level_is_held_for_a_while_after_the_pressure_is_gone() -> None:
    bench = Bench()
    bench.run([1_500] * 40)
    relieved_ms = bench.now_ms
    while bench.flow.level == Level.CRITICAL:
        bench.run([0])
    assert bench.now_ms - relieved_ms >= HOLD_MS


def test_the_delay_grows_and_shrinks_by_steps_and_has_a_limit() -> None:
    bench = Bench()
    rising = [delay_ms for _, delay_ms in bench.run([5_000] * 80)]
    assert rising == sorted(rising)
    assert rising[-1] == 2_000
    steps = [after - before for before, after in pairwise(rising)]
    assert max(steps) <= 1_000, "a publisher is not stopped from one moment to the next"
    falling = [delay_ms for _, delay_ms in bench.run([0] * 80)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 1_000
    assert falling[-1] == 0
    assert bench.flow.at_rest


def test_depth_alone_can_slow_publishers_down() -> None:
    bench = Bench(lag_limit_ms=0, depth_limit=100)
    bench.run([0] * 20, depth=150)
    assert bench.flow.level == Level.CRITICAL
    assert bench.flow.delay_ms > 0
    assert Bench(lag_limit_ms=0, depth_limit=0).run([10**9] * 20, depth=10**9)[-1] == (Level.NORMAL, 0)


def test_trend_and_the_time_to_catch_up_follow_what_happens() -> None:
    flow = FlowController(lag_limit_ms=0, depth_limit=1_000, now_ms=0)
    for step in range(1, 41):
        flow.sample(step * STEP_MS, lag_ms=0, depth=step * 50)
    assert flow.trend == "increasing"
    assert flow.catch_up_ms is None
    for step in range(41, 61):
        flow.sample(step * STEP_MS, lag_ms=0, depth=2_000 - (step - 40) * 50)
    assert flow.trend == "decreasing"
    assert flow.catch_up_ms is not None
    assert 4_000 < flow.catch_up_ms < 12_000, "1,000 messages at 200 a second"
    for step in range(61, 161):
        flow.sample(step * STEP_MS, lag_ms=0, depth=1_000)
    assert flow.trend == "stable"
