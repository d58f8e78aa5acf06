"""A whole deployment in one thread and from one seed: a broker on its machine, clients, and what goes wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import structlog

from millstream import aio
from millstream.config import Settings
from millstream.errors import MillstreamError
from millstream.testing.machine import Died, Machine
from millstream.testing.network import Network, Weather
from millstream.testing.processes import Process
from millstream.testing.storage import Fault, PowerCut
from millstream.testing.virtual_loop import VirtualLoop, run
from tests.simulation.history import Broken, History

TROUBLE_S = 25.0
#: Everything must be done this long after the last trouble.
DRAIN_S = 2_000.0

SETTINGS = {
    "server": {"port": 9092},
    "storage": {"free_bytes_min": 0, "segment_bytes": 16_384, "cleanup_interval_ms": 5_000},
}


class World:
    """One run.  Workloads come as objects with `start`, `drained` and `check`."""

    def __init__(self, loop: VirtualLoop, seed: int, *, verbose: bool = False) -> None:
        self.loop = loop
        self.seed = seed
        self.random = Random(f"{seed} world")
        self.history = History(loop.time, verbose)
        self.network = Network(loop, Random(f"{seed} network"))
        sync_s = self.random.choice((0.0001, 0.002, 0.02))
        disk = Random(f"{seed} disk")
        self.machine = Machine(
            loop,
            seed=seed,
            settings=Settings.model_validate(SETTINGS),
            draw_sync_s=lambda: disk.expovariate(1 / sync_s),
        )
        loop.draw_work_s = lambda: disk.expovariate(1 / sync_s)
        self.calm = asyncio.Event()
        self.failures: list[BaseException] = []
        self.actors: list[Actor] = []
        #: When the broker last went down and came back.
        self.crashes: list[float] = []
        #: The broker's log says that something does not work.
        self.complains = False
        self.disk_fails = False
        self.jumped = False
        #: The broker takes part in jumps of less than a second, and its leases with it.
        self.small_jumps_s = 0.0
        #: The latest that the broker's wall clock ever showed, and how far it was ahead at most.
        self._latest_us = 0
        self._ahead_us = 0
        #: A client for looking, once everything is calm.
        self.admin: aio.Client

    def latest_us(self) -> int:
        now_us = self.machine.clock.now_us()
        self._latest_us = max(self._latest_us, now_us)
        self._ahead_us = max(self._ahead_us, now_us - self._right_us())
        return self._latest_us

    def has_passed(self, wall_us: int) -> bool:
        """Whether a time may be over for the broker, which goes on as before when its clock is set back."""
        self.latest_us()
        return wall_us <= self._right_us() + self._ahead_us

    def _right_us(self) -> int:
        return self.loop.processes[0].clock.now_us()

    async def read(self, topic: str) -> list[aio.Message]:
        """The whole log of a topic that may not exist."""
        if not await self.admin.topics(topic) or not any((await self.admin.offsets(topic)).values()):
            return []
        return [message async for message in self.admin.stream(topic, start="earliest", timeout_s=5)]

    async def read_log(self, topic: str) -> dict[tuple[int, int], str]:
        return {(message.partition, message.offset): message.value.decode() for message in await self.read(topic)}

    # --- actors --------------------------------------------------------------------------------------------------

    def act(self, name: str, work: Callable[[aio.Client], Awaitable[None]], *, mortal: bool = True) -> Actor:
        """Have a client process do something, again and again if it fails, until it is done."""
        actor = Actor(self, name, work, mortal)
        self.actors.append(actor)
        actor.start()
        return actor

    def broken(self, error: BaseException) -> None:
        self.failures.append(error)

    # --- trouble -------------------------------------------------------------------------------------------------

    async def trouble(self) -> None:
        """Everything that goes wrong.  Each seed has its own kinds, so that rare ones are not drowned by others."""
        kinds: list[Callable[[], Any]] = [
            self._power_cut, self._kill, self._stop, self._disk_fault, self._cut_connections,
            self._change_weather, self._jump_clock, self._kill_actor,
        ]  # fmt: skip
        mine = self.random.sample(kinds, self.random.randrange(len(kinds) + 1))
        if self.history.unsynced or self.history.shown_early:
            mine.append(self._power_cut)  # what such runs are about
        pause_s = self.random.choice((1.0, 4.0, 10.0))
        while mine and self.loop.time() < TROUBLE_S:
            await asyncio.sleep(self.random.expovariate(1 / pause_s))
            result = self.random.choice(mine)()
            if result is not None:
                await result

    def _power_cut(self) -> None:
        if self.machine.is_running:
            if self.random.random() < 0.5:
                self.crashed("power cut")
                self.machine.cut_power()
            else:  # in the middle of one of the next operations of the disk
                at = self.machine.storage.operations + self.random.randrange(1, 30)
                self.history.note("power will go", f"operation={at}")
                self.machine.storage.inject(Fault.POWER_CUT, at=at)

    def _kill(self) -> None:
        if self.machine.is_running:
            self.crashed("kill")
            self.machine.kill()

    async def _stop(self) -> None:
        if self.machine.is_running:
            self.history.note("stop")
            with suppress(Died):
                await self.machine.stop()
            self.crashed("stopped")

    def _disk_fault(self) -> None:
        fault = self.random.choice((Fault.SYNC_ERROR, Fault.WRITE_ERROR, Fault.NO_SPACE, Fault.SHORT_WRITE))
        at = self.machine.storage.operations + self.random.randrange(1, 30)
        self.history.note("disk fault", fault.name, at)
        self.disk_fails = True
        # Not to a note about a log: nobody waits for one, and nothing follows from it.
        self.machine.storage.inject(fault, at=at, when=lambda operation: not operation.path.endswith(".index"))
        # A log whose sync failed confirms nothing until a restart; the operator does that after a while.
        self.loop.call_later(self.random.uniform(1, 10), self._restart_if_failed)

    def _restart_if_failed(self) -> None:
        if self.complains and self.machine.is_running:
            self.crashed("restart after disk fault")
            self.machine.kill()

    def _cut_connections(self) -> None:
        share = self.random.choice((0.2, 1.0))
        for connection in list(self.network.connections):
            if self.random.random() < share:
                self.history.note("cut", connection.name)
                connection.cut()

    def _change_weather(self) -> None:
        delay_s = self.random.choice((0.0005, 0.01, 0.2))
        weather = Weather(delay_s, cuts=self.random.random(), stalls=self.random.choice((0, 0.02)), stall_s=5.0)
        self.history.note("weather", weather)
        self.network.weather = weather

    def _jump_clock(self) -> None:
        seconds = self.random.choice((-1, 1)) * self.random.choice((0.5, 20, 300))
        self.history.note("clock jump", seconds)
        self.jumped = True
        self.small_jumps_s += abs(seconds) if abs(seconds) < 1 else 0
        self.latest_us()
        self.machine.clock.jump(seconds)
        self.latest_us()

    def _kill_actor(self) -> None:
        mortals = [actor for actor in self.actors if actor.mortal and actor.is_running]
        if mortals:
            actor = self.random.choice(mortals)
            actor.kill()
            self.loop.call_later(self.random.uniform(0, 5), actor.start)

    def crashed(self, why: str) -> None:
        self.history.note("crash", why)
        if self.disk_fails or why in ("power cut", "is down"):
            self.history.lose_ends()
        self.crashes.append(self.loop.time())

    async def _keep_running(self) -> None:
        """The supervisor: starts the broker again a while after it has ended."""
        while True:
            await asyncio.sleep(0.2)
            if self.machine.is_running:
                continue
            if not self.crashes or self.crashes[-1] != self.loop.time():
                self.crashed("is down")
            await asyncio.sleep(self.random.choice((0.0, 0.5, 5.0)))
            self.complains = False
            try:
                await self.machine.start()
                self.history.note("broker up", self.machine.boots)
            except (Died, OSError, MillstreamError) as error:
                self.history.note("failed start", error)
                self.machine.kill()

    # --- the run -------------------------------------------------------------------------------------------------

    async def run(self, workloads: list[Any]) -> None:
        self._change_weather()
        await self.machine.start()
        self.supervisor = asyncio.create_task(self._keep_running())
        for workload in workloads:
            await workload.start()
        await self.trouble()
        await self._until(lambda: all(workload.published for workload in workloads), "published", DRAIN_S)
        await self.calm_down()
        await self._until(lambda: self.machine.is_running and not self.complains, "running", DRAIN_S)
        self.admin = await aio.connect(self.machine.address, client_id="checker", timeout_s=60, stay_awake=False)
        for workload in workloads:
            await self._until(workload.drained, f"{workload.name} drained", DRAIN_S)
        for workload in workloads:
            await workload.check()
        await self.admin.close()
        self.supervisor.cancel()

    async def calm_down(self) -> None:
        self.history.note("calm")
        self.calm.set()
        self.machine.storage.heal()
        self.latest_us()
        self.machine.clock.jump((self._right_us() - self.machine.clock.now_us()) / 1_000_000)
        self.network.weather = Weather(0.0005)
        for actor in self.actors:
            if not actor.is_running:
                actor.start()
        if self.machine.is_running:
            self._restart_if_failed()

    async def _until(self, reached: Callable[[], Any], what: str, limit_s: float) -> None:
        deadline_s = self.loop.time() + limit_s
        pause_s = 0.5
        while True:
            if self.failures:
                raise self.failures[0]
            done = reached()
            if isinstance(done, Coroutine):
                try:
                    done = await done
                except MillstreamError as error:
                    self.history.note("not yet", what, error)
                    done = False
            if done:
                return
            if self.loop.time() > deadline_s:
                raise Broken(f"not {what} {limit_s:.0f} s after the last trouble")
            await asyncio.sleep(pause_s)
            pause_s = min(20.0, pause_s * 1.1)


class Actor:
    """A client process that is started again when it was killed."""

    def __init__(self, world: World, name: str, work: Callable[[aio.Client], Awaitable[None]], mortal: bool) -> None:
        self.name = name
        self.mortal = mortal
        self.lives = 0
        self.done = False
        self._world = world
        self._work = work
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.alive

    def start(self) -> None:
        if not self.is_running and not self.done:
            self.lives += 1
            self._process = self._world.loop.process(f"{self.name}.{self.lives}")
            self._process.start(self._live())

    def kill(self) -> None:
        assert self._process is not None
        self._world.history.note("kill actor", self._process.name)
        self._process.kill()

    async def _live(self) -> None:
        world = self._world
        try:
            while not self.done:
                try:
                    client_id = f"{self.name}.{self.lives}"
                    async with aio.connect(
                        world.machine.address, client_id=client_id, timeout_s=15, stay_awake=False
                    ) as client:
                        await self._work(client)
                        self.done = True
                except MillstreamError as error:
                    world.history.note("trouble", self.name, error.code)
                    await asyncio.sleep(1)
        except BaseException as error:
            world.broken(error)


@contextmanager
def _reading_the_log(world: World, verbose: bool) -> Iterator[None]:
    """What the broker logs with a traceback is a bug, unless the power had gone."""

    def collect(_: Any, level: str, event: dict[str, Any]) -> Any:
        error = sys.exc_info()[1]
        if event.get("exc_info") and error is not None and not isinstance(error, PowerCut):
            world.broken(error)
        if level == "error":
            world.complains = True
        if verbose and level not in ("debug", "info"):
            print(f"{'':11}  {level:12} {event}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[collect], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def simulate(seed: int, make: Callable[[World], list[Any]], *, verbose: bool = False) -> History:
    """Run one seed; raises what it finds."""
    world: World | None = None

    async def main(loop: VirtualLoop) -> None:
        nonlocal world
        world = World(loop, seed, verbose=verbose)

        def on_problem(_: object, context: dict[str, Any]) -> None:
            error = context.get("exception")
            assert world is not None
            if not isinstance(error, PowerCut | MillstreamError):
                world.broken(error or Broken(context["message"]))

        loop.set_exception_handler(on_problem)
        with _reading_the_log(world, verbose):
            await world.run(make(world))
        if world.failures:
            raise world.failures[0]

    run(main, seed=seed)
    assert world is not None
    return world.history
