"""Brokers of the suite that are forked and not started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking import COMMAND, Parent, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="here every broker is started anew")


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


@pytest.fixture(params=["0o77", "0o22"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With settings in the environment, a directory and a mask of the test's own."""
    before = os.umask(int(request.param, 8))
    monkeypatch.setenv("MILLSTREAM_SERVER__DRAIN_MS", str(int(request.param, 8)))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    os.umask(before)


def test_what_is_forked_is_told_what_a_process_is_told(parent: Parent, place: Path) -> None:
    command = (*COMMAND, "config", "show", "--data", "here")
    started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    forked = parent.start(command)
    with forked.stdout:
        assert forked.stdout.read() == started.stdout
    assert forked.wait(60) == 0


def test_it_writes_where_and_as_it_should(parent: Parent, place: Path) -> None:
    serve = (*COMMAND, "serve", "--port", "0", "--http-port", "0", "--mqtt-port", "0", "--data", "data")
    mask = os.umask(0)
    os.umask(mask)
    forked = parent.start(serve)
    with forked.stdout:
        assert any(line.startswith("listening on ") for line in forked.stdout)
        told = Path(f"/proc/{forked.pid}/status").read_text()
        assert f"Umask:\t{mask:04o}" in told
        assert (place / "data").is_dir()
        forked.send_signal(signal.SIGTERM)
        assert forked.wait(60) == 0


def test_two_end_each_in_its_own_way(parent: Parent, tmp_path: Path) -> None:
    serve = (*COMMAND, "serve", "--port", "0", "--http-port", "0", "--mqtt-port", "0", "--log-level", "warning")
    killed, stopped = (parent.start((*serve, "--data", str(tmp_path / name))) for name in ("killed", "stopped"))
    for forked in (killed, stopped):
        assert any(line.startswith("listening on ") for line in forked.stdout)
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 0
    for forked in (killed, stopped):
        forked.stdout.close()
        forked.send_signal(signal.SIGKILL)  # nobody is hit by it


def test_a_mistake_ends_with_the_code_that_it_has_for_users(parent: Parent) -> None:
    forked = parent.start((*COMMAND, "serve", "--no-such-option"))
    with forked.stdout:
        assert forked.stdout.read() == ""
    assert forked.wait(60) == 2
