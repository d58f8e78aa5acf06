"""Server processes of the contestants: started on loopback, watched through /proc, ended by process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Server", "StartFailed", "Usage", "end_on_sigterm", "family", "free_port", "launch", "output_of"]

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_STOP_SECONDS_MAX = 15.0


class StartFailed(Exception):
    """A broker ended or stayed silent instead of accepting connections."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server has used so far: CPU of all its processes, memory resident now."""

    cpu_ns: int
    rss_bytes: int
    anonymous_bytes: int  # without file pages, which a broker that maps its log holds only on loan


@dataclass(slots=True)
class Server:
    """A running broker: one port and the processes behind it."""

    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def pids(self) -> list[int]:
        """Every process of the broker, also those that its own processes started."""
        return [pid for process in self.processes for pid in family(process.pid)]

    def usage(self) -> Usage:
        pids = self.pids()
        memory = [_memory(pid) for pid in pids]
        return Usage(
            cpu_ns=sum(map(_cpu_ns, pids)),
            rss_bytes=sum(rss for rss, _ in memory),
            anonymous_bytes=sum(anonymous for _, anonymous in memory),
        )

    def place(self, processors: Set[int]) -> None:
        """Confine every thread of the broker to these processors; later threads inherit it."""
        for pid in self.pids():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it ended while we looked
                    os.sched_setaffinity(int(thread.name), processors)

    def stop(self) -> None:
        """End every process, the last started first, and wait until it is gone."""
        for process in reversed(self.processes):
            _signal_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS_MAX)
            # Also when the leader is gone: a start script may have left its real server behind.
            _signal_group(process, signal.SIGKILL)
            process.wait()
        self.processes.clear()


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the main process as Ctrl-C does, or the brokers it started would outlive it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    server: Server,
    command: Sequence[str | Path],
    log: Path,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    seconds_max: float = 60.0,
) -> None:
    """Start one process of `server` and wait until `port` (the server's own by default) accepts."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **(environment or {})},
            # A group of its own: stopping it reaches what a start script forked, and nothing else.
            start_new_session=True,
        )
    server.processes.append(process)
    try:
        _wait_until_accepting(process, port or server.port, log, time.monotonic() + seconds_max)
    except BaseException:  # also Ctrl-C: the caller has no server to stop before `start` returns
        server.stop()
        raise


def output_of(*command: str) -> str:
    """The output of a short command such as `redis-server --version`."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip()


def _wait_until_accepting(process: subprocess.Popen[bytes], port: int, log: Path, deadline: float) -> None:
    while not _accepts(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(f"no broker on port {port}: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def family(pid: int) -> list[int]:
    """A process and everything it started that is still alive."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                waiting += map(int, children.read_text().split())
            except OSError:
                continue  # the thread ended while we looked
    return found


def _cpu_ns(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name may hold spaces and brackets, so fields are counted from its end.
    user, system, dead_children_user, dead_children_system = stat.rpartition(")")[2].split()[11:15]
    return _TICK_NS * (int(user) + int(system) + int(dead_children_user) + int(dead_children_system))


def _memory(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    return int(sizes.get("VmRSS", 0)) * 1024, int(sizes.get("RssAnon", 0)) * 1024
