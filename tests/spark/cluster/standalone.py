"""A standalone cluster of Spark on this machine: a master and two workers, each with a directory of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.spark.java import find_java
from tests.spark.processes import command_of, descendants, kill

__all__ = ["StandaloneCluster", "executors_below"]

HOST = "127.0.0.1"
PATIENCE_S = 300.0
#: By which the tests, or who runs them, find packages; a cluster has none of them.
_HIDDEN = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV")


class StandaloneCluster:
    """Starts and stops with a `with`.

    Its processes work in directories of their own and get none of the variables by which the tests find packages; what
    they call python3 is the Python that the tests' environment was made of.  What else an executor has, it was sent.
    """

    def __init__(self, directory: Path, *, workers: int = 2) -> None:
        self.master = ""
        self._directory = directory
        self._count = workers
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            said = self._start("master", "org.apache.spark.deploy.master.Master")
            self.master = said.wait_for(r"Starting Spark master at (spark://\S+)")
            work = [
                self._start(name, "org.apache.spark.deploy.worker.Worker", "-c", "1", "-m", "1g", self.master)
                for name in (f"worker{number}" for number in range(self._count))
            ]
            for worker in work:
                worker.wait_for(r"Successfully (registered) with master")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self, name: str, program: str, *arguments: str) -> _Said:
        import pyspark

        home = Path(pyspark.__file__).parent
        own = self._directory / name
        own.mkdir(parents=True)
        environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if name not in _HIDDEN},
            "PATH": os.pathsep.join([str(Path(sys._base_executable).parent), os.environ.get("PATH", os.defpath)]),
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(own / "local"),
            "SPARK_WORKER_DIR": str(own / "work"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
        }
        process = subprocess.Popen(
            [
                str(home / "bin" / "spark-class"),
                program,
                "--host",
                HOST,
                "--port",
                "0",
                "--webui-port",
                "0",
                *arguments,
            ],
            cwd=own,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return _Said(process)

    def executors(self) -> list[int]:
        """The processes of executors that run now."""
        return [pid for process in self._processes for pid in executors_below(process.pid)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = [pid for process in self._processes for pid in descendants(process.pid)]
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in below:
            kill(pid)


class _Said:
    """What a process says, read all the time so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(self._process.stderr)

    def wait_for(self, pattern: str) -> str:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if (match := re.search(pattern, "".join(self._lines))) is not None:
                return match[1]
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} was not said:\n{''.join(self._lines)[-4000:]}")


def executors_below(pid: int) -> list[int]:
    return [each for each in descendants(pid) if _is_executor(command_of(each))]


def _is_executor(words: list[str]) -> bool:
    """Scripts that start a Java process have the same words as that."""
    return words[0].endswith("java") and any(word.endswith("CoarseGrainedExecutorBackend") for word in words)
