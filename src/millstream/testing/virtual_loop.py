"""An event loop in virtual time: a day passes as fast as what happens in it, and always in the same way.

When nothing is ready the loop does not sleep, it moves its clock to the next timer.  Threads take
turns with it, one at a time.  While `run` is under way the whole program lives in that time: `time`,
`random`, `secrets` and `uuid` give what the loop's clock and its seed say, so one seed makes one run.

Everything belongs to a `Process`, which has a wall clock of its own and can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import selectors
import time
from asyncio import base_events
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeVar
from unittest import mock

import millstream.client.blocking.bell as bell
import millstream.client.blocking.transport as transport
import millstream.client.membership as membership
from millstream.durations import Duration, parse_ms
from millstream.testing import sockets, threads
from millstream.testing.processes import Process, process_of

__all__ = ["Stuck", "VirtualClock", "VirtualLoop", "run"]

T = TypeVar("T")

#: Where wall clocks begin: 2026-01-01T00:00:00Z.
EPOCH_US: Final = 1_767_225_600_000_000
#: Steps without time going on after which something must be running in circles.
_STEPS_MAX: Final = 200_000
_STEPS_PER_TICK: Final = 1_000
_TICK_S: Final = 1e-6


class Stuck(Exception):
    """Everybody waits and nothing will ever happen, or something runs in circles and time stands still."""


class VirtualClock:
    """The clock of a machine; see `millstream.clock.Clock`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._offset_us = EPOCH_US

    def now_us(self) -> int:
        return self._offset_us + round(self._loop.time() * 1_000_000)

    def monotonic_ms(self) -> int:
        return int(self._loop.time() * 1000)

    elapsed_ms = monotonic_ms

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back, as an operator or NTP does; nothing else notices."""
        self._offset_us += round(seconds * 1_000_000)

    async def advance(self, by: Duration) -> None:
        """Let time pass ("30s", "2m", seconds); everything that is due meanwhile happens, in its order."""
        await asyncio.sleep(parse_ms(by, "by") / 1000)


class _Selector(selectors.BaseSelector):
    """Stands where the loop would wait for sockets: there are none, so time goes on at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._steps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("everybody waits and no timer is set")
        if timeout > 0:
            self.now_s += timeout
            self._steps = 0
        self._steps += 1
        if not self._steps % _STEPS_PER_TICK:
            # Who waits for less than a float can tell apart from now would wait for ever; real clocks tick meanwhile.
            self.now_s += _TICK_S
        if self._steps > _STEPS_MAX:
            raise Stuck(f"{_STEPS_MAX} steps at {self.now_s:.6f} s, and time does not go on")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError("a virtual loop has no files")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError("a virtual loop has no files")

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class VirtualLoop(base_events.BaseEventLoop):
    """See the module.  `network` takes the place of sockets once there is one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._selector = _Selector()
        self.random = random.Random(seed)
        self.network: Any = None
        #: How long work in a "thread" takes, in seconds.
        self.draw_work_s: Callable[[], float] = lambda: 0.0
        self.processes: list[Process] = []
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._selector.now_s

    def process(self, name: str, clock: VirtualClock | None = None) -> Process:
        process = Process(self, name, clock or VirtualClock(self))
        self.processes.append(process)
        return process

    def drop(self, process: Process) -> None:
        """Forget all that a process wanted to do."""
        for handle in [*self._ready, *self._scheduled]:  # type: ignore[attr-defined]
            if not handle.cancelled() and process_of(handle._context) is process:
                handle.cancel()

    def run_in_executor(self, _: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        threads.Thread(work, "executor").start(self.draw_work_s())
        return future

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(factory, f"{host}:{port}")

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return self.network.listen(factory, host, port)

    # What BaseEventLoop wants to know from its kinds.

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no files, so there are no events."""

    def _write_to_self(self) -> None:
        """There is nobody asleep to be woken."""

    def _check_thread(self) -> None:
        """Asked in asyncio's debug mode: a thread that runs is the only one that does, so it may call the loop."""


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    process = process_of(options.get("context"))
    if process is not None:
        process.own(task)
    return task


@contextlib.contextmanager
def _virtual_world(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Have the processes of a loop live in its time and draw from its seed.  Other threads stay in the real world."""
    entropy = random.Random(f"entropy {seed}").randbytes

    def virtual(real: Callable[[], Any], unreal: Callable[[Process], Any]) -> Callable[[], Any]:
        def now() -> Any:
            process = process_of(None)
            return real() if process is None else unreal(process)

        return now

    state = random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.multiple(
                time,
                time=virtual(time.time, lambda process: process.clock.now_us() / 1_000_000),
                time_ns=virtual(time.time_ns, lambda process: process.clock.now_us() * 1000),
                monotonic=virtual(time.monotonic, lambda _: loop.time()),
                monotonic_ns=virtual(time.monotonic_ns, lambda _: round(loop.time() * 1_000_000_000)),
                perf_counter=virtual(time.perf_counter, lambda _: loop.time()),
                perf_counter_ns=virtual(time.perf_counter_ns, lambda _: round(loop.time() * 1_000_000_000)),
            ),
            mock.patch.object(os, "urandom", entropy),
            mock.patch.object(random, "_urandom", entropy),  # what SystemRandom and `secrets` draw from
            mock.patch.multiple(membership, threading=threads.STAND_IN, Flag=threads.Event),
            mock.patch.multiple(transport, socket=sockets.SOCKET, select=sockets.SELECT),
            mock.patch.multiple(bell, socket=sockets.SOCKET, select=sockets.SELECT),
        ):
            yield
    finally:
        random.setstate(state)


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], *, seed: int = 0) -> T:
    """Run a coroutine to its end in virtual time, in a process of its own."""
    loop = VirtualLoop(seed)
    with _virtual_world(loop, seed):
        process = loop.process("main")
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(process.start(main(loop)))
        finally:
            for each in loop.processes:
                each.bury()
            asyncio.set_event_loop(None)
            loop.close()
