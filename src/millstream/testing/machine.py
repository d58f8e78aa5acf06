"""A machine in virtual time: a disk, a clock, and a broker that runs on it, dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from millstream.broker.broker import Broker
from millstream.broker.committer import Commit
from millstream.config import Settings
from millstream.server.tcp import NativeListener
from millstream.testing.processes import Process
from millstream.testing.storage import SimulatedStorage
from millstream.testing.virtual_loop import VirtualClock, VirtualLoop

__all__ = ["Died", "Machine"]

PORT: Final = 9092


class Died(Exception):
    """The broker was killed, or its machine went down, while somebody waited for it."""


class _Rounds:
    """Syncs on the loop, which take as long as the disk likes: they happen at some moment and are reported later."""

    def __init__(self, loop: VirtualLoop, draw_s: Callable[[], float]) -> None:
        self._loop = loop
        self._draw_s = draw_s

    def submit(self, commit: Commit, done: Callable[[Commit], None]) -> None:
        before_s, after_s = self._draw_s(), self._draw_s()
        commit.seconds = before_s + after_s

        def sync() -> None:
            for file in commit.files():
                commit.sync(file)
            self._loop.call_later(after_s, done, commit)

        self._loop.call_later(before_s, sync)

    async def close(self) -> None:
        """There is nothing to close."""


class Machine:
    """Starts brokers, one after the other, on one disk."""

    def __init__(
        self,
        loop: VirtualLoop,
        *,
        seed: int = 0,
        settings: Settings | None = None,
        draw_sync_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.clock = VirtualClock(loop)
        self.storage = SimulatedStorage(seed)
        self.storage.on_power_cut = self._power_cut
        self.settings = settings or Settings.model_validate({"server": {"port": PORT}})
        self.address = ""
        self.boots = 0
        self.broker: Broker | None = None
        self._listener: NativeListener | None = None
        self._process: Process | None = None
        self._loop = loop
        self._draw_sync_s = draw_sync_s
        self._random = Random(seed)

    @property
    def is_running(self) -> bool:
        return self.broker is not None and self._process is not None and self._process.alive

    async def start(self) -> None:
        """Start a broker on what the disk has; raises what keeps it from starting, or Died."""
        assert self._process is None or not self._process.alive, "a broker runs already"
        if not self.storage.is_up:
            self.storage.restart()
        self.boots += 1
        process = self._process = self._loop.process(f"broker-{self.boots}", self.clock)
        await self._outcome(process, self._serve())

    async def _serve(self) -> None:
        rounds = _Rounds(self._loop, self._draw_sync_s)
        broker = Broker(self.settings, self.storage, clock=self.clock, rng=self._random, rounds=rounds)
        await broker.start()
        listener = NativeListener(broker, self.settings, self.clock.monotonic_ms)
        await listener.open()
        self.broker, self._listener, self.address = broker, listener, listener.address

    async def stop(self) -> None:
        """Stop as on SIGTERM."""
        assert self._process is not None
        await self._outcome(self._process, self._end())
        self.kill()

    async def _end(self) -> None:
        assert self.broker is not None
        assert self._listener is not None
        await self._listener.close()
        await self.broker.stop()

    def kill(self) -> None:
        """kill -9: the disk keeps everything that was written."""
        self.broker = self._listener = None
        if self._process is not None:
            self._process.kill()
        self.storage.kill()

    def cut_power(self) -> None:
        """The disk keeps what was synced, and whatever it likes of the rest."""
        self.storage.go_down()

    def _power_cut(self) -> None:
        self.broker = self._listener = None
        if self._process is not None:
            self._process.kill()

    async def _outcome(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        """Wait for something that the broker's process does, as long as there is one."""
        done: asyncio.Future[None] = self._loop.create_future()

        def ended(task: asyncio.Task[None]) -> None:
            if not done.done():
                error = task.exception()
                done.set_result(None) if error is None else done.set_exception(error)

        def died() -> None:
            if not done.done():
                done.set_exception(Died(f"{process.name} was killed"))

        process.on_death.append(died)
        process.start(work).add_done_callback(ended)
        try:
            await done
        finally:
            process.on_death.remove(died)
