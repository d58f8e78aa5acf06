"""Ten thousand deployments: see tests/simulation."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulation.test_seeds import run_seeds

pytestmark = pytest.mark.slow

FIRST, SEEDS, SEEDS_PER_PROCESS = 100_000, 10_000, 100


def test_no_promise_is_broken_in_ten_thousand_runs() -> None:
    firsts = range(FIRST, FIRST + SEEDS, SEEDS_PER_PROCESS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda first: run_seeds(first, first + SEEDS_PER_PROCESS), firsts))
    failed = [f"{result.stderr[-4000:]}\n{result.stdout[-2000:]}" for result in results if result.returncode]
    assert not failed, "\n".join(failed)[-8000:]
