"""Fixtures that every suite shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from millstream.testing.broker import BrokerForTests

# Reproducible by default; a failure prints the blob that replays it.
settings.register_profile("millstream", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("millstream")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    """A broker of this test's own, with `.address`."""
    with BrokerForTests(tmp_path / "data") as running:
        yield running
