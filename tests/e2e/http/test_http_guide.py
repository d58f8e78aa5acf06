"""The commands of docs/guide/http.md, one after the other, as a reader would type them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests
from tests.tidy.test_docs_commands import ROOT, commands

#: What curl says when it was told to stop waiting: streams and long polls have no end of their own.
_OUT_OF_TIME = 28


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_requests_of_the_guide_work(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    tried = 0
    with BrokerForTests(tmp_path / "data", http=True) as broker:
        client = broker.connect()
        client.create_topic("orders", partitions=2)
        for number in range(40):  # the guide goes on at offsets 17 and 4
            client.publish("orders", "earlier", partition=number % 2)
        for command in commands(ROOT / "docs" / "guide" / "http.md"):
            if not command.startswith("curl ") or "…" in command:  # a receipt of the reader's own stands there
                continue
            waits = " -N " in command or "wait_ms" in command
            line = command.replace("curl ", f"curl -sS --fail-with-body -m {1 if waits else 10} ", 1)
            line = line.replace("localhost:8080", broker.url.removeprefix("http://"))
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode in ((0, _OUT_OF_TIME) if waits else (0,)), f"{command}\n{done.stdout}{done.stderr}"
            tried += 1
    assert tried >= 7
