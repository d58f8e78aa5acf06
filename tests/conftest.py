"""Fixtures that every suite shares."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

from millstream.testing.broker import BrokerForTests

# Reproducible by default; a failure prints the blob that replays it.
settings.register_profile("millstream", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("millstream")


@pytest.fixture(scope="session", autouse=True)
def _one_command_tree() -> Iterator[None]:
    """Typer builds all commands anew for every call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    """A broker of this test's own, with `.address`."""
    with BrokerForTests(tmp_path / "data") as running:
        yield running
