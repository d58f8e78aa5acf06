"""Work on queues from a shell: `lease`, `ack`, `nack`, `reject`, `extend`, `why` and `queue`, against a real broker."""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from millstream.cli.main import main
from millstream.client import Client
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    """One for all tests here; each has a topic of its own."""
    with BrokerForTests() as running:
        set_up_logs(LogSettings(), io.StringIO())  # it shares this process and would log into the output
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


@pytest.fixture
def run(broker: BrokerForTests, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `millstream ARGUMENTS...`; fails unless it ends with the code expected."""
    monkeypatch.setenv("MILLSTREAM_BROKER", broker.address)

    def invoke(*arguments: str, code: int = 0) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        shown = capsys.readouterr()
        assert caught.value.code == code, shown
        return Outcome(shown.out, shown.err)

    return invoke


@pytest.fixture
def topic(client: Client) -> str:
    """A topic with three messages: one like any other, one that is no text, one that paints the terminal red."""
    name = f"orders-{next(_numbers)}"
    client.create_topic(name)
    client.publish(name, "one", key="k1", headers={"shop": "berlin"})
    client.publish(name, b"\xff\x00", key=b"\xfe")
    client.publish(name, "three\x1b[31m")
    return name


def receipts(run: Run, topic: str, *options: str) -> list[str]:
    return [message["receipt"] for message in run("lease", topic, "--json", *options).documents]


def ids(run: Run, topic: str) -> list[str]:
    return [message["id"] for message in run("queue", "peek", topic, "--json").json]


# --- lease -----------------------------------------------------------------------------------------------------------


def test_leased_messages_are_shown_with_receipts(run: Run, topic: str) -> None:
    out = run("lease", topic, "--max", "10", "--lease", "5m").out
    for part in (f"{topic}:0:0:1:", "until", "one", "k1", r"\xff\x00", r"three\x1b[31m"):
        assert part in out
    assert "\x1b" not in out
    again = run("lease", topic)
    assert again.out == ""
    assert "no message is ready" in again.err


def test_leased_messages_are_documents_for_programs(run: Run, topic: str) -> None:
    first, second, third = run("lease", topic, "--max", "10", "--json").documents
    assert (first["value"], first["key"], first["headers"], first["delivery"]) == ("one", "k1", {"shop": "berlin"}, 1)
    assert (second["value_base64"], second["key_base64"]) == ("/wA=", "/g==")
    assert third["value"] == "three\x1b[31m"
    assert first["deadline_ms"] > first["timestamp_ms"] + 25_000


def test_with_auto_ack_there_is_nothing_to_settle(run: Run, client: Client, topic: str) -> None:
    shown = run("lease", topic, "--auto-ack").out
    assert "one" in shown
    assert "receipt" not in shown, "there is nothing to settle"
    assert client.queues.describe(topic).depth == 2


def test_a_lease_waits_for_a_message(run: Run, client: Client, topic: str) -> None:
    assert len(receipts(run, topic, "--max", "10")) == 3
    client.publish(topic, "late", delay="200ms")
    assert run("lease", topic, "--wait", "20s", "--json").documents[0]["value"] == "late"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--wait", "soon"), 2, "--wait 'soon' is not a length of time"),
        (("--lease", "long"), 2, "--lease 'long' is not a length of time"),
        (("--lease", "1ms"), 1, "between 100 ms and 12 hours"),
        (("--max", "0"), 2, "--max"),
    ],
)
def test_an_impossible_lease_is_explained(
    run: Run, topic: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert said in run("lease", topic, *arguments, code=code).err


def test_a_topic_that_is_not_there_is_named(run: Run) -> None:
    assert "[TOPIC_NOT_FOUND]" in run("lease", "nowhere", code=1).err
    assert "[TOPIC_NOT_FOUND]" in run("queue", "list", "nowhere", code=1).err


# --- ack, nack, reject, extend ---------------------------------------------------------------------------------------


def test_what_is_acked_is_done(run: Run, client: Client, topic: str) -> None:
    held = receipts(run, topic, "--max", "2")
    assert run("ack", *held).out.count("done") == 2
    assert run("ack", held[0], "--json").json == [{"receipt": held[0], "result": "done"}], "once more is a success"
    info = client.queues.describe(topic)
    assert (info.depth, info.settled["acked"]) == (1, 2)


def test_what_is_nacked_comes_again(run: Run, topic: str) -> None:
    (receipt,) = receipts(run, topic)
    assert "will be tried again" in run("nack", receipt, "--reason", "db down", "--retry-after", "0s").out
    (again,) = run("lease", topic, "--wait", "10s", "--json").documents
    assert (again["offset"], again["delivery"], again["failures"]) == (0, 2, 1)
    assert run("nack", again["receipt"], "--json").json[0]["result"] == "retried"


def test_what_is_rejected_is_a_dead_letter(run: Run, client: Client, topic: str) -> None:
    (receipt,) = receipts(run, topic)
    assert "is a dead letter now" in run("reject", receipt, "--reason", "bad payload").out
    (letter,) = client.dead_letters.list(topic=topic)
    assert (letter.reason, letter.error, letter.original_offset) == ("REJECTED", "bad payload", 0)


def test_a_lease_is_kept_for_longer(run: Run, broker: BrokerForTests, topic: str) -> None:
    (receipt,) = receipts(run, topic, "--lease", "30s")
    extended = run("extend", receipt, "--by", "4m").out
    assert "done" in extended
    assert "until" in extended.lower()
    broker.clock.advance("2m")
    (extended,) = run("extend", receipt, "--json").json
    assert extended["result"] == "done"
    assert extended["deadline_ms"] > time.time() * 1000
    assert run("ack", receipt, "--json").json[0]["result"] == "done"


def test_a_lease_that_has_ended_is_refused_and_the_others_are_not(run: Run, broker: BrokerForTests, topic: str) -> None:
    (late,) = receipts(run, topic, "--lease", "10s")
    broker.clock.advance("11s")
    (good,) = receipts(run, topic)
    refused = run("ack", late, good, code=1)
    assert "refused: the lease has ended" in refused.out
    assert "done" in refused.out
    assert "1 of 2 receipts were refused" in refused.err
    assert [it["result"] for it in run("nack", late, "--json", code=1).json] == ["receipt_invalid"]


def test_what_is_no_receipt_changes_nothing(run: Run, client: Client, topic: str) -> None:
    (receipt,) = receipts(run, topic)
    for command in ("ack", "nack", "reject", "extend"):
        refused = run(command, receipt, "01M7GKBEFSGBA51QG000000000", code=2).err
        assert "is not a receipt" in refused
        assert "nothing was changed" in refused
    assert client.queues.describe(topic).leased == 1


@pytest.mark.parametrize(("command", "option"), [("nack", "--retry-after"), ("extend", "--by")])
def test_a_length_of_time_is_named_by_its_option(run: Run, topic: str, command: str, option: str) -> None:
    (receipt,) = receipts(run, topic)
    assert f"{option} 'soon' is not a length of time" in run(command, receipt, option, "soon", code=2).err


# --- queue -----------------------------------------------------------------------------------------------------------


def test_queues_are_listed_and_shown(run: Run, topic: str) -> None:
    receipts(run, topic, "--group", "billing")
    (row,) = [line.split() for line in run("queue", "list", topic).out.splitlines() if topic in line]
    assert row == [topic, "billing", "2", "1", "0", "0", "running"]
    (summary,) = run("queue", "list", topic, "--json").json
    assert (summary["ready"], summary["leased"], summary["paused"]) == (2, 1, False)
    shown = run("queue", "show", topic, "billing")
    for part in (f"{topic}/billing", "settled below", "ordering=none", "processing_ms=5m"):
        assert part in shown.out
    assert "no consumers" in shown.err
    assert run("queue", "show", topic, "billing", "--json").json["partitions"][0]["leased"] == 1
    missing = run("queue", "show", topic, code=1).err
    assert "[GROUP_NOT_FOUND]" in missing
    assert "millstream queue list" in missing


def test_a_consumer_is_shown_by_its_name(run: Run, client: Client, topic: str) -> None:
    with client.queue(topic, consumer="worker-7") as queue:
        assert len(queue.lease(max=2, wait="5s")) == 2
        assert "worker-7" in run("queue", "show", topic).out
        (consumer,) = run("queue", "show", topic, "--json").json["consumers"]
        assert (consumer["name"], consumer["leased"]) == ("worker-7", 2)
        assert "by worker-7" in run("queue", "peek", topic, "--state", "leased").out


def test_a_dead_letter_that_is_set_aside_is_shown_as_that(run: Run, client: Client, topic: str) -> None:
    client.create_topic(f"{topic}.dlq")
    client.publish(f"{topic}.dlq", "letter")
    with client.queue(f"{topic}.dlq", group="dlq") as queue:
        (letter,) = queue.lease(wait="5s")
        letter.reject("cannot be mended")
    assert "set aside" in run("queue", "peek", f"{topic}.dlq", "dlq", "--state", "waiting").out
    assert run("queue", "peek", f"{topic}.dlq", "dlq", "--json").json[0]["until_ms"] == 0
    assert "set aside" in run("why", letter.id).out


def test_settings_are_changed_by_name(run: Run, topic: str) -> None:
    receipts(run, topic)
    assert "lease_ms=2m" in run("queue", "set", topic, "default", "lease_ms=2m", "retry=durable", "poison=yes").out
    policy = run("queue", "show", topic, "--json").json["policy"]
    assert (policy["lease_ms"], policy["retry"], policy["poison"]) == (120_000, "durable", True)
    assert "lease_ms=2m" in run("queue", "show", topic).out


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("leas_ms=2m", "did you mean 'lease_ms'?"),
        ("lease_ms", "is not of the form key=value"),
        ("lease_ms=soon", "use milliseconds, or a length such as"),
        ("poison=maybe", "it must be true or false"),
        ("retry=durabel", "did you mean 'durable'?"),
        ("ordering=random", "ordering='random' is not allowed"),
    ],
)
def test_a_setting_that_cannot_be_is_explained(run: Run, topic: str, setting: str, said: str) -> None:
    receipts(run, topic)
    assert said in run("queue", "set", topic, "default", setting, code=2).err


def test_a_paused_queue_hands_out_nothing(run: Run, topic: str) -> None:
    (receipt,) = receipts(run, topic)
    assert run("queue", "pause", topic).out == f"paused {topic}/default\n"
    assert "paused" in run("queue", "list", topic).out
    assert not receipts(run, topic)
    assert "paused" in run("why", f"{topic}/default").out
    assert run("ack", receipt).out.count("done") == 1, "what is leased can be settled"
    assert run("queue", "resume", topic, "--json").json == {"topic": topic, "group": "default", "paused": False}
    assert len(receipts(run, topic)) == 1


def test_messages_are_looked_at_without_being_leased(run: Run, topic: str) -> None:
    receipts(run, topic)
    out = run("queue", "peek", topic).out
    for part in ("leased", "ready", "one", r"\xff\x00", r"three\x1b[31m", "by millstream-cli"):
        assert part in out
    _, second, _ = run("queue", "peek", topic, "--json").json
    assert (second["state"], second["value_base64"], second["key_base64"]) == ("ready", "/wA=", "/g==")
    (first,) = run("queue", "peek", topic, "--state", "leased", "--json").json
    assert (first["value"], first["headers"], first["deliveries"]) == ("one", {"shop": "berlin"}, 1)
    assert len(run("queue", "peek", topic, "--limit", "1", "--json").json) == 1
    assert "no messages" in run("queue", "peek", topic, "--state", "waiting").err
    assert "use ready, leased or waiting" in run("queue", "peek", topic, "--state", "lost", code=2).err


def test_a_message_tells_its_story(run: Run, topic: str) -> None:
    (receipt,) = receipts(run, topic)
    run("nack", receipt, "--reason", "db down", "--retry-after", "1h")
    first, second, _ = ids(run, topic)
    out = run("queue", "message", first).out
    for part in (f"{topic}/default", "offset 0", "waiting, until", "1, of which 1 failed", "nack", "db down"):
        assert part in out
    (story,) = run("queue", "message", first, "--json").json
    assert (story["state"], story["value"], story["attempts"][0]["reason"]) == ("waiting", "one", "db down")
    assert run("queue", "message", second, "--json").json[0]["state"] == "ready"
    assert "[MESSAGE_NOT_FOUND]" in run("queue", "message", first[:-1] + "Z", code=1).err
    assert "is not a message id" in run("queue", "message", "nonsense", code=1).err


def test_a_purge_asks_first(run: Run, client: Client, topic: str) -> None:
    receipts(run, topic)
    refused = run("queue", "purge", topic, code=2).err
    assert "3 messages" in refused
    assert "Add --yes to agree" in refused
    assert client.queues.describe(topic).depth == 3
    purged = run("queue", "purge", topic, "--yes", "--json").json
    assert purged == {"topic": topic, "group": "default", "purged": 3}
    assert run("queue", "purge", topic, "--yes").out == f"purged 0 messages from {topic}/default\n"
    assert client.queues.describe(topic).depth == 0


def test_a_delete_asks_first_and_spares_who_is_at_work(run: Run, client: Client, topic: str) -> None:
    with client.queue(topic):
        assert "3 messages to settle" in run("queue", "delete", topic, code=2).err
        assert "[GROUP_NOT_EMPTY]" in run("queue", "delete", topic, "--yes", code=1).err
        assert run("queue", "delete", topic, "--yes", "--force").out == f"deleted {topic}/default\n"
    assert "[GROUP_NOT_FOUND]" in run("queue", "delete", topic, "--yes", code=1).err
    assert client.offsets(topic) == {0: 3}, "the messages stay"


# --- why -------------------------------------------------------------------------------------------------------------


def test_why_a_message_waits(run: Run, topic: str) -> None:
    (receipt,) = receipts(run, topic, "--lease", "5m")
    first, second, _ = ids(run, topic)
    assert "leased by millstream-cli" in run("why", first).out
    assert "ready" in run("why", second, "--json").json["state"]
    run("nack", receipt, "--reason", "db down", "--retry-after", "1h")
    out = run("why", first).out
    for part in ("waits for retry 1", "db down", topic, "due"):
        assert part in out
    answer = run("why", first, "--json").json
    assert (answer["state"], answer["facts"]["failures"]) == ("waiting", 1)


def test_why_a_message_is_not_there_any_more(run: Run, topic: str) -> None:
    first, second, _ = receipts(run, topic, "--max", "3")
    known = ids(run, topic)
    run("ack", first)
    run("reject", second, "--reason", "bad payload")
    assert run("why", known[0], "--json").json["state"] == "settled"
    out = run("why", known[1]).out
    assert "REJECTED (bad payload)" in out
    assert f"{topic}.dlq" in out


def test_of_a_settled_message_no_figures_are_made_up(run: Run, topic: str) -> None:
    leased, (first, second, _) = receipts(run, topic), ids(run, topic)
    run("ack", *leased)
    assert "deliveries" not in run("why", first).out
    assert ["deliveries", "not", "remembered"] in [
        line.split() for line in run("queue", "message", first).out.splitlines()
    ]
    assert "0, of which 0 failed" in run("queue", "message", second).out


def test_why_shows_what_consumers_said_and_obeys_none_of_it(run: Run, client: Client, topic: str) -> None:
    said = "\x1b[2Jlost\n\u202egnol"
    (tried, refused), known = receipts(run, topic, "--max", "2"), ids(run, topic)
    run("nack", tried, "--reason", said, "--retry-after", "1h")
    run("reject", refused, "--reason", said)
    with client.queue(topic, group="default"):  # with nobody there, that is what the queue waits for
        shown = [run("why", about).out for about in (f"{topic}/default", known[0], known[1])]
    for out in shown:
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "\\x1b[2Jlost \\u202egnol" in out.partition("\n\n")[0], "the sentence has it, on one line"


def test_why_a_queue_stands_still(run: Run, topic: str) -> None:
    receipts(run, topic)
    out = run("why", f"{topic}/default").out
    assert "no consumer is connected, and 3 messages are not settled" in out
    assert run("why", f"{topic}/default", "--json").json["facts"]["depth"] == 3


def test_why_about_nothing_says_what_it_takes(run: Run, topic: str) -> None:
    assert "for a queue write TOPIC/GROUP" in run("why", topic, code=1).err
    assert "[GROUP_NOT_FOUND]" in run("why", f"{topic}/nobody", code=1).err
    assert "[TOPIC_NOT_FOUND]" in run("why", "nowhere/default", code=1).err


def test_a_setting_with_brackets_is_changed_and_shown(run: Run, topic: str) -> None:
    """It was changed, and then called a bug: the words were read as markup."""
    run("lease", topic)
    assert "fair_by=header:[/x]" in run("queue", "set", topic, "default", "fair_by=header:[/x]").out


def test_a_long_value_is_not_cut_within_a_letter(run: Run, client: Client, topic: str) -> None:
    client.publish(f"{topic}.long", "x" + "ü" * 100)
    run("lease", f"{topic}.long")
    out = run("queue", "peek", f"{topic}.long").out
    assert "xüüü" in out
    assert r"\xc3" not in out
