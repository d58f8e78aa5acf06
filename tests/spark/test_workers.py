"""Spark's own daemon forks workers that load our code; who is at the other end of their sockets is played by a test."""

from __future__ import annotations

import os
import platform
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Does what a planning worker does: loads the data source, answers, and has more to say.
WORKER = """
import sys
def main(infile, outfile):
    {loads}
    outfile.write(b"answer")
    outfile.flush()
    infile.read()  # until the other side has hung up
    {ends}
"""
GOODBYE = 'outfile.write(b"goodbye")'
SOURCE = "import millstream.spark.source"
#: Says how many objects a collection would look at, and how many it would not.
COUNTS = "import gc; print(len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr)"


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name: addresses of Unix domain sockets have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="daemon-", dir="/tmp") as name:
        yield Path(name)


def said_by_a_worker(directory: Path, *, loads: str = SOURCE, ends: str = GOODBYE) -> str:
    """What appears on stderr when Spark hangs up on a worker after its first answer."""
    name = "pyspark_worker_of_a_test"  # the daemon takes no other names
    (directory / f"{name}.py").write_text(WORKER.format(loads=loads, ends=ends))
    settings = {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(directory),
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "true",  # as Spark has it
        "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)]),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pyspark.daemon", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **settings},
    ) as daemon:
        assert daemon.stdout is not None
        (length,) = struct.unpack(">i", daemon.stdout.read(4))
        address = daemon.stdout.read(length).decode()
        with socket.socket(socket.AF_UNIX) as spark:
            spark.settimeout(60)
            spark.connect(address)
            (worker,) = struct.unpack(">i", _exactly(spark, 4))
            assert _exactly(spark, 6) == b"answer"
            waiting = os.pidfd_open(worker)  # before it is hung up on: it may be gone right after
        try:
            assert select.select([waiting], [], [], 60)[0], "the worker goes on"
        finally:
            os.close(waiting)
        _, said = daemon.communicate(timeout=60)  # which closes stdin, and so ends the daemon
    return said.decode()


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        assert part, "the worker has hung up"
        parts += part
    return parts


def test_a_worker_on_which_spark_hangs_up_says_nothing(directory: Path) -> None:
    assert said_by_a_worker(directory) == ""


def test_without_the_data_source_it_would(directory: Path) -> None:
    assert "BrokenPipeError" in said_by_a_worker(directory, loads="pass")


def test_everything_else_is_heard(directory: Path) -> None:
    assert "ValueError: mine" in said_by_a_worker(directory, ends='raise ValueError("mine")')


def test_a_worker_that_plans_does_not_look_for_garbage_among_what_it_has_imported(directory: Path) -> None:
    looked_at, spared = map(int, said_by_a_worker(directory, loads=f"{SOURCE}; {COUNTS}").split())
    assert looked_at < spared // 10


FAULTS = """
import resource, sys
from millstream.spark import workers
if "keep" in sys.argv:
    workers._keep_memory()
def fetch():
    some = [bytes(1) * 3_000_000 for _ in range(4)]
fetch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fetch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told")
def test_memory_for_the_next_fetch_is_not_given_back_and_asked_for_again() -> None:
    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", FAULTS, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < 500 < faults()
