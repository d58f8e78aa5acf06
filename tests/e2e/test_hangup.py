"""SIGHUP: a service manager says reload with it, and a terminal that is closed says goodbye."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.testing.broker import BrokerProcess

SERVE = (sys.executable, "-m", "millstream", "serve", "--port", "0", "--http-port", "0", "--mqtt-port", "0")


def test_a_broker_without_a_certificate_outlives_a_reload_and_says_that_nothing_was_read(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*SERVE, "--data", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a service: without a terminal
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline().startswith("listening")
        process.send_signal(signal.SIGHUP)
        assert any("nothing was read again" in json.loads(line)["event"] for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@contextmanager
def in_a_terminal(data: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A broker that somebody has started by hand, and the terminal: closing it is what closing a window does."""
    window, terminal = pty.openpty()

    def take_terminal() -> None:
        os.login_tty(0)

    process = subprocess.Popen(
        [*SERVE, "--data", str(data)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    try:
        seen = b""
        while b"MQTT on" not in seen:
            seen += os.read(window, 4096)
        yield process, window
    finally:
        process.kill()
        process.wait()


def test_a_broker_whose_terminal_is_closed_leaves_everything_on_disk(tmp_path: Path) -> None:
    with in_a_terminal(tmp_path) as (process, window):
        process.send_signal(signal.SIGHUP)
        seen = b""
        while b"nothing was read again" not in seen:  # the terminal is there: this was a wish to reload
            seen += os.read(window, 4096)
        os.close(window)
        assert process.wait(30) == 0
    with BrokerProcess(tmp_path) as broker:
        assert broker.stop() == 0
