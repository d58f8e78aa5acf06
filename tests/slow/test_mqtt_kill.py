"""kill -9 under a load of MQTT clients; see tests/mqtt_kills.py for what is audited.

Rounds and seed can be set: `MILLSTREAM_KILL_ROUNDS=1000 MILLSTREAM_SEED=7 make test-slow`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mqtt_kills import MqttKillRun

ROUNDS = int(os.environ.get("MILLSTREAM_KILL_ROUNDS", "60"))
SEED = int(os.environ.get("MILLSTREAM_SEED", "20261116"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mqtt_exchanges_survive_kill_nine(tmp_path: Path) -> None:
    print(f"seed {SEED}, {ROUNDS} rounds")
    with MqttKillRun(tmp_path, SEED) as run:
        for _ in range(ROUNDS):
            run.round()
        run.finish()
        print(run.audit())
        assert run.broker.stop() == 0
