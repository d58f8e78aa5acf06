"""kill -9 of the driver, of Python workers and of the broker while a pipeline copies a topic: each message once."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.spark.copying import Copying, needs_java, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 11
KILLS = 24


@pytest.fixture(autouse=True)
def _java() -> None:
    needs_java()


def test_a_driver_that_is_killed_where_it_matters_does_its_batch_again_and_once(tmp_path: Path) -> None:
    """After the publication is before Spark's own commit: the checkpoint knows nothing of what everybody can read."""
    with Copying(tmp_path) as copying:
        for point in ("before_stage", "after_stage", "before_publish", "after_publish"):
            copying.work_on()
            armed = tmp_path / point
            armed.write_text(f"kill {copying.pipeline.pid} {copying.pipeline.java()}")
            armed.rename(copying.faults / point)
            until(lambda: copying.pipeline.ended, f"the kill at {point}")
            copying.pipeline.wait()
            assert not (copying.faults / point).exists()
            assert copying.batches_begun() == copying.batches_done() + 1
            copying.start_pipeline()
        copying.work_on()
        copying.finish()
        copying.check()
        assert copying.pipeline.end(signal.SIGTERM) == 0


def test_kills_at_moments_of_chance_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    victims = ["broker"] * 9 + ["worker"] * 9 + ["java"] * 2 + ["driver"] * 4
    assert len(victims) == KILLS
    rng.shuffle(victims)
    killed: Counter[str] = Counter()
    with Copying(tmp_path) as copying:
        copying.work_on()
        for victim in victims:
            until(lambda: copying.batches_begun() > copying.batches_done(), "a batch that is under way")
            time.sleep(rng.random() * 0.3)  # about as long as a batch takes: it is hit anywhere, or the next one is
            if victim == "broker":
                copying.kill_broker()
            elif victim == "worker":
                copying.kill_worker(rng)
            elif victim == "java":
                copying.kill_java()
            else:
                copying.kill_driver()
            killed[victim] += 1
            copying.work_on()
        copying.finish()
        total = copying.check()
        assert copying.pipeline.end(signal.SIGTERM) == 0
        assert copying.check() == total
    assert killed.total() == KILLS
