"""The command line against a real broker: most commands in this process, `serve` as the process it is."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream import connect
from millstream.cli.main import main
from millstream.config import LogSettings
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests

MILLSTREAM = [sys.executable, "-m", "millstream"]


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., Outcome]


class _Input(io.BytesIO):
    """Standard input as a command sees it: text with bytes underneath."""

    @property
    def buffer(self) -> _Input:
        return self


@pytest.fixture
def alone(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `millstream ARGUMENTS...` in this process; fails unless it ends with the code expected."""

    def invoke(*arguments: str, code: int = 0, given: bytes = b"") -> Outcome:
        capfdbinary.readouterr()
        monkeypatch.setattr(sys, "stdin", _Input(given))
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        shown = capfdbinary.readouterr()
        assert isinstance(caught.value.code, int)
        outcome = Outcome(caught.value.code, shown.out.decode(), shown.err.decode())
        assert outcome.code == code, outcome
        return outcome

    return invoke


@pytest.fixture
def run(alone: Run, broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same against the test's broker."""
    monkeypatch.setenv("MILLSTREAM_BROKER", broker.address)
    # The broker shares this process and would log into the output under test.
    set_up_logs(LogSettings(), io.StringIO())
    return alone


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_created_listed_shown_altered_and_deleted(run: Run) -> None:
    run("topic", "create", "orders.eu", "-p", "3", "-c", "retention_ms=2d")
    run("topic", "create", "orders.us")
    run("topic", "create", "prices", "-c", "cleanup=compact")
    assert [topic["name"] for topic in run("topic", "list", "--json").json] == ["orders.eu", "orders.us", "prices"]
    assert [topic["name"] for topic in run("topic", "list", "orders.*", "--json").json] == ["orders.eu", "orders.us"]
    assert "newest per key" in run("topic", "list", "prices").out
    shown = run("topic", "show", "orders.eu", "--json").json
    assert shown["config"]["retention_ms"] == 172_800_000
    assert [partition["partition"] for partition in shown["partitions"]] == [0, 1, 2]
    assert "2 d" in run("topic", "show", "orders.eu").out
    run("topic", "alter", "orders.eu", "--partitions", "4", "-c", "retention_ms=1h")
    assert run("topic", "show", "orders.eu", "--json").json["partition_count"] == 4
    run("topic", "delete", "orders.us", "--yes")
    assert run("topic", "show", "orders.us", code=1).err.startswith("error: ")


def test_deleting_without_a_terminal_needs_yes(run: Run) -> None:
    run("topic", "create", "orders")
    outcome = run("topic", "delete", "orders", code=2)
    assert "Add --yes to agree" in outcome.err
    assert run("topic", "list", "--json").json


def test_creating_twice_is_an_error_unless_told(run: Run) -> None:
    run("topic", "create", "orders")
    assert "[TOPIC_EXISTS]" in run("topic", "create", "orders", code=1).err
    run("topic", "create", "orders", "--if-missing")


def test_broker_errors_keep_their_code_and_hint(run: Run) -> None:
    error, hint = run("topic", "create", "a..b", code=1).err.splitlines()
    assert error.endswith("[INVALID_NAME]")
    assert hint.startswith("hint: ")
    assert "did you mean 'retention_ms'?" in run("topic", "create", "x", "-c", "retention=1", code=2).err


# --- messages --------------------------------------------------------------------------------------------------------


def test_published_values_have_receipts_and_can_be_consumed(run: Run) -> None:
    receipts = run("publish", "orders", "first", "second", "--key", "c-17", "-H", "source=test", "--json").json
    assert [(receipt["partition"], receipt["offset"], receipt["label"]) for receipt in receipts] == [
        (0, 0, "disk"),
        (0, 1, "disk"),
    ]
    assert run("consume", "orders", "--no-follow").lines == ["first", "second"]
    documents = [json.loads(line) for line in run("consume", "orders", "--max", "2", "--json").lines]
    assert [document["id"] for document in documents] == [receipt["id"] for receipt in receipts]
    assert documents[0]["key"] == "c-17"
    assert documents[0]["headers"] == {"source": "test"}
    assert run("consume", "orders", "--max", "1", "--format", "{partition}:{offset} {key}={value}").lines == [
        "0:0 c-17=first"
    ]


def test_lines_of_a_pipe_become_messages_in_order(run: Run) -> None:
    lines = [f"line {number}" for number in range(5000)]
    summary = run("publish", "log", "--json", given="\n".join(lines).encode() + b"\n").json
    assert summary["messages"] == 5000
    assert run("consume", "log", "--no-follow").lines == lines


def test_files_whole_files_keyed_lines_and_compression(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"k1:v1\nk2:v2:w")
    run("publish", "keyed", "--file", str(file), "--key-separator", ":", "--compression", "zstd")
    assert run("consume", "keyed", "--no-follow", "--format", "{key}|{value}").lines == ["k1|v1", "k2|v2:w"]
    run("publish", "whole", "--file", str(file), "--whole")
    assert run("consume", "whole", "--no-follow").out == "k1:v1\nk2:v2:w\n"
    assert "cannot read" in run("publish", "whole", "--file", str(tmp_path / "none"), code=2).err


def test_a_topic_can_be_copied_through_json_lines(run: Run) -> None:
    run("publish", "a", "one", "--key", "k", "-H", "h=1")
    run("publish", "a", "--key", "k", "--tombstone")
    copied = run("consume", "a", "--no-follow", "--json").out
    run("publish", "b", "--json-lines", given=copied.encode())
    first, second = (json.loads(line) for line in run("consume", "b", "--no-follow", "--json").lines)
    assert (first["key"], first["value"], first["headers"]) == ("k", "one", {"h": "1"})
    assert (second["key"], second["value"]) == ("k", None)


def test_what_a_message_asks_for_is_published_shown_and_copied(run: Run) -> None:
    run("topic", "create", "a", "-p", "2", "--config", "dedup_window_ms=1h")
    options = ("--priority", "critical", "--ttl", "1h", "--dedup-id", "d-1", "--max-retries", "3")
    run("publish", "a", "one", "-p", "1", *options)
    again = run("publish", "a", "one", "-p", "1", *options, "--json").json
    assert [receipt["duplicate"] for receipt in again] == [True]
    assert "duplicate" in run("publish", "a", "one", "-p", "1", *options).out
    assert "duplicate" not in run("publish", "c", "one").out
    assert run("consume", "a", "--no-follow", "--format", "{priority} {value}").out == "0 one\n"
    (line,) = run("consume", "a", "--no-follow", "--json").lines
    shown = json.loads(line)
    assert (shown["partition"], shown["priority"]) == (1, 0)
    left_ms = shown["expiry_ms"] - shown["timestamp_ms"]
    assert 3_599_000 < left_ms <= 3_601_000
    run("publish", "b", "--json-lines", given=line.encode())
    copy = json.loads(run("consume", "b", "--no-follow", "--json").out)
    assert copy["priority"] == 0
    assert abs(copy["expiry_ms"] - shown["expiry_ms"]) < 1000
    assert copy["timestamp_ms"] == shown["timestamp_ms"]
    run("publish", "a", "--json-lines", "--priority", "low", given=b'{"value": "two", "partition": 1}\n')
    assert run("consume", "a", "-p", "1", "--no-follow", "--format", "{priority} {value}").lines == ["0 one", "3 two"]


def test_what_cannot_be_asked_for_is_said(run: Run) -> None:
    assert "priority is one of critical" in run("publish", "a", "x", "--priority", "urgent", code=2).err
    assert "not a length of time" in run("publish", "a", "x", "--ttl", "soon", code=2).err
    assert "--dedup-id names one message" in run("publish", "a", "x", "y", "--dedup-id", "d", code=2).err
    refused = run("publish", "a", "--json-lines", given=b'{"value": "x", "priority": "urgent"}', code=2).err
    assert "message 1: priority is one of critical" in refused


def test_consuming_starts_where_told(run: Run) -> None:
    run("publish", "orders", *"abcde")
    assert run("consume", "orders", "--no-follow", "--from", "3").lines == ["d", "e"]
    assert run("consume", "orders", "--no-follow", "--from", "latest").lines == []
    assert run("consume", "orders", "--no-follow", "--from", "1h").lines == list("abcde")
    assert run("consume", "orders", "--from", "latest", "--timeout", "200ms").lines == []
    assert run("consume", "orders", "--no-follow", "--from", "99").lines == []
    assert "[OFFSET_OUT_OF_RANGE]" in run("consume", "orders", "--from", "99", "--timeout", "5s", code=1).err


def test_consuming_an_empty_topic_without_following_ends(run: Run) -> None:
    run("topic", "create", "empty", "-p", "4")
    assert run("consume", "empty", "--no-follow").lines == []


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_pattern_without_topics_has_come_to_its_end(run: Run) -> None:
    """It waited ten seconds for a partition, and then blamed a group that nobody had named."""
    began = time.monotonic()
    outcome = run("consume", "nothing.#", "--no-follow")
    assert (outcome.out, time.monotonic() - began < 5) == ("", True)
    assert "no topic matches nothing.#" in outcome.err
    assert "group" not in outcome.err


def test_a_scheduled_message_has_no_offset_yet(run: Run) -> None:
    """The receipt showed a 0, as if it were the first message of the topic."""
    run("publish", "reminders", "now")
    shown = run("publish", "reminders", "--delay", "1h", "later").lines
    assert shown[0].split() == ["id", "partition", "offset", "survives"]
    assert shown[2].split()[1:3] == ["0", "-"]


def test_what_was_published_before_a_failure_is_shown(run: Run) -> None:
    run("topic", "create", "small", "-c", "max_message_bytes=100")
    outcome = run("publish", "small", "first", "x" * 200, "third", code=1)
    assert len(outcome.lines) == 3, "one receipt under its heading"
    assert "value 2 of 3" in outcome.err
    assert run("consume", "small", "--no-follow").lines == ["first"]
    (receipt,) = run("publish", "small", "again", "x" * 200, "--json", code=1).json
    assert receipt["offset"] == 1
    outcome = run("publish", "small", given=b"a\nb\n" + b"x" * 200 + b"\nc\n", code=1)
    assert "published before it: 2 messages" in outcome.err
    outcome = run("publish", "small", "--key-separator", ":", given=b"k:d\nnothing\n", code=2)
    assert "line 2 has no separator" in outcome.err
    assert "published before it: 1 message\n" in outcome.err
    assert run("consume", "small", "--no-follow").lines == ["first", "again", "a", "b", "d"]


def test_a_group_goes_on_where_it_stopped_and_can_be_moved(run: Run) -> None:
    run("publish", "orders", *"abcde")
    assert run("consume", "orders", "--group", "audit", "--max", "2").lines == ["a", "b"]
    assert run("consume", "orders", "--group", "audit", "--no-follow").lines == ["c", "d", "e"]
    assert [group["name"] for group in run("group", "list", "--json").json] == ["audit"]
    (lag,) = run("group", "lag", "audit", "--json").json
    assert (lag["committed"], lag["lag"]) == (5, 0)
    planned = run("group", "reset", "audit", "orders", "--to", "shift:-2", "--dry-run", "--json").json
    assert planned == {
        "group": "audit",
        "dry_run": True,
        "offsets": [{"topic": "orders", "partition": 0, "from": 5, "to": 3}],
    }
    assert run("group", "lag", "audit", "--json").json[0]["lag"] == 0
    asked = run("group", "reset", "audit", "orders", "--to", "shift:-2", "--json", code=2)
    assert "moves by" in asked.err, "who is asked must see what for"
    assert asked.out == ""
    run("group", "reset", "audit", "orders", "--to", "shift:-2", "--yes")
    assert "audit" in run("group", "show", "audit").out
    assert run("consume", "orders", "--group", "audit", "--no-follow").lines == ["d", "e"]
    run("group", "delete", "audit", "--yes")
    assert run("group", "list", "--json").json == []
    assert "[GROUP_NOT_FOUND]" in run("group", "show", "audit", code=1).err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0)])
def test_a_consumer_that_is_stopped_has_committed_what_it_printed(run: Run, number: int, code: int) -> None:
    """Ctrl-C, `timeout` and container managers: none of them may make a group read everything again."""
    run("publish", "orders", *"abc")
    process = subprocess.Popen(
        [*MILLSTREAM, "consume", "orders", "--group", "audit"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["a\n", "b\n", "c\n"]
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, "")
    (lag,) = run("group", "lag", "audit", "--json").json
    assert (lag["committed"], lag["member_id"]) == (3, None), "committed, and the member has left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("arguments", "endless"),
    [("consume orders", True), ("subscribe orders", True), ("lease orders --wait 30s", False), ("publish x", False)],
)
def test_a_signal_ends_readers_and_cuts_everything_else_short(
    run: Run, arguments: str, endless: bool, number: int
) -> None:
    """Sent twice, as `timeout` does."""
    run("topic", "create", "orders")
    process = subprocess.Popen(
        [*MILLSTREAM, *arguments.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        before: set[str] = set()
        # Whoever is there twice in a row is not one of these calls itself.
        while not before & (now := {each["id"] for each in run("admin", "connections", "--json").json}):
            assert process.poll() is None, process.communicate()
            before = now
        process.send_signal(number)
        process.send_signal(number)
        process.wait(20)
    finally:
        process.kill()
        _, err = process.communicate()
    assert (process.returncode, err) == (0 if endless else 128 + number, "")


def test_a_member_can_be_evicted(run: Run) -> None:
    run("topic", "create", "orders")
    process = subprocess.Popen(
        [*MILLSTREAM, "consume", "orders", "--group", "audit"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (groups := run("group", "list", "--json").json) or not groups[0]["members"]:
            assert process.poll() is None, process.communicate()
        member = run("group", "show", "audit", "--json").json["members"][0]["member_id"]
        assert "[GROUP_NOT_EMPTY]" in run("group", "reset", "audit", "orders", "--to", "earliest", "--yes", code=1).err
        refused = run("group", "evict", "audit", "nobody", code=1).err
        assert "[UNKNOWN_MEMBER]" in refused
        assert "`millstream group show GROUP` lists the members" in refused, "the hint says what to do next"
        run("group", "evict", "audit", member)
    finally:
        process.kill()
        process.communicate()


def test_a_member_of_any_name_can_be_evicted(run: Run, broker: BrokerForTests) -> None:
    run("topic", "create", "orders")
    with connect(broker.address, client_id="worker [/x]") as client, client.stream("orders", group="audit"):
        while not (group := run("group", "show", "audit", "--json").json)["members"]:
            time.sleep(0.05)
        member = group["members"][0]["member_id"]
        assert "[/x]" in member
        assert f"evicted {member} from group audit" in run("group", "evict", "audit", member).out


# --- the rest --------------------------------------------------------------------------------------------------------


def test_namespaces_are_worlds_of_their_own(run: Run) -> None:
    run("namespace", "create", "team-a")
    run("publish", "orders", "hidden", "--namespace", "team-a")
    assert run("topic", "list", "--json").json == []
    assert run("namespace", "list", "--json").json == ["default", "team-a"]
    assert "[NAMESPACE_NOT_EMPTY]" in run("namespace", "delete", "team-a", "--yes", code=1).err
    run("namespace", "delete", "team-a", "--force", "--yes")
    assert run("namespace", "list", "--json").json == ["default"]


def test_status(run: Run) -> None:
    assert run("status", "--json").json["mode"] == "normal"
    assert "uptime" in run("status").out


def test_status_shows_what_has_happened_and_the_rest_if_asked(run: Run) -> None:
    """Eighty zeros hid the two numbers that were none."""
    run("publish", "orders", "hello")
    assert "messages published" in run("status").out
    assert "messages rejected" not in run("status").out
    assert "messages rejected" in run("status", "--all").out
    assert run("status", "--json").json["metrics"]["millstream_messages_rejected"] == 0


def test_who_takes_the_port_of_the_dashboard_is_told_which_to_take(alone: Run) -> None:
    with BrokerForTests(http=True) as broker:
        refused = alone("status", "--broker", broker.url.removeprefix("http://"), code=3)
    assert "it speaks HTTP; take the port of the native protocol, 9092 unless set otherwise" in refused.err


def test_why_about_a_topic_says_how_to_name_a_queue(run: Run) -> None:
    refused = run("why", "orders", code=1)
    assert "for a queue write TOPIC/GROUP: `millstream queue list` names them" in refused.err


def test_nobody_there_is_exit_code_3(alone: Run) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    said = alone("status", "--broker", address, code=3).err
    assert said.startswith("error: ")
    assert address in said
    assert "Traceback" not in said


def test_a_pipe_that_closes_ends_consume_quietly(run: Run, broker: BrokerForTests) -> None:
    run("publish", "log", given=b"".join(b"%d\n" % number for number in range(20_000)))
    done = subprocess.run(
        f"{sys.executable} -m millstream consume log --broker {broker.address} | head -2",
        shell=True,
        capture_output=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == (b"0\n1\n", b"")


@pytest.mark.parametrize("mode", [["publish"], ["publish", "--one-by-one"], ["consume"], ["both"]])
def test_bench_reports_what_it_moved(run: Run, mode: list[str]) -> None:
    results = run("bench", *mode, "--messages", "200", "--json").json
    assert all(result["messages"] == 200 for result in results.values())
    assert run("topic", "list", "--json").json == [], "the benchmark's topic is gone"


def test_members_of_a_benchmark_do_not_read_what_another_has_read(run: Run) -> None:
    """Who was through left without a commit, and the others read its last messages once more: twice as many, if few."""
    command = ("bench", "consume", "--messages", "500", "--consumers", "2", "--partitions", "2", "--json")
    assert run(*command).json["consume"]["messages"] == 500


def test_bench_latency(run: Run) -> None:
    results = run("bench", "latency", "--rate", "200", "--seconds", "1", "--json").json
    assert results["consume"]["messages"] == 200
    assert results["consume"]["latency_us"]["p50"] > 0


# --- serve -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker as a user starts it, and its address."""
    process = subprocess.Popen(
        [*MILLSTREAM, "serve", "--port", "0", "--http-port", "0", "--mqtt-port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:"), process.communicate()
        yield process, line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


def millstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MILLSTREAM, *arguments], capture_output=True, text=True, timeout=60)


def test_serve_publish_stop_serve_consume(alone: Run, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with serving("--data", data) as (process, address):
        alone("publish", "orders", "kept", "--broker", address)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert out == "", "nothing but the address goes to standard output"
        assert all(json.loads(line)["event"] for line in err.splitlines()), "the log is JSON where there is no terminal"
    with serving("--data", data) as (process, address):
        assert alone("consume", "orders", "--no-follow", "--broker", address).out == "kept\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_second_broker_on_the_same_data_is_refused(alone: Run, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with serving("--data", data) as (process, _):
        second = millstream("serve", "--data", data, "--port", "0")
        assert second.returncode == 4
        assert f"process {process.pid}" in second.stderr
        assert "[DATA_DIR_LOCKED]" in second.stderr
        alone("log", "verify", data, code=4)


def test_a_port_in_use_is_said_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = millstream("serve", "--data", str(tmp_path / "data"), "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_is_no_data_directory(tmp_path: Path) -> None:
    """`File exists; let this user write there` helped nobody."""
    (tmp_path / "orders.log").touch()
    for data in ("orders.log", "orders.log/data"):
        done = millstream("serve", "--data", str(tmp_path / data), "--port", "0")
        assert done.returncode == 1
        assert "is or lies in a file; choose another --data" in done.stderr


def test_a_bad_setting_stops_serve_before_anything_is_touched(alone: Run, tmp_path: Path) -> None:
    config = tmp_path / "millstream.yaml"
    config.write_text("storage:\n  fsinc: always\n", encoding="utf-8")
    said = alone("serve", "--data", str(tmp_path / "data"), "--config", str(config), code=2).err
    assert "unknown setting 'storage.fsinc'" in said
    assert "did you mean 'storage.fsync'?" in said
    assert not (tmp_path / "data").exists()


def test_a_variable_that_sets_nothing_is_said_so(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_SERVER_PORT", "9192")
    shown = alone("config", "show", "--json")
    assert shown.json["server.port"] == {"value": 9092, "from": "default"}
    assert "did you mean MILLSTREAM_SERVER__PORT?" in shown.err


# --- log -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped_data(tmp_path: Path) -> Path:
    data = tmp_path / "stopped"
    with BrokerForTests(data) as broker:
        client = broker.connect()
        for value in ("first", "second", "third"):
            client.publish("orders", value, key="k")
    return data


def test_a_good_directory_verifies_and_can_be_dumped(alone: Run, stopped_data: Path) -> None:
    (partition,) = alone("log", "verify", str(stopped_data), "--topic", "orders", "--json").json
    assert partition["directory"] == "topics/default/orders/0"
    assert sum(segment["messages"] for segment in partition["segments"]) == 3
    alone("log", "verify", str(stopped_data))
    dumped = alone("log", "dump", str(stopped_data), "--topic", "orders", "--from", "1", "--json")
    documents = [json.loads(line) for line in dumped.lines]
    assert [(d["offset"], d["key"], d["value"]) for d in documents] == [(1, "k", "second"), (2, "k", "third")]
    limited = alone("log", "dump", str(stopped_data), "--topic", "orders", "--max", "1")
    assert [line.split("\t")[-1] for line in limited.lines] == ["first"]
    batches = alone("log", "dump", str(stopped_data), "--topic", "orders", "--batches", "--json")
    assert [json.loads(line)["first_offset"] for line in batches.lines] == [0, 1, 2]


def test_a_dump_whose_reader_leaves_is_no_failure(stopped_data: Path) -> None:
    """`millstream log dump ... | head -1`: it said that the directory cannot be read."""
    with BrokerForTests(stopped_data) as broker, broker.connect().producer("orders") as producer:
        for number in range(3000):
            producer.send(f"{number:050}")
    dumping = subprocess.Popen(
        [*MILLSTREAM, "log", "dump", str(stopped_data), "--topic", "orders"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert dumping.stdout is not None
    assert dumping.stderr is not None
    assert dumping.stdout.readline().endswith(b"first\n")
    dumping.stdout.close()
    assert (dumping.stderr.read(), dumping.wait(30)) == (b"", 0)
    dumping.stderr.close()


def test_a_dump_onto_a_full_disk_does_not_blame_the_data(stopped_data: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*MILLSTREAM, "log", "dump", str(stopped_data), "--topic", "orders"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert b"the output cannot be written" in done.stderr


def test_a_dump_shows_keys_that_are_not_text_as_tables_do(alone: Run, tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        broker.connect().publish("orders", b"\xfe!", key=b"\xff")
    dumped = alone("log", "dump", str(tmp_path), "--topic", "orders")
    assert dumped.lines[0].split("\t")[2:] == ["\\xff", "\\xfe!"]


def test_a_flipped_bit_is_found(alone: Run, stopped_data: Path) -> None:
    (segment,) = (stopped_data / "topics" / "default" / "orders" / "0").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    verified = alone("log", "verify", str(stopped_data), code=4)
    assert "are damaged" in verified.out
    assert "millstream restore" in verified.err, "the hint says what to do next"
    assert segment.read_bytes() == content, "verify only reads"


def test_messages_whose_state_is_gone_can_still_be_read(alone: Run, stopped_data: Path) -> None:
    shutil.rmtree(stopped_data / "state")
    dumped = alone("log", "dump", str(stopped_data), "--topic", "orders", "--max", "1")
    assert [line.split("\t")[-1] for line in dumped.lines] == ["first"]
    refused = alone("serve", "--data", str(stopped_data), "--port", "0", code=1).err
    assert "lacks state/topics" in refused


def test_what_is_not_a_data_directory_is_left_alone(alone: Run, tmp_path: Path) -> None:
    assert "is not a data directory" in alone("log", "verify", str(tmp_path), code=2).err
    assert os.listdir(tmp_path) == []


def test_what_is_scheduled_can_be_seen_moved_and_cancelled(run: Run) -> None:
    published = run("publish", "reminders", "--delay", "10m", "--key", "c-17", "--json", "call back", "and again").json
    assert all(receipt["scheduled"] for receipt in published)
    first, second = (receipt["id"] for receipt in published)
    listed = run("schedule", "list", "reminders", "--before", "1h", "--json").json
    assert [(entry["id"], entry["key"]) for entry in listed] == [(first, "c-17"), (second, "c-17")]
    assert "9 m" in run("schedule", "list", "reminders").out
    assert run("schedule", "show", first, "--json").json["value"] == "call back"
    assert "call back" in run("schedule", "show", first).out
    run("schedule", "move", first, "2h")
    assert [entry["id"] for entry in run("schedule", "list", "reminders", "--json").json] == [second, first]
    run("schedule", "cancel", first)
    refused = run("schedule", "cancel", first, "0" * 26, "--json", code=1).json
    assert refused["cancelled"] == 1
    assert refused["refused"][0]["code"] == "SCHEDULE_NOT_FOUND"
    assert run("schedule", "cancel", "--topic", "reminders", "--key", "c-17", "--yes").out == "cancelled 1 message\n"
    stats = run("schedule", "stats", "--json").json
    assert (stats[0]["pending"], stats[0]["cancelled"]) == (0, 2)
    assert "nothing is scheduled" in run("schedule", "list", "reminders").err
    run("schedule", "cancel", code=2)
    assert "is not a time" in run("schedule", "move", second, "soon", code=2).err
    run("publish", "reminders", "--delay", "1m", "--deliver-at", "2030-01-01", "x", code=2)


def test_recurring_schedules(run: Run) -> None:
    options = ("-z", "Europe/Berlin", "--priority", "high", "--json")
    made = run("schedule", "repeat", "nightly", "reports", "0 3 * * *", "go", *options).json
    assert made["priority"] == 1
    assert (made["name"], made["value"], made["published"]) == ("nightly", "go", 0)
    assert "0 3 * * * (Europe/Berlin)" in run("schedule", "repeating", "nightly").out
    assert run("schedule", "pause", "nightly", "--json").json["paused"] is True
    assert "paused" in run("schedule", "repeating").out
    run("schedule", "resume", "nightly")
    run("schedule", "stop", "nightly", "--yes")
    assert run("schedule", "repeating", "--json").json == []
    assert "cron expression" in run("schedule", "repeat", "x", "reports", "whenever", "go", code=1).err


@pytest.mark.parametrize(
    ("prepare", "command", "expected"),
    [
        ((), ("namespace", "create", "team-a"), {"namespace": "team-a", "created": True}),
        (("namespace", "create", "a"), ("namespace", "delete", "a", "--yes"), {"namespace": "a", "deleted": True}),
        (("topic", "create", "a"), ("topic", "delete", "a", "--yes"), {"topic": "a", "deleted": True}),
        (
            ("schedule", "repeat", "tick", "a", "@daily", "go"),
            ("schedule", "stop", "tick", "--yes"),
            {"schedule": "tick", "deleted": True},
        ),
    ],
)
def test_what_was_changed_is_said_to_programs_too(
    run: Run, prepare: tuple[str, ...], command: tuple[str, ...], expected: dict[str, object]
) -> None:
    if prepare:
        run(*prepare)
    assert run(*command, "--json").json == expected
