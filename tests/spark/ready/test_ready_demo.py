"""`make pipeline-demo`: a broker, traffic with failures and the page about them, as a user has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import StartFailed
from millstream.spark.java import find_java

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_demo_makes_its_report(tmp_path: Path) -> None:
    try:
        find_java()
    except StartFailed as problem:
        pytest.skip(str(problem))
    command = [sys.executable, str(ROOT / "examples/pipeline_demo.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "dead-letters.html").as_uri() in ended.stdout
    facts = json.loads((tmp_path / "dead-letters.json").read_text())
    errors = {each["error"]: each for each in facts["clusters"]}
    outage = errors["timeout after <n> ms: bank at <address>"]
    assert (outage["topic"], outage["group"], outage["reason"]) == ("payments", "charging", "MAX_RETRIES_EXCEEDED")
    assert outage["deliveries"] == 3.0
    assert {"550 no such mailbox: <email>", "order <n>: the amount -<n> makes no sense"} < set(errors)
    assert 5 <= len(errors) <= 8
    assert f"{facts['letters']} dead letters" in ended.stdout
