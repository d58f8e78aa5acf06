"""Webhooks from a shell: `millstream webhook`, against a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from millstream.testing.broker import BrokerForTests
from tests.e2e.command_line import CommandLine, keep_logs_out

NOBODY = "http://127.0.0.1:1/hook?token=hidden"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests() as running:
        keep_logs_out()
        for topic in ("orders", "billing"):
            running.connect().create_topic(topic)
        yield running


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch, broker.address, "webhook")


def test_a_webhook_from_its_making_to_its_end(run: CommandLine) -> None:
    options = ["--group", "crm", "--concurrency", "4", "--rate", "50", "--retry", "1s,1m", "-H", "X-Token=hidden"]
    made = json.loads(run("create", "orders", NOBODY, *options, "--timeout", "3s", "--json"))
    webhook, secret = made["webhook"], made["secret"]
    assert webhook["retry_delays_ms"] == [1000, 60_000]
    assert (webhook["timeout_ms"], webhook["header_names"]) == (3000, ["X-Token"])

    webhook_id = webhook["id"]
    assert "orders" in run("list")
    shown = run("show", webhook_id)
    assert "50 per second" in shown
    assert "1 s, 1 m" in shown
    changed = json.loads(run("update", webhook_id, "--retry", "none", "--client-errors", "retry", "--json"))
    assert (changed["retry_delays_ms"], changed["reject_client_errors"], changed["rate"]) == ([], False, 50)
    assert "paused" in run("pause", webhook_id)
    assert "active" in run("resume", webhook_id)
    assert secret not in run("rotate", webhook_id, "--keep", "1h")
    assert "cannot be reached: connection refused" in run("test", webhook_id, code=1)
    for text in (shown, run("list"), run("list", "--json"), run("show", webhook_id, "--json")):
        assert secret not in text
        assert "hidden" not in text
    assert "Add --yes" in run("delete", webhook_id, code=2, errors=True)
    run("delete", webhook_id, "--yes")
    assert json.loads(run("list", "--json")) == []


def test_the_secret_is_shown_once_with_a_warning(run: CommandLine) -> None:
    assert "The secret is not shown again." in run("create", "billing", NOBODY, errors=True)
    (webhook,) = json.loads(run("list", "--topic", "billing", "--json"))
    run("delete", webhook["id"], "--yes")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("create", "orders", "ftp://x"), 1, "http:// or https://"),
        (("create", "orders", "http://x", "--retry", "soon"), 2, "not a length of time"),
        (("create", "order", NOBODY), 1, "did you mean 'orders'?"),
        (("show", "wh-0"), 1, "there is no webhook 'wh-0'"),
        (("update", "wh-0"), 2, "say what to change"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    run: CommandLine, arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    assert complaint in run(*arguments, code=code, errors=True)
