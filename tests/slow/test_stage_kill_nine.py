"""Twenty kills of the broker while a query publishes: every batch is there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stage_kills import publish_through_kills


@pytest.mark.slow
def test_batches_survive_twenty_kills(tmp_path: Path) -> None:
    publish_through_kills(tmp_path, batches=200, kills=20, seed=11)
