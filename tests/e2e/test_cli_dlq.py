"""`millstream dlq` against a real broker."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.cli.main import main
from millstream.client import Client
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `millstream dlq ARGUMENTS...`; fails unless it ends with the code expected."""
    monkeypatch.setenv("MILLSTREAM_BROKER", broker.address)
    set_up_logs(LogSettings(), io.StringIO())  # the broker shares this process and would log into the output

    def invoke(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["dlq", *arguments])
        shown = capsys.readouterr()
        assert caught.value.code == code, shown
        return shown.out, shown.err

    return invoke


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


@pytest.fixture
def letters(client: Client) -> list[str]:
    """Three dead letters of two topics; returns their ids."""
    client.create_topic("orders")
    client.create_topic("bills")
    attempt = {"consumer": "worker-1", "delivered_ms": 1_700_000_000_000, "ended_ms": 1_700_000_001_500, "kind": "nack"}
    ids = []
    for topic, value, error in (
        ("bills", "odd", "odd amount"),
        ("orders", "a", "db down"),
        ("orders", "b", "db\x1b[31m"),
    ):
        headers = {
            "shop": "berlin",
            "millstream-dead-topic": topic,
            "millstream-dead-group": "billing",
            "millstream-dead-reason": "REJECTED",
            "millstream-dead-error": error,
            "millstream-dead-deliveries": "1",
            "millstream-dead-attempts": json.dumps([{**attempt, "reason": error}]),
        }
        ids.append(client.publish(f"{topic}.dlq", value, key=b"k-1", headers=headers).id)
    return ids


def documents(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_letters_are_listed_for_people_and_for_programs(run: Run, letters: list[str]) -> None:
    out, _ = run("list")
    assert all(letter in out for letter in letters)
    assert "\x1b" not in out, "an error text must not be able to drive the terminal"
    assert "\\x1b[31m" in out
    out, _ = run("list", "--topic", "orders", "--error", "DOWN", "--header", "shop=berlin", "--key", "k-1", "--json")
    (document,) = documents(out)
    assert (document["id"], document["value"], document["key"]) == (letters[1], "a", "k-1")
    assert document["headers"] == {"shop": "berlin"}
    assert run("list", "--header", "floor")[1] == "no dead letters\n"
    assert [found["id"] for found in documents(run("list", "--max", "1", "--json")[0])] == letters[:1]
    assert "the first 1" in run("list", "--max", "1")[1]
    assert documents(run("list", "--since", "1h", "--json")[0])
    assert not documents(run("list", "--until", "1h", "--json")[0])
    assert "is not a time" in run("list", "--since", "soon", code=2)[1]


def test_a_letter_is_shown_with_its_history(run: Run, letters: list[str]) -> None:
    out, _ = run("show", letters[1])
    for part in ("orders.dlq/0", "REJECTED", "db down", "worker-1", "1.5 s", "nack", "berlin", "value, 1 B", "\na\n"):
        assert part in out
    shown = json.loads(run("show", letters[1], "--json")[0])
    assert (shown["original_topic"], shown["attempts"][0]["consumer"]) == ("orders", "worker-1")
    assert "MESSAGE_NOT_FOUND" in run("show", "01JD3QZ8M0K5X7T2B9WCE4R6VA", code=1)[1]


def test_statistics_have_shares(run: Run, letters: list[str]) -> None:
    out, _ = run("stats")
    assert "67%" in out
    assert json.loads(run("stats", "--topic", "bills", "--json")[0])["by_error"] == {"odd amount": 1}


def test_a_replay_is_planned_carried_out_and_reported(run: Run, letters: list[str], client: Client) -> None:
    out, err = run("replay", "--topic", "orders", "--rate", "100", "--dry-run")
    assert "2 messages" in out
    assert "nothing was sent" in err
    assert json.loads(run("replay", "--all", "--to", "missing", "--dry-run", "--json")[0])["stuck"] == 3
    assert client.offsets("orders") == {0: 0}
    out, _ = run("replay", "--topic", "orders")
    assert "completed" in out
    assert "2 of 2 messages" in out
    assert client.offsets("orders") == {0: 2}
    (report,) = json.loads(run("replays", "--json")[0])
    assert report["id"] in run("replays")[0]
    assert json.loads(run("replays", report["id"], "--json")[0])["replayed"] == 2
    assert "REPLAY_NOT_FOUND" in run("replays", "r-0", code=1)[1]


def test_a_replay_of_what_is_no_longer_there_says_so(run: Run, letters: list[str], client: Client) -> None:
    run("replay", letters[0])
    out, err = run("replay", letters[0])
    assert "completed" in out
    assert "there is nothing to replay: these dead letters are not there any more" in " ".join(out.split())
    assert "note" not in err, "once is enough"
    assert "nothing to replay" in " ".join(run("replay", letters[0], "--dry-run")[0].split())
    report = json.loads(run("replay", letters[0], "--no-wait", "--json")[0])
    assert (report["status"], report["total"], report["failures"]) == ("completed", 0, [])
    assert "replayed, purged or acked" in report["reason"]
    assert "no dead letter matches" in " ".join(run("replay", "--error", "never seen")[0].split())
    assert "nothing to replay" in " ".join(run("replays", report["id"])[0].split())
    run("purge", "--all", "--yes")
    assert "there are no dead letters" in " ".join(run("replay", "--all")[0].split())


def test_letters_that_have_nowhere_to_go_are_why_a_replay_sends_nothing(
    run: Run, letters: list[str], client: Client
) -> None:
    client.delete_topic("bills", force=True)
    out = " ".join(run("replay", "--topic", "bills")[0].split())
    assert "topic 'bills' does not exist: 1 of its messages stay" in out


def test_a_letter_is_repaired_from_a_file(run: Run, letters: list[str], client: Client, tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(b"\xffbetter")
    edits = ("--set-header", "shop=paris", "--set-header", "fixed=yes", "--value-file", str(tmp_path / "value"))
    run("replay", letters[0], "--to", "orders", *edits)
    with client.stream("orders", timeout_s=5) as stream:
        message = next(iter(stream))
    assert message.value == b"\xffbetter"
    assert (message.headers["shop"], message.headers["fixed"]) == ("paris", "yes")


def test_a_replay_can_be_left_alone_and_aborted(run: Run, letters: list[str], client: Client) -> None:
    replay = json.loads(run("replay", "--all", "--rate", "0.1", "--no-wait", "--json")[0])
    assert "aborted" in run("abort", replay["id"])[0]
    assert client.dead_letters.stats().total >= 2


@pytest.mark.parametrize("verb", ["replay", "purge"])
def test_nothing_chosen_is_not_everything(run: Run, letters: list[str], verb: str) -> None:
    assert f"say which letters to {verb}" in run(verb, code=2)[1]
    assert "only one of" in run(verb, letters[0], "--all", code=2)[1]


def test_a_purge_asks_first(run: Run, letters: list[str], client: Client) -> None:
    assert "1 dead letter" in run("purge", "--topic", "bills", code=2)[1]
    assert "nothing was removed" in run("purge", "--topic", "bills", "--dry-run")[1]
    assert client.dead_letters.stats().total == 3
    assert run("purge", "--topic", "bills", "--yes")[0] == "removed 1 dead letter\n"
    assert json.loads(run("purge", "--all", "--max", "1", "--yes", "--json")[0])["total"] == 1
    assert client.dead_letters.stats().total == 1
