from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from tests.spark.ready.running import Ready
from tests.spark.world import World


@pytest.fixture
def ready(spark: Any, world: World, tmp_path: Path) -> Ready:
    """Pipelines on the broker that all tests of Spark share: their topics are their own."""
    return Ready(spark, world.broker.address, tmp_path)


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    """A broker for one test: about everything in it, and about the times at which things happen.

    All that is settled is recorded, not one of a thousand.
    """
    settings = Settings.model_validate(
        {"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}, "traces": {"sample": 1.0}}
    )
    data = tmp_path / "data"
    with BrokerForTests(data, settings=settings) as broker:
        yield World(broker, data)


@pytest.fixture
def alone(spark: Any, own_world: World, tmp_path: Path) -> Ready:
    return Ready(spark, own_world.broker.address, tmp_path)
