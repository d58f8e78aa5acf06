"""Fixtures that every suite shares."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as httpx_transport
import pytest
import structlog
import typer.main
from hypothesis import settings

from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.compiling import compile_share
from tests.examples import FEW, MANY
from tests.forking import Forked, Parent, can_fork

# The suite starts many processes.  Where bytecode is not kept, each of them compiles the whole broker before it begins.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Where failures are expected, a picture of all variables on the stack takes longer to draw than the test to run.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# Reproducible by default; a failure prints the blob that replays it.  `make test-slow` looks further.
settings.register_profile("millstream", deadline=None, derandomize=True, print_blob=True, max_examples=FEW)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=MANY)
settings.load_profile("millstream")


#: How a BrokerProcess starts; most are forked here.
START = BrokerProcess._spawn

#: Files in memory, and how much of it must be free: the suite needs a hundredth of that.
IN_MEMORY, IN_MEMORY_BYTES = Path("/dev/shm"), 4 << 30


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Small tests on a disk wait for it most of the time; what a disk can do to us is simulated anyway.

    The slow suite has logs that do not fit, and whoever sets TMPDIR knows better.
    """
    if config.option.markexpr != "not slow" or "TMPDIR" in os.environ or not os.access(IN_MEMORY, os.W_OK):
        return
    if shutil.disk_usage(IN_MEMORY).free >= IN_MEMORY_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(IN_MEMORY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With `--dist loadfile`, as `make test` has it."""
    from tests.scheduling import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests are found in every worker and stay until its end: nobody need look for garbage in them.

    Neither meanwhile nor afterwards, where every full collection would go through all of them again.
    """
    gc.disable()
    try:
        compile_share(session.config)
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> Generator[None, object, object]:
    """Leave slow tests out where they would not run: some take seconds to be collected, in every worker."""
    found = yield
    if collector.config.option.markexpr != "not slow" or not collector.istestfunction(obj, name):
        return found
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else found


@pytest.fixture(scope="session", autouse=True)
def _one_command_tree() -> Iterator[None]:
    """Typer builds all commands anew for every call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_list_of_authorities() -> Iterator[None]:
    """Every client of httpx reads all the authorities of the world, which takes longer than most requests."""
    honest = httpx.create_ssl_context
    cached = functools.cache(lambda _authorities: honest())

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None and trust_env:
            return cached((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")))
        return honest(verify, cert, trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx_transport, "create_ssl_context", create)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_broker_that_is_loaded(pytestconfig: pytest.Config) -> Iterator[None]:
    """Brokers that are processes are forked from it.  The slow suite starts each as users do."""
    if pytestconfig.option.markexpr != "not slow" or not can_fork():
        yield
        return
    parent = Parent()

    def fork(process: BrokerProcess) -> Forked:
        return parent.start(process._command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BrokerProcess, "_spawn", fork)
        yield
    parent.close()


@pytest.fixture
def as_users_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how brokers start, if they are processes."""
    monkeypatch.setattr(BrokerProcess, "_spawn", START)


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """A command that sets up logs writes them to a stream that ends with its test."""
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    if before is not None:
        structlog.configure(**before)
    elif structlog.is_configured():
        structlog.reset_defaults()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    """A broker of this test's own, with `.address`."""
    with BrokerForTests(tmp_path / "data") as running:
        yield running
