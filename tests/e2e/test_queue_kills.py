"""A kill with everything that queues do in flight; tests/slow kills for longer."""

from __future__ import annotations

from pathlib import Path

from tests.queue_kills import KillRun


def test_queues_survive_a_kill(tmp_path: Path) -> None:
    with KillRun(tmp_path, seed=3, brief=True) as run:
        run.round()
        run.finish()
        run.audit()
        assert run.broker.stop() == 0
