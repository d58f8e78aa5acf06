"""Watches whether each broker really syncs before it confirms: `python -m benchmarks.durability`.

What a table says about durability should be seen, not read in a manual.  strace follows the broker's system
calls while messages are published one at a time; an answer counts as synced if an fsync or fdatasync returned
between reading the request and beginning to send the answer.  It proves nothing about pipelined publishing.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contestants import CONTESTANTS, Contestant, Level
from benchmarks.measure import Publish, Worker, declare
from benchmarks.servers import Server, end_on_sigterm

_RESULTS = Path(__file__).with_name("results")
_MESSAGES = 100
_QUEUE = "bench-durability"
_CALLS = "fsync,fdatasync,sendto,sendmsg,write,writev,read,readv,recvfrom,recvmsg"
_SYNCS = ("fsync", "fdatasync")


def main() -> None:
    end_on_sigterm()
    if shutil.which("strace") is None:
        raise SystemExit("this check needs strace: apt-get install strace")
    _RESULTS.mkdir(exist_ok=True)
    for contestant in CONTESTANTS:
        if (why := contestant.missing()) is not None:
            print(f"skipping {contestant.name}: {why}")
            continue
        for level in Level:
            if (promise := contestant.promise(level)) is not None:
                answers, synced = _watch(contestant, level)
                print(
                    f"{contestant.name:20} {level:7} {synced:3} of {answers} answers after a sync: {promise}",
                    flush=True,
                )


def _watch(contestant: Contestant, level: Level) -> tuple[int, int]:
    with tempfile.TemporaryDirectory(prefix="data-", dir=_RESULTS) as data:
        directory = Path(data) / "broker"
        directory.mkdir()
        server = contestant.start(directory, level)
        try:
            return _count_synced(_trace(contestant, server, Path(data) / "trace"), server.port)
        finally:
            server.stop()


def _trace(contestant: Contestant, server: Server, output: Path) -> str:
    declare(contestant, server.port, _QUEUE)
    targets = [word for pid in server.pids() for word in ("-p", str(pid))]
    command = ["strace", "-f", "-yy", "-qq", "-s", "0", "-o", str(output), "-e", f"trace={_CALLS}"]
    job = Publish(_MESSAGES, size=100, warm_up=5, each=True)
    with Worker(contestant, server.port, _QUEUE, job) as publisher:
        publisher.wait_until_ready()
        tracer = subprocess.Popen([*command, *targets])
        time.sleep(1.5)  # strace does not say when it has attached to every thread
        publisher.go()
        publisher.report()
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
    return output.read_text()


def _count_synced(trace: str, port: int) -> tuple[int, int]:
    """How many answers the trace holds, and how many of them followed a sync."""
    turns = re.findall("r+([^r]*?)s", "".join(_events(trace, port)))
    return len(turns), sum("f" in turn for turn in turns)


def _events(trace: str, port: int) -> Iterator[str]:
    """One letter per event: r a request was read, f a sync returned, s sending an answer began."""
    unfinished: dict[str, str] = {}  # by thread: a call that another thread's line interrupted
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        began, ended = not call.startswith("<... "), not call.endswith("<unfinished ...>")
        name = call.removeprefix("<... ").partition(" " if not began else "(")[0]
        arguments = call if began else unfinished.pop(thread, "")
        if not ended:
            unfinished[thread] = call
        if name in _SYNCS:
            if ended:
                yield "f"
        elif f":{port}->" in arguments:
            if name.startswith("re"):
                if ended and re.search(r"= [1-9]\d*$", call):
                    yield "r"
            elif began:
                yield "s"


if __name__ == "__main__":
    main()
