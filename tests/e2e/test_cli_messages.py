"""`topic peek` and `message show` against a real broker."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable

import pytest

import millstream
from millstream.cli.main import main
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests

Run = Callable[..., str]


@pytest.fixture
def run(broker: BrokerForTests, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    set_up_logs(LogSettings(), io.StringIO())  # the broker shares this process and would log into the output

    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--broker", broker.address])
        out, err = capsysbinary.readouterr()
        assert (ended.value.code or 0) == code, err
        return (out if code == 0 else err).decode()

    return run


def test_peek_shows_the_last_messages_and_finds_others(broker: BrokerForTests, run: Run) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders", partitions=2)
        for number in range(12):
            client.publish("orders", f"order {number}", key=f"k{number % 3}", headers={"n": str(number)})
    last = [json.loads(line)["value"] for line in run("topic", "peek", "orders", "--json").splitlines()]
    assert last == [f"order {number}" for number in range(2, 12)]
    assert "order 11" in run("topic", "peek", "orders", "--max", "1")
    first = run("topic", "peek", "orders", "--from", "earliest", "--max", "2", "--json").splitlines()
    assert [json.loads(line)["value"] for line in first] == ["order 0", "order 1"]
    chosen = run("topic", "peek", "orders", "--key", "k1", "--text", "1", "--header", "n", "--json").splitlines()
    assert [json.loads(line)["value"] for line in chosen] == ["order 1", "order 10"]
    assert "--until" in run("topic", "peek", "orders", "--until", "soon", code=2)


def test_what_has_a_key_that_is_no_text_is_found_by_it(broker: BrokerForTests, run: Run) -> None:
    key = os.fsdecode(b"\xff\x01")  # as an argument of a command comes
    run("publish", "scans", "--key", key, "found")
    run("publish", "scans", "--key", "other", "left out")
    for command in (("topic", "peek", "scans"), ("trace", "--topic", "scans")):
        [line] = run(*command, "--key", key, "--json").splitlines()
        assert json.loads(line)["key_base64"] == "/wE="


def test_show_tells_everything_about_a_message(broker: BrokerForTests, run: Run) -> None:
    with millstream.connect(broker.address) as client:
        there = client.publish("orders", "now \x1b[31m", key="k", headers={"h": "v"}, ttl="1h")
        later = client.publish("orders", "later", delay="1h")
    shown = run("message", "show", there.id)
    assert there.id in shown
    assert "\x1b[31m" not in shown
    assert "expires" in shown
    assert json.loads(run("message", "show", there.id, "--json"))["headers"] == {"h": "v"}
    assert "delivered at" in run("message", "show", later.id)
    assert "MESSAGE_NOT_FOUND" in run("message", "show", "0" * 26, code=1)
