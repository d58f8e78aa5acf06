"""What publishers are told of a topic whose consumers are behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millstream.broker.metrics import Metrics
from millstream.broker.traffic.flow import Flow


class Backlog:
    """A queue of which the test says how long it is."""

    messages = 0

    async def open(self, topic: Any) -> None:
        pass

    def opens_soon(self, topic: Any) -> bool:
        return False

    def depth(self, topic: Any, *, of_open: bool = False) -> int:
        return self.messages

    def waiting_since_us(self, topic: Any) -> None:
        return None


class Publisher:
    namespace = "default"

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def push(self, notice: Any) -> None:
        self.told.append((notice.level, notice.delay_ms))


def test_a_silent_publisher_is_told_of_the_end_and_not_only_that_it_comes() -> None:
    """The level is normal before the delay is gone.  Who was forgotten then waited before each publish for ever."""
    config = SimpleNamespace(max_depth=0, throttle_lag_ms=0, throttle_depth=1000, dedup_window_ms=1000)
    topic: Any = SimpleNamespace(key="t", name="t", namespace="default", deleting=False, config=config)
    registry: Any = SimpleNamespace(find=lambda *_: topic)
    clock: Any = SimpleNamespace(ms=0, monotonic_ms=lambda: clock.ms, now_us=lambda: clock.ms * 1000)
    backlog: Any = Backlog()

    async def main() -> None:
        flow = Flow(registry, backlog, clock=clock, loop=asyncio.get_running_loop(), metrics=Metrics())
        silent = Publisher()
        flow.admit(silent, topic, 0, memoryview(b""), None)
        backlog.messages = 5000
        for _ in range(400):
            clock.ms += 250
            await flow.sample()
        assert silent.told[-1][1] > 0
        backlog.messages = 0
        while flow._throttles:
            clock.ms += 5000
            await flow.sample()
        assert silent.told[-1] == ("normal", 0)

    asyncio.run(main())
