"""`millstream pipeline run` as a process of its own, which can be killed, with everything that Spark starts for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import Any, Self

__all__ = ["PipelineProcess", "command_of", "descendants", "kill"]

#: For a machine that has other things to do, too.
PATIENCE_S = 300.0
_WORKING = ("pyspark.worker", "python_streaming_source_runner", "python_streaming_sink_runner")


class PipelineProcess:
    """A pipeline that runs, and the batches that it tells of.  Killed at the end of a `with`, if it still runs."""

    def __init__(
        self,
        file: Path,
        *more: str,
        master: str = "local[2]",
        conf: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._batches: Queue[dict[str, Any] | None] = Queue()
        self.said: list[str] = []
        #: The batches that are done.
        self.done: list[dict[str, Any]] = []
        settings = [word for name, value in (conf or {}).items() for word in ("--conf", f"{name}={value}")]
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(file), "--json", "--master", master]
        self._process = subprocess.Popen(
            [*command, *settings, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={**os.environ, **(variables or {})},
        )
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._hear)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            batch = json.loads(line)
            self.done.append(batch)
            self._batches.put(batch)
        self._batches.put(None)

    def _hear(self) -> None:
        assert self._process.stderr is not None
        self.said.extend(self._process.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def batch(self) -> dict[str, Any]:
        """The next batch that it does."""
        done = self._batches.get(timeout=PATIENCE_S)
        assert done is not None, self.said
        return done

    def java(self) -> int:
        """The process of Spark itself; 0 if there is none right now."""
        found = [pid for pid in children(self.pid) if command_of(pid)[0].endswith("java")]
        return found[0] if found else 0

    def workers(self) -> list[int]:
        """The processes of Python that have a part in every batch: tasks, offsets and commits.

        Those that only help to start a query wait for the next one, and nobody misses them.
        """
        return [pid for pid in descendants(self.pid) if any(word.endswith(_WORKING) for word in command_of(pid))]

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        """kill -9 of the driver: of both its parts."""
        java = self.java()
        kill(self.pid)
        kill(java)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            self.kill()


def kill(pid: int) -> None:
    """kill -9, if it is still there."""
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that these have started."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def command_of(pid: int) -> list[str]:
    """The words of its command; an empty one if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]
