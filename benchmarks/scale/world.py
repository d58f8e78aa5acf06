"""One broker process, what it costs while something is done to it, and how long it takes to start."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.contestants import Level, Millstream
from benchmarks.scale.link import Link
from benchmarks.servers import Server

__all__ = ["Cost", "World"]

_SETTLE_SECONDS = 0.3
_IDLE_SECONDS = 1.0
_BUSY_SHARE = 0.02
_BUSY_SECONDS_MAX = 60.0


@dataclass(slots=True)
class Cost:
    """What something has cost; complete when the block that measures it has ended."""

    broker_ns: int = 0
    client_ns: int = 0
    seconds: float = 0.0


class World:
    """A broker with data of its own.  The load comes from this process, so its processor time is the client's."""

    def __init__(self, data: Path, *, fsync: str = "interval", settings: tuple[str, ...] = ()) -> None:
        self._directory = data / "broker"
        self._contestant = Millstream(settings=(f"storage.fsync={fsync}", *settings))
        self._server: Server | None = None
        self._idle_share = 0.0  # of a processor that the broker uses when nobody asks anything of it

    def __enter__(self) -> Self:
        self._directory.mkdir()
        self.start()
        self._idle_share = self.idle_ms_a_second() / 1000
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory)

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.port

    @property
    def _pid(self) -> int:
        assert self._server is not None
        return self._server.processes[0].pid

    def start(self) -> Cost:
        """Start it; what that cost until the first client has its answer."""
        started = time.monotonic()
        self._server = self._contestant.start(self._directory, Level.NORMAL)
        self.connect().close()
        return Cost(self._cpu_ns(), 0, time.monotonic() - started)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def connect(self) -> Link:
        return Link(self.port)

    @contextmanager
    def cost(self) -> Iterator[Cost]:
        """Measure what happens inside and what the broker does about it a moment later, without what it does anyway."""
        cost = Cost()
        before, client_before, started = self._cpu_ns(), time.process_time_ns(), time.monotonic()
        yield cost
        cost.seconds = time.monotonic() - started
        cost.client_ns = time.process_time_ns() - client_before
        time.sleep(_SETTLE_SECONDS)
        anyway_ns = int(self._idle_share * (time.monotonic() - started) * 1e9)
        cost.broker_ns = max(0, self._cpu_ns() - before - anyway_ns)

    def wait_until_idle(self) -> None:
        """Wait until the broker has ended what it does in the background."""
        deadline = time.monotonic() + _BUSY_SECONDS_MAX
        while time.monotonic() < deadline:
            before = self._cpu_ns()
            time.sleep(_SETTLE_SECONDS)
            if self._cpu_ns() - before < (self._idle_share + _BUSY_SHARE) * _SETTLE_SECONDS * 1e9:
                return

    def idle_ms_a_second(self) -> float:
        """Processor time that it takes to do nothing."""
        time.sleep(_SETTLE_SECONDS)
        before, started = self._cpu_ns(), time.monotonic()
        time.sleep(_IDLE_SECONDS)
        return (self._cpu_ns() - before) / 1e6 / (time.monotonic() - started)

    def memory_bytes(self) -> int:
        """Memory of its own, without files that it has mapped."""
        assert self._server is not None
        return self._server.usage().anonymous_bytes

    def _cpu_ns(self) -> int:
        # The processor clock of another process, in nanoseconds; /proc counts in hundredths of a second.
        return time.clock_gettime_ns((~self._pid << 3) | 2)


def files_limit(wanted: int) -> int:
    """Raise the number of files this process may have open, as far as it is allowed; returns what it is now."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard < wanted and os.geteuid() == 0:
            hard = wanted
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
