"""Producers that run side by side in one program, for clients with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import uvloop

__all__ = ["publish_by_tasks", "run_fast"]


async def publish_by_tasks(publish: Callable[[bytes], Awaitable[object]], bodies: Iterable[bytes], tasks: int) -> None:
    """Each task publishes the next of the bodies when its last one is confirmed."""
    left = iter(bodies)

    async def produce() -> None:
        for body in left:
            await publish(body)

    await asyncio.gather(*(produce() for _ in range(tasks)))


def run_fast(work: Coroutine[Any, Any, None]) -> None:
    """On the faster of the two event loops that Python programs use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
