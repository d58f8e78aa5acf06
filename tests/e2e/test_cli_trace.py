"""`millstream trace` against a real broker."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest

from millstream.cli.main import main
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def message_id() -> Iterator[tuple[str, str]]:
    """The address of a broker, and a message of it that was rejected."""
    with BrokerForTests() as broker:
        set_up_logs(LogSettings(), io.StringIO())
        client = broker.connect()
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        sent = client.publish("orders", b"x", key=b"c-17", headers=headers)
        with client.queue("orders", group="billing", consumer="worker-1") as work:
            (message,) = work.lease(wait=10)
            message.reject("bad \x1b[31m payload")
        eventually(lambda: len(client.traces(topic="orders")) >= 2)  # the letter is noted when it has arrived
        yield broker.address, sent.id


@pytest.fixture
def run(
    message_id: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    monkeypatch.setenv("MILLSTREAM_BROKER", message_id[0])

    def invoke(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["trace", *arguments])
        said = capsys.readouterr()
        assert caught.value.code == code, said.err
        return said.out or said.err

    return invoke


def test_a_passport_is_a_timeline(run: Callable[..., str], message_id: tuple[str, str]) -> None:
    out = run(message_id[1])

    words = ["published", "stored", "leased", "rejected", "dead lettered"]
    assert [out.index(f"  {word}") for word in words] == sorted(out.index(f"  {word}") for word in words)
    assert "billing by worker-1" in out
    assert "bad \\x1b[31m payload" in out
    assert TRACE in out


def test_a_passport_as_json_is_for_programs(run: Callable[..., str], message_id: tuple[str, str]) -> None:
    passport = json.loads(run(message_id[1], "--json"))

    assert passport["key"] == "c-17"
    assert [event["kind"] for event in passport["events"]][-1] == "dead_lettered"


@pytest.mark.parametrize("arguments", [(), (TRACE,), ("--topic", "orders", "--failures", "--from", "15m")])
def test_traces_are_listed(run: Callable[..., str], message_id: tuple[str, str], arguments: tuple[str, ...]) -> None:
    lines = [json.loads(line) for line in run(*arguments, "--json").splitlines()]

    assert [line["kind"] for line in lines] == ["dead_lettered", "rejected"]
    assert {line["id"] for line in lines} == {message_id[1]}
    assert message_id[1] in run(*arguments)


def test_an_id_goes_with_no_conditions(run: Callable[..., str], message_id: tuple[str, str]) -> None:
    assert "stands alone" in run(message_id[1], "--topic", "orders", code=2)
    assert "is not a time" in run("--from", "soon", code=2)
