"""The processes of a run: the broker, whose faults are files, and workers, which come back when they are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

from tests.soak.traffic.start import start_worker

__all__ = ["ROOT", "SoakBroker", "WorkerSlot"]

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 60.0
#: Little, so that the cache is full before anybody looks whether memory grows.
TAIL_BYTES: Final = 2 * 1024 * 1024


def popen(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as errors:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)


class SoakBroker:
    """A broker on fixed ports, with a control directory (see tests/soak/broker.py)."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "broker.log"
        self.control = folder / "control"
        self.control.mkdir()
        self.ports = ports
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.soak.broker", str(self.control), "--data", str(self.data)]
        command += ["--port", str(self.ports["native"]), "--http-port", str(self.ports["http"])]
        command += ["--mqtt-port", str(self.ports["mqtt"]), "--log-level", "warning", "--log-format", "json"]
        command += ["--set", f"storage.tail_cache_bytes={TAIL_BYTES}"]
        self.process = popen(command, self.log)
        self.starts += 1
        deadline_s = time.monotonic() + START_S
        while not self.answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"the broker ended with {self.process.returncode}; see {self.log}")
            if time.monotonic() > deadline_s:
                raise RuntimeError("the broker does not answer")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answers(self) -> bool:
        return bool(self.health())

    def health(self) -> dict[str, str]:
        """The status of each component; nothing when the broker does not answer."""
        url = f"http://127.0.0.1:{self.ports['http']}/health"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=2) as answer:
                report = json.load(answer)
        except urllib.error.HTTPError as problem:  # 503: it is there and not well
            try:
                report = json.load(problem)
            except ValueError:
                return {}
        except (OSError, ValueError):
            return {}
        return {each["name"]: each["status"] for each in report.get("components", ())}

    def needs_restart(self) -> bool:
        """What an operator would restart it for: something was not stored, and that does not pass by itself."""
        health = self.health()
        return not health or any(health.get(name) not in ("healthy", None) for name in ("logs", "state"))

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)

    # --- faults of its disk and clock ----------------------------------------------------------------------------

    def fill_disk(self) -> None:
        (self.control / "full").touch()

    def empty_disk(self) -> None:
        (self.control / "full").unlink(missing_ok=True)

    def fail_sync(self, path: str) -> None:
        temporary = self.control / "fail-sync.tmp"
        temporary.write_text(path)
        (self.control / "failed-sync").unlink(missing_ok=True)
        temporary.rename(self.control / "fail-sync")

    def sync_failed(self) -> bool:
        return (self.control / "failed-sync").exists()

    def heal_sync(self) -> None:
        (self.control / "fail-sync").unlink(missing_ok=True)

    def set_clock(self, ahead_s: float) -> None:
        temporary = self.control / "clock.tmp"
        temporary.write_text(str(ahead_s))
        temporary.rename(self.control / "clock")


class WorkerSlot:
    """A worker that is started again, under a name of its own each time."""

    def __init__(self, slot: str, folder: Path) -> None:
        self.slot = slot
        self.kind = slot.partition("-")[0]
        self.lives = 0
        self._folder = folder
        self.process: ForkServerProcess | None = None

    def start(self) -> None:
        self.lives += 1
        self.process = start_worker(self.kind, f"{self.slot}.{self.lives}", self._folder)

    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.exitcode

    def send(self, number: int) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join(30)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        assert self.process is not None
        self.process.join(seconds)
        return not self.process.is_alive()


def resident_mb(pid: int) -> float:
    """What a process has in memory; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / 1_048_576


def processor_s(pid: int) -> float:
    """The processor time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
