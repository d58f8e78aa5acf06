"""Processes that run `millstream`, forked from one that has loaded it: loading takes ten times as long as to start.

What is forked has the arguments, the environment, the directory, the mask and the streams of a process that is started
the usual way, and ends like one, also by kill -9.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

#: Arguments and environment of a process, which are sent at once.
REQUEST_BYTES_MAX: Final = 1 << 17
COMMAND: Final = (sys.executable, "-m", "millstream")


def can_fork() -> bool:
    return hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")


class Forked:
    """As much of a `subprocess.Popen` as a BrokerProcess needs."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status  # a pipe in which there is an exit code in the end

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and nobody has waited for it yet
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._status, selectors.EVENT_READ)
                if not waiting.select(timeout):
                    raise subprocess.TimeoutExpired(COMMAND, timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode


class Parent:
    """Of all that is forked; it is started by the first who asks, and ends with this process or by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._asking = threading.Lock()

    def start(self, command: Sequence[str]) -> Forked:
        assert tuple(command[:3]) == COMMAND
        with self._asking:
            return self._start(command[3:])

    def _start(self, arguments: Sequence[str]) -> Forked:
        if self._process is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptor = theirs.fileno()
                program = (sys.executable, "-m", "tests.forking", str(descriptor))
                self._process = subprocess.Popen(program, pass_fds=[descriptor], cwd=_root())
        mask = os.umask(0o77)
        os.umask(mask)
        request = json.dumps([list(arguments), dict(os.environ), os.getcwd(), mask]).encode()
        output, writing = os.pipe()
        status, telling = os.pipe()
        try:
            socket.send_fds(self._control, [request], [0, writing, 2, telling])
        finally:
            os.close(writing)
            os.close(telling)
        return Forked(int(self._control.recv(16)), open(output, encoding="utf-8"), status)

    def close(self) -> None:
        if self._process is not None:
            self._control.close()
            self._process.wait()


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _main(control: socket.socket) -> None:
    """Fork whatever is asked for, and tell who asked when it has ended.  Returns in what is forked only."""
    ends: dict[int, tuple[int, int]] = {}  # by a descriptor of the process, its id and where to tell
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not control:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    pid, telling = ends.pop(key.fd)
                    with suppress(BrokenPipeError):
                        os.write(telling, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    os.close(telling)
                    continue
                request, received, _flags, _address = socket.recv_fds(control, REQUEST_BYTES_MAX, 4)
                if not request:
                    sys.exit()
                pid = os.fork()
                if not pid:
                    break
                process = os.pidfd_open(pid)
                ends[process] = pid, received[3]
                waiting.register(process, selectors.EVENT_READ)
                for descriptor in received[:3]:
                    os.close(descriptor)
                control.send(b"%d" % pid)
            else:
                continue
            break
    control.close()
    for process, (_, telling) in ends.items():
        os.close(process)
        os.close(telling)
    _become(request, received)


def _become(request: bytes, received: Sequence[int]) -> None:
    arguments, environment, directory, mask = json.loads(request)
    for number, descriptor in enumerate(received[:3]):
        os.dup2(descriptor, number)
    for descriptor in received:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.umask(mask)
    sys.argv[1:] = arguments


if __name__ == "__main__":
    from millstream.cli.main import main
    from millstream.server import lifecycle  # noqa: F401  # what `serve` loads

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us, who ends us
    gc.freeze()
    _main(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
