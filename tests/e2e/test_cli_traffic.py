"""`subscribe`, `topic flow` and `mode` against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import millstream
from millstream.testing.broker import BrokerForTests
from tests.e2e.command_line import CommandLine, keep_logs_out
from tests.waiting import eventually

MILLSTREAM = [sys.executable, "-m", "millstream"]


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    keep_logs_out()
    return CommandLine(capsys, monkeypatch, broker.address)


def test_subscribe_prints_what_matches_until_it_has_enough(broker: BrokerForTests) -> None:
    command = [*MILLSTREAM, "subscribe", "orders.*", "logs.#", "--max", "2", "--broker", broker.address]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        millstream.connect(broker.address) as client,
    ):
        eventually(lambda: broker.broker.metrics.subscriptions)
        client.publish("orders.eu", "first")
        client.publish("other", "no")
        client.publish("logs.app.web", "second")
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out == "orders.eu\tfirst\nlogs.app.web\tsecond\n"


def test_subscribe_ends_when_nothing_comes(run: CommandLine) -> None:
    assert run("subscribe", "orders.*", "--timeout", "100ms", "--json") == ""


def test_topic_flow_says_when_nothing_is_measured(run: CommandLine, broker: BrokerForTests) -> None:
    """A topic is measured while somebody publishes to it; before, "normal" would be a guess."""
    with millstream.connect(broker.address) as client:
        client.create_topic("still")
        client.queue("still").close()
        client.publish("still", "x")
        shown = " ".join(run("topic", "flow", "still").split())
        assert "level not measured: the topic has no limit" in shown
        assert "trend -" in shown
        client.alter_topic("still", config={"throttle_depth": 10})
        shown = " ".join(run("topic", "flow", "still").split())
        assert "level not measured: nobody has published for a while; measuring begins with the next publish" in shown
        assert "1 message" in shown
        assert json.loads(run("topic", "flow", "still", "--json"))["measured"] is False
        client.publish("still", "y")
    assert json.loads(run("topic", "flow", "still", "--json"))["measured"] is True
    assert "level normal" in " ".join(run("topic", "flow", "still").split())


def test_topic_flow_and_mode(run: CommandLine, broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("jobs", config={"throttle_lag_ms": 5000})
        client.queue("jobs").close()
        client.publish("jobs", "x")
        broker.clock.advance("10s")
    assert json.loads(run("topic", "flow", "jobs", "--json"))["level"] == "critical"
    assert "lag 5 s" in run("topic", "flow", "jobs")
    assert "new disk" in run("mode", "maintenance", "--reason", "new disk")
    assert json.loads(run("mode", "--json")) == {"mode": "maintenance", "reason": "new disk"}
    status = json.loads(run("status", "--json"))
    assert (status["mode"], status["reason"]) == ("maintenance", "new disk")
    assert json.loads(run("mode", "normal", "--json")) == {"mode": "normal", "reason": ""}
